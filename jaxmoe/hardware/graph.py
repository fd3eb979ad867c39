"""A network of any form, with a given path between every two nodes."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware.paths import Hops, TopologyError, index_links, listed
from jaxmoe.hardware.topology import AbstractTopology


class Graph(AbstractTopology):
    """Nodes, switches and links in any arrangement; see `AbstractTopology` for its numbers.

    Paths lie one after the other, by source and then by destination: hop `i` of all hops is over link `hop_link[i]`, on
    the path of the pair `hop_pair[i]` = source * nodes + destination. `build_graph` makes one and checks it. All of
    these are arrays, so that one program serves every graph of a size.
    """

    nodes: int = eqx.field(static=True, kw_only=True)
    ends: Int[Array, "link 2"] = eqx.field(kw_only=True)
    back: Int[Array, " link"] = eqx.field(kw_only=True)  # the link that runs the other way
    hop_link: Int[Array, " hop"] = eqx.field(kw_only=True)
    hop_pair: Int[Array, " hop"] = eqx.field(kw_only=True)
    vertices: Float[Array, "vertex 2"] = eqx.field(kw_only=True)  # where to draw them

    @property
    def num_nodes(self) -> int:
        return self.nodes

    @property
    def reverse_links(self) -> Int[Array, " link"]:
        return self.back

    @property
    def link_ends(self) -> Int[np.ndarray, "link 2"]:
        return np.asarray(self.ends)

    def hops(self) -> Hops:
        return Hops(self.hop_link, self.hop_pair)

    def paths(self) -> list[list[tuple[int, ...]]]:
        return listed(self.hops(), self.num_nodes)

    def positions(self) -> Float[np.ndarray, "vertex 2"]:
        return np.asarray(self.vertices, float)


def build_graph(
    num_nodes: int,
    ends: Sequence[tuple[int, int]],
    link_bandwidth: Sequence[float | Float[Array, ""]] | Float[np.ndarray | Array, " link"],
    link_latency: Sequence[float | Float[Array, ""]] | Float[np.ndarray | Array, " link"],
    positions: Float[np.ndarray, "vertex 2"],
    routes: Mapping[tuple[int, int], Sequence[int]] | None = None,
) -> Graph:
    """A graph of directed links `ends` [(from, to)], in B/s and s; each must have one that runs the other way.

    `routes` gives the vertices of the path from one node to another, both included; pairs that it does not
    name take a path of the fewest hops, over the lowest-numbered vertices of equals. Raises `TopologyError`, but not
    for numbers that JAX traces.
    """
    given: Mapping[tuple[int, int], Sequence[int]] = routes or {}
    _check_nodes(num_nodes, len(positions), given)
    index = index_links(ends, len(positions), num_nodes)
    if not any(isinstance(number, jax.core.Tracer) for number in jax.tree.leaves((link_bandwidth, link_latency))):
        _check_numbers(ends, np.asarray(link_bandwidth, float), np.asarray(link_latency, float))
    hop_link: list[int] = []
    hop_pair: list[int] = []
    for source in range(num_nodes):
        before: list[int] = []
        for destination in range(num_nodes):
            path = given.get((source, destination))
            if path is None:
                before = before or _paths_from(source, len(positions), ends)
                path = _walk_back(before, source, destination)
            links = _links_of(path, source, destination, index)
            hop_link += links
            hop_pair += [source * num_nodes + destination] * len(links)
    return Graph(
        nodes=num_nodes,
        ends=_whole(np.reshape(ends, (-1, 2))),
        back=_whole([index[end, start] for start, end in ends]),
        hop_link=_whole(hop_link),
        hop_pair=_whole(hop_pair),
        vertices=jnp.asarray(np.asarray(positions, np.float32), jnp.float32),
        link_bandwidth=jnp.asarray(link_bandwidth, jnp.float32),
        link_latency=jnp.asarray(link_latency, jnp.float32),
    )


def _whole(numbers: Sequence[int] | np.ndarray) -> Int[Array, "..."]:
    """Whole numbers, by way of NumPy: nothing is compiled for as many of them as there were not before."""
    return jnp.asarray(np.asarray(numbers, np.int32), jnp.int32)


def _check_nodes(nodes: int, vertices: int, routes: Mapping[tuple[int, int], Sequence[int]]) -> None:
    if not 1 <= nodes <= vertices:
        raise TopologyError(
            f"{nodes} nodes and {vertices} positions are given, expected a node and a position for each"
        )
    for source, destination in routes:
        if not (0 <= source < nodes and 0 <= destination < nodes):
            raise TopologyError(f"there is a path from {source} to {destination}, but nodes are 0..{nodes - 1}")


def _check_numbers(ends: Sequence[tuple[int, int]], bandwidth: np.ndarray, latency: np.ndarray) -> None:
    if not len(ends) == len(bandwidth) == len(latency):
        raise TopologyError(f"{len(ends)} links have {len(bandwidth)} bandwidths and {len(latency)} latencies")
    for (start, end), rate, delay in zip(ends, bandwidth, latency, strict=True):
        if not 0 < rate < np.inf:
            raise TopologyError(
                f"the link from {start} to {end} has bandwidth {rate:g} B/s, expected a finite one above zero"
            )
        if not 0 <= delay < np.inf:
            raise TopologyError(
                f"the link from {start} to {end} has latency {delay:g} s, expected a finite one, zero or more"
            )


def _paths_from(source: int, vertices: int, ends: Sequence[tuple[int, int]]) -> list[int]:
    """The vertex before each one on a shortest path from the source, found breadth first; -1 if there is none."""
    neighbours: list[list[int]] = [[] for _ in range(vertices)]
    for start, end in sorted(ends):
        neighbours[start].append(end)
    before, waiting = [-1] * vertices, deque([source])
    before[source] = source
    while waiting:
        at = waiting.popleft()
        for beyond in neighbours[at]:
            if before[beyond] < 0:
                before[beyond] = at
                waiting.append(beyond)
    return before


def _walk_back(before: list[int], source: int, destination: int) -> list[int]:
    if before[destination] < 0:
        raise TopologyError(f"no links lead from node {source} to node {destination}; the network must be connected")
    vertices = [destination]
    while vertices[-1] != source:
        vertices.append(before[vertices[-1]])
    return vertices[::-1]


def _links_of(
    vertices: Sequence[int], source: int, destination: int, index: Mapping[tuple[int, int], int]
) -> list[int]:
    if [*vertices[:1], *vertices[-1:]] != [source, destination]:
        raise TopologyError(
            f"the path from {source} to {destination} is {[*vertices]}; write all its vertices, both ends included"
        )
    if len(set(vertices)) < len(vertices):
        raise TopologyError(f"the path from {source} to {destination}, {[*vertices]}, passes a vertex twice")
    steps = list(pairwise(vertices))
    for step in steps:
        if step not in index:
            raise TopologyError(
                f"the path from {source} to {destination} uses a link from {step[0]} to {step[1]}, "
                "but there is none; add the link or change the path"
            )
    return [index[step] for step in steps]
