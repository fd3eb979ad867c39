"""Loads of links and sums along paths, on any network.

Both are one linear map A, links x pairs, and its transpose: loads = A traffic, path sums = A' per_link. A mesh
works them out by prefix sums, a graph by sums over its hops; neither builds A. A YX path is the XY path of the
way back, walked backwards, so YX loads are those of the transposed traffic on reversed links.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import AbstractTopology, Graph, Mesh
from jaxmoe.network import xy
from jaxmoe.placement.exchange import ExchangeError
from jaxmoe.relax import OneOf, as_weights


def _routed_link_loads(graph: Graph, traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    """What every directed link carries, in the unit of `traffic` [source, destination]."""
    return jax.ops.segment_sum(traffic.ravel()[graph.hop_pair], graph.hop_link, graph.num_links)


def _routed_tree_loads(
    graph: Graph,
    source: Float[Array, "flow node"],
    destination: Float[Array, "flow node"],
    weight: Float[Array, " flow"],
) -> Float[Array, " link"]:
    """Loads of trees: in flow f every node with a source of 1 sends one vector to the destination, merged on the way.

    `destination` is 1 at one node of a flow, or a distribution over nodes, each with a tree of its own.
    """
    nodes, links = graph.num_nodes, graph.num_links
    start, stop = graph.hop_pair // nodes, graph.hop_pair % nodes

    def tree(given: tuple[Float[Array, " node"], Float[Array, " node"]]) -> Float[Array, " link"]:
        source, destination = given
        passing = jax.ops.segment_sum(source[start], stop * links + graph.hop_link, nodes * links)
        return destination @ jnp.minimum(passing, 1).reshape(nodes, links)

    return weight @ jax.lax.map(tree, (source, destination), batch_size=16)


@jax.jit
def _routed_path_sums(graph: Graph, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Sum of a per-link quantity along every path."""
    pairs = graph.num_nodes**2
    sums = jax.ops.segment_sum(per_link[graph.hop_link], graph.hop_pair, pairs, indices_are_sorted=True)
    return sums.reshape(graph.num_nodes, graph.num_nodes)


@jax.jit
def _routed_path_maxima(graph: Graph, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Largest value of a non-negative per-link quantity along every path; 0 for a node to itself."""
    pairs = graph.num_nodes**2
    largest = jax.ops.segment_max(per_link[graph.hop_link], graph.hop_pair, pairs, indices_are_sorted=True)
    return jnp.maximum(largest, 0).reshape(graph.num_nodes, graph.num_nodes)


def link_loads(topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    """What every directed link carries, in the unit of `traffic` [source, destination]; the diagonal is free."""
    match topology:
        case Mesh(routing="xy"):
            return xy.link_loads(topology.shape, traffic)
        case Mesh(routing="yx"):
            return xy.link_loads(topology.shape, traffic.T)[topology.reverse_links]
        case Graph():
            return _routed_link_loads(topology, traffic)
    raise _unknown(topology)


def flow_loads(
    topology: AbstractTopology, source: Float[Array, "flow node"], destination: OneOf
) -> Float[Array, " link"]:
    """Loads of flows that send source[f, n] from node n to the flow's node, or to all in the parts given."""
    if isinstance(topology, Mesh) and topology.routing == "xy":
        return xy.flow_traffic(topology.shape, source, destination).link_loads()
    parts = as_weights(destination, topology.num_nodes, source.dtype)
    if isinstance(topology, Mesh):
        return xy.flow_traffic(topology.shape, parts, source).link_loads()[topology.reverse_links]
    return link_loads(topology, source.T @ parts)


def tree_loads(
    topology: AbstractTopology,
    source: Float[Array, "flow node"],
    destination: OneOf,
    weight: Float[Array, " flow"],
) -> Float[Array, " link"]:
    """Loads of trees towards one destination each, in which a link carries one vector of every flow.

    A tree is the union of the network's paths from the sources to the destination.
    """
    match topology:
        case Mesh(shape=shape, routing=routing):
            return xy.tree_loads(shape, source, destination, weight, crossed=routing == "yx")
        case Graph():
            towards = as_weights(destination, topology.num_nodes, source.dtype)
            return _routed_tree_loads(topology, source, towards, weight)
    raise _unknown(topology)


def crossed(topology: AbstractTopology) -> Mesh:
    """A mesh whose packets take the other order of directions. Raises `ExchangeError` for any other network."""
    if not isinstance(topology, Mesh):
        raise ExchangeError(
            f"a {type(topology).__name__} has one path between two nodes, so no cross_tree or split_tree; "
            "use tree, or unicasts"
        )
    return replace(topology, routing="yx" if topology.routing == "xy" else "xy")


def path_sums(topology: AbstractTopology, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Sum of a per-link quantity along the path of every [source, destination] pair."""
    match topology:
        case Mesh(shape=shape, routing=routing):
            return xy.path_sums(shape, per_link, crossed=routing == "yx")
        case Graph():
            return _routed_path_sums(topology, per_link)
    raise _unknown(topology)


def path_maxima(topology: AbstractTopology, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Largest value of a non-negative per-link quantity along every path; 0 for a node to itself."""
    match topology:
        case Mesh(shape=shape, routing=routing):
            return xy.path_maxima(shape, per_link, crossed=routing == "yx")
        case Graph():
            return _routed_path_maxima(topology, per_link)
    raise _unknown(topology)


def _unknown(topology: AbstractTopology) -> TypeError:
    return TypeError(f"loads of a {type(topology).__name__} are not known; use a Mesh or a Graph")
