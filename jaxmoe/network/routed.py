"""Loads of the links of a graph under its given paths: sums over the hops of all paths."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import Graph


def link_loads(graph: Graph, traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    """What every directed link carries, in the unit of `traffic` [source, destination]."""
    return jax.ops.segment_sum(traffic.ravel()[graph.hop_pair], graph.hop_link, graph.num_links)


def tree_loads(
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


def path_maxima(graph: Graph, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Largest value of a non-negative per-link quantity along every path; 0 for a node to itself."""
    pairs = graph.num_nodes**2
    largest = jax.ops.segment_max(per_link[graph.hop_link], graph.hop_pair, pairs, indices_are_sorted=True)
    return jnp.maximum(largest, 0).reshape(graph.num_nodes, graph.num_nodes)
