"""Structure of a network, derived from its links and paths and checked: reverse links, hops, drawing positions."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.errors import InputError


class TopologyError(InputError):
    """A network that cannot be: disconnected, a path over a missing link, a bandwidth that is not positive."""


class Hops(NamedTuple):
    """Paths one after the other, by source and then by destination.

    Hop `i` is over link `link[i]`, on the path of the pair `pair[i]` = source * nodes + destination.
    """

    link: Int[np.ndarray | Array, " hop"]
    pair: Int[np.ndarray | Array, " hop"]


class Structure(NamedTuple):
    """A network without its numbers."""

    num_nodes: int
    reverse_links: Int[np.ndarray, " link"]
    hops: Hops
    positions: Float[np.ndarray, "vertex 2"]


def structure_of(link_ends: object, paths: Sequence[Sequence[Sequence[int]]]) -> Structure:
    """Derive a network from the ends of its links and from `paths[source][destination]`, the links of each in order.

    Raises `TopologyError` for a link that has no reverse or is given twice, and for a path that names a link that there
    is not, or whose links do not lead from its source to its destination.
    """
    ends, nodes = _checked_ends(link_ends), len(paths)
    if not nodes:
        raise TopologyError("paths() is empty, expected a row for every node")
    for source, row in enumerate(paths):
        if len(row) != nodes:
            raise TopologyError(f"paths()[{source}] has {len(row)} paths, expected one to each of {nodes} nodes")
    vertices = int(max(nodes - 1, ends.max(initial=0))) + 1
    pairs: list[tuple[int, int]] = [(start, end) for start, end in ends.tolist()]
    index = index_links(pairs, vertices, nodes)
    lengths = [len(path) for row in paths for path in row]
    links = np.fromiter(chain.from_iterable(chain.from_iterable(paths)), np.int32, count=sum(lengths))
    hops = Hops(links, np.repeat(np.arange(nodes**2, dtype=np.int32), lengths))
    _check_hops(hops, ends, nodes)
    reverse = np.array([index[end, start] for start, end in pairs], np.int32)
    return Structure(nodes, reverse, hops, _circles(ends, nodes, vertices))


def _checked_ends(ends: object) -> Int[np.ndarray, "link 2"]:
    if isinstance(ends, np.ndarray) and ends.shape[1:] == (2,) and ends.dtype.kind in "iu":
        return ends
    kind = f"{ends.dtype} {list(ends.shape)}" if isinstance(ends, np.ndarray) else f"a {type(ends).__name__}"
    raise TopologyError(f"link_ends is {kind}, expected a NumPy array of whole numbers [link, 2]")


def index_links(ends: Sequence[tuple[int, int]], vertices: int, nodes: int) -> Mapping[tuple[int, int], int]:
    """Number of the link from one vertex to another. Raises `TopologyError` unless each has one reverse."""
    index: dict[tuple[int, int], int] = {}
    for number_of_link, (start, end) in enumerate(ends):
        if start == end or not (0 <= start < vertices and 0 <= end < vertices):
            raise TopologyError(
                f"link {number_of_link} runs from {start} to {end}; name two of the vertices 0..{vertices - 1} "
                f"(nodes are 0..{nodes - 1}, switches come after them)"
            )
        if (start, end) in index:
            raise TopologyError(f"there are two links from {start} to {end}; merge them into one")
        index[start, end] = number_of_link
    for start, end in ends:
        if (end, start) not in index:
            raise TopologyError(
                f"there is a link from {start} to {end} but none back; add a link from {end} to {start}"
            )
    return index


def _check_hops(hops: Hops, ends: Int[np.ndarray, "link 2"], nodes: int) -> None:
    """Raise for the first path whose links do not lead from its source to its destination."""

    def name(pair: int | np.integer) -> str:
        return f"the path from {pair // nodes} to {pair % nodes}"

    link, pair = np.asarray(hops.link), np.asarray(hops.pair)
    missing = np.flatnonzero((link < 0) | (link >= len(ends)))
    if len(missing):
        at = missing[0]
        raise TopologyError(f"{name(pair[at])} uses link {link[at]}, but links are 0..{len(ends) - 1}")
    start, end = ends[link].T
    begins, stops = np.diff(pair, prepend=-1) > 0, np.diff(pair, append=nodes**2) > 0
    starts_at = np.where(begins, pair // nodes, np.roll(end, 1))
    wrong = np.flatnonzero(start != starts_at)
    if len(wrong):
        at = wrong[0]
        raise TopologyError(
            f"{name(pair[at])} takes link {link[at]} from {start[at]} to {end[at]}, but has come to {starts_at[at]}"
        )
    wrong = np.flatnonzero(stops & (end != pair % nodes))
    if len(wrong):
        at = wrong[0]
        raise TopologyError(f"{name(pair[at])} stops at {end[at]}, after link {link[at]}")
    source, destination = np.divmod(np.arange(nodes**2), nodes)
    empty = np.bincount(pair, minlength=nodes**2) == 0
    wrong = np.flatnonzero(empty & (source != destination))
    if len(wrong):
        raise TopologyError(f"{name(wrong[0])} has no links; the network must be connected")
    # No vertex twice: neither the source, which is where a path to itself would end, nor one that links lead to. By
    # source, for there may be a hundred million hops.
    vertices = int(ends.max(initial=0)) + 1
    borders = np.searchsorted(pair, nodes * np.arange(nodes + 1))
    for of_source, (first, last) in enumerate(pairwise(borders.tolist())):
        passed = pair[first:last] % nodes * vertices + end[first:last]
        passes = np.bincount(passed, minlength=nodes * vertices).reshape(nodes, vertices)
        passes[:, of_source] += 1
        if (passes > 1).any():
            to, vertex = np.argwhere(passes > 1)[0]
            raise TopologyError(f"{name(of_source * nodes + to)} passes vertex {vertex} twice")


def check_grid(grid: tuple[int, int], ends: Int[np.ndarray, "link 2"], nodes: int) -> None:
    """Raise `TopologyError` unless nodes and links are those of a mesh with these sides."""
    x, y = grid
    if x * y != nodes or len(ends) != 2 * ((x - 1) * y + x * (y - 1)):
        raise TopologyError(f"grid is {x}x{y}, but there are {nodes} nodes and {len(ends)} links; state no grid")
    row, column = np.divmod(ends, y)
    far = np.abs(np.diff(row)) + np.abs(np.diff(column)) != 1
    if far.any():
        start, end = ends[far[:, 0]][0]
        raise TopologyError(f"grid is {x}x{y}, but the link from {start} to {end} is not between neighbours")


def path_lengths(hops: Hops, nodes: int) -> Int[np.ndarray | Array, "node node2"]:
    """Links on the path from every node to every node."""
    counts: np.ndarray | Array
    if isinstance(hops.pair, jax.core.Tracer):
        counts = jax.ops.segment_sum(jnp.ones_like(hops.pair), hops.pair, nodes**2, indices_are_sorted=True)
    else:  # JAX would compile it for every network
        counts = np.bincount(np.asarray(hops.pair), minlength=nodes**2).astype(np.int32)
    return counts.reshape(nodes, nodes)


def listed(hops: Hops, nodes: int) -> list[list[tuple[int, ...]]]:
    """Links of every path in order, [source][destination]."""
    links = np.asarray(hops.link).tolist()
    border = np.searchsorted(np.asarray(hops.pair), np.arange(nodes**2 + 1)).tolist()
    return [
        [tuple(links[border[pair] : border[pair + 1]]) for pair in range(source * nodes, (source + 1) * nodes)]
        for source in range(nodes)
    ]


def _circles(ends: Int[np.ndarray, "link 2"], nodes: int, vertices: int) -> Float[np.ndarray, "vertex 2"]:
    """Nodes on a circle in the order of their numbers, and switches on smaller ones, the farther from nodes the nearer
    to the centre, each towards the vertices that it joins."""
    level = np.where(np.arange(vertices) < nodes, 0, -1)
    start, end = ends.T
    while (level < 0).any():
        reached = end[(level[start] >= 0) & (level[end] < 0)]
        level[reached if len(reached) else level < 0] = level.max() + 1
    points = circle(nodes)
    points = np.concatenate([points, np.zeros((vertices - nodes, 2))])
    radius, levels = np.hypot(*points[0]), level.max() + 1
    for number in range(1, levels):
        here = np.flatnonzero(level == number)
        if len(here) == 1:
            continue  # at the centre
        towards = [points[start[(end == vertex) & (level[start] < number)]].sum(axis=0) for vertex in here]
        angle = [np.arctan2(x, -y) % (2 * np.pi) for x, y in np.round(towards, 9)]
        around = circle(len(here))
        around *= radius * (levels - number) / levels / np.hypot(*around[0])
        points[here[np.argsort(angle, kind="stable")]] = around
    return points


def circle(count: int) -> Float[np.ndarray, "node 2"]:
    """Points on a circle, the first on top, clockwise, about a unit apart."""
    angle = 2 * np.pi * np.arange(count) / count
    return max(count / (2 * np.pi), 1) * np.stack([np.sin(angle), -np.cos(angle)], axis=1)
