"""From tokens to traffic, from traffic to link loads, from link loads to communication time."""

from jaxmoe.network.exchange import AbstractExchange as AbstractExchange
from jaxmoe.network.exchange import FewestHops as FewestHops
from jaxmoe.network.exchange import LowestHost as LowestHost
from jaxmoe.network.exchange import RingReduce as RingReduce
from jaxmoe.network.exchange import block_rings as block_rings
from jaxmoe.network.exchange import whole_ring as whole_ring
from jaxmoe.network.loads import link_loads as link_loads
from jaxmoe.network.loads import path_sums as path_sums
from jaxmoe.network.time_models import AbstractTimeModel as AbstractTimeModel
from jaxmoe.network.time_models import AlphaBeta as AlphaBeta
from jaxmoe.network.time_models import Congestion as Congestion
from jaxmoe.network.time_models import Uncongested as Uncongested
from jaxmoe.network.time_models import alpha_beta as alpha_beta
from jaxmoe.network.traffic import Flows as Flows
from jaxmoe.network.traffic import StageTime as StageTime
from jaxmoe.network.visits import Visits as Visits
from jaxmoe.network.visits import replicated_visits as replicated_visits
from jaxmoe.network.visits import sharded_visits as sharded_visits
