"""Loads of one round of flows on every link, and on the ports where these limit."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.flows import FlowLoads, Flows
from jaxmoe.network.loads import crossed, flow_loads, tree_loads
from jaxmoe.relax import largest


def round_loads(topology: AbstractTopology, flows: Flows) -> FlowLoads:
    """Loads of one round of flows. They depend on the paths of the network alone, and none of its numbers."""
    if flows.carried is not None:
        link = flows.carried * flows.vectors
    elif flows.route == "unicast":
        sent, vectors = _sent(flows)
        link = flow_loads(topology, sent, flows.destination) * vectors
    else:
        along = crossed(topology) if flows.route == "cross_tree" else topology
        link = tree_loads(along, flows.source, flows.destination, _tree_weights(flows) * flows.vectors)
    limited = topology.injection_rate is not None or topology.ejection_rate is not None
    return FlowLoads(link, *(_port_loads(flows) if limited else ()))


def _port_loads(flows: Flows) -> tuple[Float[Array, " node"], Float[Array, " node"]]:
    """Vectors that every node sends to others, and receives from them.

    Of a tree, each visited node's vector passes its port once, and what has become of them all passes that of the home.
    """
    (sent, vectors), parts = _sent(flows), flows.parts()
    if flows.route == "unicast":
        received = parts * (sent.sum(axis=1, keepdims=True) - sent)
        return (sent * (1 - parts)).sum(axis=0) * vectors, received.sum(axis=0) * vectors
    weight, others = _tree_weights(flows) * flows.vectors, flows.source * (1 - parts)
    return weight @ others, weight @ (largest(others)[:, None] * parts)


def _tree_weights(flows: Flows) -> Float[Array, " flow"]:
    if flows.weight is None:
        raise ValueError(f"flows of the route {flows.route} have no weight; give each tree how many tokens take it")
    return flows.weight


def _sent(flows: Flows) -> tuple[Float[Array, "flow node"], Float[Array, ""]]:
    """Amount that every node sends into every flow, and the number of hidden vectors in one unit of that amount.

    Loads are linear in the amounts, so a size common to all messages is a factor applied at the end, which saves a
    pass over all flows.
    """
    sent = flows.source if flows.weight is None else flows.source * flows.weight[:, None]
    if flows.vectors.ndim:
        return sent * flows.vectors[:, None], jnp.ones((), sent.dtype)
    return sent, flows.vectors
