"""Multicast: one message to several nodes along the union of its paths, XY trees on a mesh.

A link carries the message once, however many destinations lie beyond it; routers make the copies.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.loads import flow_loads
from jaxmoe.network.time_models import Congestion, port_times
from jaxmoe.network.traffic import StageTime


class Multicasts(eqx.Module):
    """Messages sent at once, each from one node to every node where `destinations` is 1; itself is free.

    Entries of `destinations` may lie between 0 and 1 when relaxed. Sizes in B.
    """

    source: Int[Array, " multicast"]
    destinations: Float[Array, "multicast node"]
    size: Float[Array, " multicast"]


def multicast_loads(topology: AbstractTopology, multicasts: Multicasts) -> Float[Array, " link"]:
    """Bytes that every directed link carries."""
    sender = _sender(topology, multicasts)
    copies = jax.vmap(lambda source, to: flow_loads(topology, source[None], to[None]))(sender, multicasts.destinations)
    return multicasts.size @ jnp.minimum(copies, 1)


def multicast_stage(time_model: Congestion, topology: AbstractTopology, multicasts: Multicasts) -> StageTime:
    """Time of multicasts under congestion: the busiest link or port, and the delay of the longest path.

    A port of the sender is used once for a message. The other time models know no links: for them a multicast is
    its pairs.
    """
    sender = _sender(topology, multicasts)
    to = multicasts.destinations * (1 - sender)
    # Delays grow with the message, so the largest from node to node has the longest.
    nodes = topology.num_nodes
    largest = jnp.zeros((nodes, nodes), to.dtype).at[multicasts.source].max(multicasts.size[:, None] * to)
    sent = (multicasts.size * jnp.minimum(to.sum(axis=1), 1)) @ sender
    return StageTime(
        link_time=multicast_loads(topology, multicasts) / (topology.link_bandwidth * topology.efficiency),
        port_time=port_times(topology, sent, multicasts.size @ to),
        pair_time=jnp.zeros(0, to.dtype),
        path_delay=time_model(topology, largest).path_delay,
    )


def _sender(topology: AbstractTopology, multicasts: Multicasts) -> Float[Array, "multicast node"]:
    return jax.nn.one_hot(multicasts.source, topology.num_nodes, dtype=multicasts.destinations.dtype)
