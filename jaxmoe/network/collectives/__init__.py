"""Collectives as rounds of traffic, multicast along trees, and how long they take."""

from jaxmoe.network.collectives.broadcast import ChunkedBroadcast as ChunkedBroadcast
from jaxmoe.network.collectives.entwined import entwined_ring_all_gather as entwined_ring_all_gather
from jaxmoe.network.collectives.entwined import entwined_ring_all_reduce as entwined_ring_all_reduce
from jaxmoe.network.collectives.entwined import entwined_ring_reduce_scatter as entwined_ring_reduce_scatter
from jaxmoe.network.collectives.entwined import entwined_rings as entwined_rings
from jaxmoe.network.collectives.entwined import hierarchical_entwined_rings as hierarchical_entwined_rings
from jaxmoe.network.collectives.multicast import Multicasts as Multicasts
from jaxmoe.network.collectives.multicast import multicast_loads as multicast_loads
from jaxmoe.network.collectives.multicast import multicast_stage as multicast_stage
from jaxmoe.network.collectives.rings import ring_all_gather as ring_all_gather
from jaxmoe.network.collectives.rings import ring_all_reduce as ring_all_reduce
from jaxmoe.network.collectives.rings import ring_reduce_scatter as ring_reduce_scatter
from jaxmoe.network.collectives.rounds import Rounds as Rounds
from jaxmoe.network.collectives.rounds import all_to_all as all_to_all
from jaxmoe.network.collectives.rounds import collective_time as collective_time
