"""Loads of links and sums along paths, on any network.

Both are one linear map A, links x pairs, and its transpose: loads = A traffic, path sums = A' per_link. Any network
works them out by sums over the hops of its paths, a mesh by prefix sums; neither builds A. A YX path is the XY path
of the way back, walked backwards, so YX loads are those of the transposed traffic on reversed links.

Every function here dispatches on the class of the network: `link_loads.register(Mine)` gives a class a faster rule.
"""

from functools import singledispatch

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.network import xy
from jaxmoe.network.flows import FlowLoads, Flows
from jaxmoe.placement.exchange import ExchangeError
from jaxmoe.relax import OneOf, as_weights, largest


@singledispatch
def link_loads(topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    """Load of every directed link, in the unit of `traffic`, along the network's paths.

    `traffic[s, d]` is the amount sent from node s to node d; the diagonal, from a node to itself, loads no link.
    """
    link, pair = topology.hops()
    return jax.ops.segment_sum(traffic.ravel()[pair], link, topology.num_links)


@link_loads.register(Mesh)
def _mesh_link_loads(topology: Mesh, traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    if topology.routing == "xy":
        return xy.link_loads(topology.shape, traffic)
    return xy.link_loads(topology.shape, traffic.T)[topology.reverse_links]


@singledispatch
def flow_loads(
    topology: AbstractTopology, source: Float[Array, "flow node"], destination: OneOf
) -> Float[Array, " link"]:
    """Loads of flows that send source[f, n] from node n to the flow's node, or to all in the parts given."""
    return link_loads(topology, source.T @ as_weights(destination, topology.num_nodes, source.dtype))


@flow_loads.register(Mesh)
def _mesh_flow_loads(topology: Mesh, source: Float[Array, "flow node"], destination: OneOf) -> Float[Array, " link"]:
    if topology.routing == "xy":
        return xy.flow_traffic(topology.shape, source, destination).link_loads()
    parts = as_weights(destination, topology.num_nodes, source.dtype)
    return xy.flow_traffic(topology.shape, parts, source).link_loads()[topology.reverse_links]


@singledispatch
def tree_loads(
    topology: AbstractTopology,
    source: Float[Array, "flow node"],
    destination: OneOf,
    weight: Float[Array, " flow"],
) -> Float[Array, " link"]:
    """Loads of trees towards one destination each: in flow f every node with a source of 1 sends one vector.

    A tree is the union of the network's paths from the sources to the destination, and a link of it carries one vector:
    they are merged on the way. A destination that is a distribution over nodes has a tree to each, in parts.
    """
    nodes, links = topology.num_nodes, topology.num_links
    link, pair = topology.hops()
    start, stop = pair // nodes, pair % nodes

    def tree(given: tuple[Float[Array, " node"], Float[Array, " node"]]) -> Float[Array, " link"]:
        source, destination = given
        passing = jax.ops.segment_sum(source[start], stop * links + link, nodes * links)
        return destination @ jnp.minimum(passing, 1).reshape(nodes, links)

    towards = as_weights(destination, nodes, source.dtype)
    return weight @ jax.lax.map(tree, (source, towards), batch_size=16)


@tree_loads.register(Mesh)
def _mesh_tree_loads(
    topology: Mesh, source: Float[Array, "flow node"], destination: OneOf, weight: Float[Array, " flow"]
) -> Float[Array, " link"]:
    return xy.tree_loads(topology.shape, source, destination, weight, crossed=topology.routing == "yx")


@jax.custom_jvp
def known_loads(
    loads: Float[Array, " link"],
    topology: AbstractTopology,
    source: Float[Array, "flow node"],
    destination: OneOf,
    weight: Float[Array, " flow"],
) -> Float[Array, " link"]:
    """`loads` themselves, with the derivative of `tree_loads` of all else, which they equal."""
    return loads


@known_loads.defjvp
def _known_loads_jvp(primals, tangents):
    loads, topology, source, destination, weight = primals
    _, _, of_source, _, of_weight = tangents

    def followed(source, weight):
        return tree_loads(topology, source, destination, weight)

    return loads, jax.jvp(followed, (source, weight), (of_source, of_weight))[1]


@singledispatch
@jax.jit
def path_sums(topology: AbstractTopology, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Sum of a per-link quantity along the path of every [source, destination] pair."""
    (link, pair), nodes = topology.hops(), topology.num_nodes
    sums = jax.ops.segment_sum(per_link[link], pair, nodes**2, indices_are_sorted=True)
    return sums.reshape(nodes, nodes)


@path_sums.register(Mesh)
def _mesh_path_sums(topology: Mesh, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    return xy.path_sums(topology.shape, per_link, crossed=topology.routing == "yx")


@singledispatch
@jax.jit
def path_maxima(topology: AbstractTopology, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Largest value of a non-negative per-link quantity along every path; 0 for a node to itself."""
    (link, pair), nodes = topology.hops(), topology.num_nodes
    largest = jax.ops.segment_max(per_link[link], pair, nodes**2, indices_are_sorted=True)
    return jnp.maximum(largest, 0).reshape(nodes, nodes)


@path_maxima.register(Mesh)
def _mesh_path_maxima(topology: Mesh, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    return xy.path_maxima(topology.shape, per_link, crossed=topology.routing == "yx")


def port_times(
    topology: AbstractTopology, sent: Float[Array, " node"] | None, received: Float[Array, " node"] | None
) -> Float[Array, " port"]:
    """Seconds that every injection port, then every ejection port is busy; empty without port limits."""
    ports = ((sent, topology.injection_rate), (received, topology.ejection_rate))
    times = [amount / rate for amount, rate in ports if rate is not None and amount is not None]
    return jnp.concatenate([jnp.zeros(0, topology.link_rate.dtype), *times])


def path_peaks(
    topology: AbstractTopology, link_time: Float[Array, " link"], port_time: Float[Array, " port"]
) -> Float[Array, "node node2"]:
    """Largest of the times of all links and ports that a message from one node to another passes."""
    nodes, peaks = topology.num_nodes, path_maxima(topology, link_time)
    if topology.injection_rate is not None:
        peaks = jnp.maximum(peaks, port_time[:nodes, None])
    if topology.ejection_rate is not None:
        peaks = jnp.maximum(peaks, port_time[-nodes:])
    return peaks * (1 - jnp.eye(nodes, dtype=peaks.dtype))


def crossed(topology: AbstractTopology) -> AbstractTopology:
    """The network whose packets take directions in the other order. Raises `ExchangeError` where there is none."""
    other = topology.crossed()
    if other is None:
        raise ExchangeError(
            f"a {type(topology).__name__} has one path between two nodes, so no cross_tree or split_tree; "
            "use tree, or unicasts"
        )
    return other


# Loads of one round of flows on every link, and on the ports where these limit.


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
