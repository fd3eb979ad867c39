"""Loads of the links of a graph under its given paths: sums over the hops of all paths."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import Graph


def link_loads(graph: Graph, traffic: Float[Array, "node node2"]) -> Float[Array, " link"]:
    """What every directed link carries, in the unit of `traffic` [source, destination]."""
    return jax.ops.segment_sum(traffic.ravel()[graph.hop_pair], graph.hop_link, graph.num_links)


def path_maxima(graph: Graph, per_link: Float[Array, " link"]) -> Float[Array, "node node2"]:
    """Largest value of a non-negative per-link quantity along every path; 0 for a node to itself."""
    pairs = graph.num_nodes**2
    largest = jax.ops.segment_max(per_link[graph.hop_link], graph.hop_pair, pairs, indices_are_sorted=True)
    return jnp.maximum(largest, 0).reshape(graph.num_nodes, graph.num_nodes)
