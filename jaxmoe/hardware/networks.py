"""Regular networks: meshes, wafers, tori, rings, switches, clusters. Descriptions only, no loads and no times."""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware.graph import Graph, build_graph
from jaxmoe.hardware.paths import Hops, TopologyError, circle, listed
from jaxmoe.hardware.topology import AbstractTopology, Number, filled

# A 2D mesh: its nodes, its directed links and its XY paths. A description only, no loads and no times.
#
# Node (x, y) has index `x * Y + y`. Directed links are numbered in four blocks, each in row-major order of the lower
# node: `+x` from (x, y) to (x+1, y), `-x` back, `+y` from (x, y) to (x, y+1), `-y` back. A packet moves along x first,
# then along y, unless the mesh says otherwise.


class Mesh(AbstractTopology):
    """A mesh of `X * Y` nodes; see `AbstractTopology` for its numbers.

    Packets go along x first and then along y, or with routing `yx` the other way round.
    """

    shape: tuple[int, int] = eqx.field(static=True, kw_only=True)
    routing: Literal["xy", "yx"] = eqx.field(static=True, kw_only=True, default="xy")

    @property
    def num_nodes(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def link_ends(self) -> Int[np.ndarray, "link 2"]:
        return link_ends(self.shape)

    @property
    def reverse_links(self) -> Int[np.ndarray, " link"]:
        return reverse_links(self.shape)

    def hop_counts(self) -> Int[np.ndarray, "node node2"]:
        return hop_counts(self.shape)

    def hops(self) -> Hops:
        return mesh_hops(self.shape, self.routing)

    def paths(self) -> list[list[tuple[int, ...]]]:
        return listed(self.hops(), self.num_nodes)

    def positions(self) -> Float[np.ndarray, "node 2"]:
        return np.argwhere(np.ones(self.shape))[:, ::-1].astype(float)

    @property
    def grid(self) -> tuple[int, int]:
        return self.shape

    def crossed(self) -> "Mesh":
        return replace(self, routing="yx" if self.routing == "xy" else "xy")

    @property
    def port_order(self) -> Int[np.ndarray, " link"]:
        """Links along the direction that packets take first come before the others."""
        order = np.arange(self.num_links)
        return order if self.routing == "xy" else np.roll(order, -2 * (self.shape[0] - 1) * self.shape[1])


def num_links(shape: tuple[int, int]) -> int:
    """Directed links of an X x Y mesh."""
    x, y = shape
    return 2 * ((x - 1) * y + x * (y - 1))


@lru_cache
def link_ends(shape: tuple[int, int]) -> np.ndarray:
    """Source and destination node of every directed link, int [link, 2]."""
    node = np.arange(shape[0] * shape[1]).reshape(shape)
    along_x = np.stack([node[:-1].ravel(), node[1:].ravel()], axis=-1)
    along_y = np.stack([node[:, :-1].ravel(), node[:, 1:].ravel()], axis=-1)
    return np.concatenate([along_x, along_x[:, ::-1], along_y, along_y[:, ::-1]])


@lru_cache
def reverse_links(shape: tuple[int, int]) -> np.ndarray:
    """Index of the link that runs the other way, int [link]; its own inverse."""
    x, y = shape
    across, along = (x - 1) * y, x * (y - 1)
    index = np.arange(2 * (across + along), dtype=np.int32)
    blocks = np.split(index, [across, 2 * across, 2 * across + along])
    return np.concatenate([blocks[1], blocks[0], blocks[3], blocks[2]])


@lru_cache
def hop_counts(shape: tuple[int, int]) -> np.ndarray:
    """Manhattan distance between every two nodes, int [node, node]."""
    x, y = np.unravel_index(np.arange(shape[0] * shape[1]), shape)
    return np.abs(x[:, None] - x) + np.abs(y[:, None] - y)


@lru_cache(maxsize=8)
def mesh_hops(shape: tuple[int, int], routing: Literal["xy", "yx"]) -> Hops:
    """Paths along x first and then along y, or with routing `yx` the other way round; all take a step at a time."""
    nodes = shape[0] * shape[1]
    ends = link_ends(shape)
    link = np.zeros((nodes, nodes), np.int32)
    link[ends[:, 0], ends[:, 1]] = np.arange(len(ends))
    pair = np.arange(nodes**2, dtype=np.int32)
    (x, y), (to_x, to_y) = (np.divmod(node, shape[1]) for node in np.divmod(pair, nodes))
    owner, items = [pair[:0]], [link.ravel()[:0]]
    for _ in range(int(hop_counts(shape).max(initial=0))):
        along_x = (x != to_x) & ((y == to_y) | (routing == "xy"))
        next_x = np.where(along_x, x + np.sign(to_x - x), x)
        next_y = np.where(along_x, y, y + np.sign(to_y - y))
        moves = np.flatnonzero((next_x != x) | (next_y != y))
        owner.append(pair[moves])
        items.append(link[(x * shape[1] + y)[moves], (next_x * shape[1] + next_y)[moves]])
        x, y = next_x, next_y
    pairs = np.concatenate(owner)
    order = np.argsort(pairs, kind="stable")
    return Hops(np.concatenate(items)[order], pairs[order])


def mesh_link_order(shape: tuple[int, int], ends: Int[np.ndarray, "link 2"]) -> Int[np.ndarray, " link"]:
    """Links with these ends in the order in which a mesh of this shape numbers them."""
    index = {(start, end): link for link, (start, end) in enumerate(ends.tolist())}
    return np.array([index[start, end] for start, end in link_ends(shape).tolist()], np.int64)


# The networks that the papers use, besides the mesh: wafers, torus, ring, switch, clusters, all to all.
#
# Bandwidths in B/s and latencies in s, of one directed link.


def wafers(
    wafer_shape: tuple[int, int],
    grid: tuple[int, int],
    bandwidth: Number,
    latency: Number,
    border_bandwidth: Number,
    border_latency: Number,
) -> Mesh:
    """A grid of wafers joined at their borders: one mesh whose links across a border have numbers of their own.

    Nodes are numbered over the whole mesh (moentwine: 2x2 wafers of 8x8, 8 TB/s inside, 9 TB/s across).
    """
    shape = (wafer_shape[0] * grid[0], wafer_shape[1] * grid[1])
    across = border_links(wafer_shape, grid)
    return Mesh(
        _either(across, border_bandwidth, bandwidth),
        _either(across, border_latency, latency),
        shape=shape,
    )


def border_links(wafer_shape: tuple[int, int], grid: tuple[int, int]) -> Bool[np.ndarray, " link"]:
    """Which links of a grid of wafers cross a border."""
    shape = (wafer_shape[0] * grid[0], wafer_shape[1] * grid[1])
    x, y = np.unravel_index(np.arange(shape[0] * shape[1]), shape)
    wafer = x // wafer_shape[0] * grid[1] + y // wafer_shape[1]
    start, end = link_ends(shape).T
    return wafer[start] != wafer[end]


def ring(num_nodes: int, bandwidth: Number, latency: Number) -> Graph:
    """A ring with links both ways. Messages go the shorter way; where both are as long, upwards."""
    ends = _both_ways([(node, (node + 1) % num_nodes) for node in range(num_nodes)]) if num_nodes > 1 else []
    routes = {
        (source, destination): _around(source, destination, num_nodes)
        for source in range(num_nodes)
        for destination in range(num_nodes)
    }
    graph = _uniform(num_nodes, ends, bandwidth, latency, circle(num_nodes), routes)
    return replace(graph, rings=_rings(ends, (num_nodes, 1)))


def torus(shape: tuple[int, int], bandwidth: Number, latency: Number) -> Graph:
    """A mesh whose rows and columns are rings. Along x first, then along y, each the shorter way."""
    x, y = shape
    node = np.arange(x * y).reshape(shape)
    up_x, up_y = np.roll(node, -1, axis=0), np.roll(node, -1, axis=1)
    forward = [*zip(node.ravel().tolist(), up_x.ravel().tolist(), strict=True)] if x > 1 else []
    forward += [*zip(node.ravel().tolist(), up_y.ravel().tolist(), strict=True)] if y > 1 else []
    routes = {}
    for source in range(x * y):
        for destination in range(x * y):
            rows = _around(source // y, destination // y, x)
            columns = _around(source % y, destination % y, y)
            turn = rows[-1] * y
            routes[source, destination] = [row * y + source % y for row in rows] + [turn + at for at in columns[1:]]
    positions = np.argwhere(np.ones(shape))[:, ::-1].astype(float)
    ends = _both_ways(forward)
    return replace(_uniform(x * y, ends, bandwidth, latency, positions, routes), rings=_rings(ends, shape))


def _rings(ends: list[tuple[int, int]], shape: tuple[int, int]) -> Int[Array, " link"]:
    """Dimension of every link of a torus, 0 along x and 1 along y; -1 - dimension of those between last and first."""
    start, end = (np.stack(np.unravel_index(at, shape)) for at in np.reshape(ends, (-1, 2)).astype(int).T)
    dimension = (start != end).argmax(axis=0)
    closes = np.abs(start - end).max(axis=0, initial=0) > 1
    return jnp.asarray(np.where(closes, -1 - dimension, dimension).astype(np.int32), jnp.int32)


def switch(num_nodes: int, bandwidth: Number, latency: Number) -> Graph:
    """Nodes around one switch: two links between any two of them (NVL72 is a switch of 72)."""
    ends = _both_ways([(node, num_nodes) for node in range(num_nodes)])
    positions = np.concatenate([circle(num_nodes), np.zeros((1, 2))])
    return _uniform(num_nodes, ends, bandwidth, latency, positions)


def fully_connected(num_nodes: int, bandwidth: Number, latency: Number) -> Graph:
    """A link from every node to every other."""
    ends = [(a, b) for a in range(num_nodes) for b in range(num_nodes) if a != b]
    return _uniform(num_nodes, ends, bandwidth, latency, circle(num_nodes))


def clusters(
    count: int,
    size: int,
    bandwidth: Number,
    latency: Number,
    uplink_bandwidth: Number,
    uplink_latency: Number,
    spines: int = 1,
) -> Graph:
    """`count` switches with `size` nodes each, every one of them linked to every one of `spines` switches above.

    Between clusters the path from s to d takes spine (s + d) mod `spines`. One spine is a two-level cluster
    (DGX nodes of 8 on an inter-node network), several are a spine-leaf network.
    """
    if min(count, size, spines) < 1:
        raise TopologyError(f"{count} clusters of {size} nodes under {spines} switches; expected one or more of each")
    nodes = count * size
    leaf, spine = nodes + np.arange(count), nodes + count + np.arange(spines)
    down = [(node, int(leaf[node // size])) for node in range(nodes)]
    up = [(int(lower), int(upper)) for lower in leaf for upper in spine] if count > 1 else []
    ends = _both_ways(down + up)
    routes = {
        (s, d): [s, int(leaf[s // size]), int(spine[(s + d) % spines]), int(leaf[d // size]), d]
        for s in range(nodes)
        for d in range(nodes)
        if s // size != d // size
    }
    leaf_x = (np.arange(count) + 0.5) * size - 0.5
    positions = np.concatenate(
        [
            np.stack([np.arange(nodes), np.full(nodes, 2.0)], axis=1),
            np.stack([leaf_x, np.ones(count)], axis=1),
            np.stack([(np.arange(spines) + 0.5) * nodes / spines - 0.5, np.zeros(spines)], axis=1),
        ]
    )
    if count == 1:
        positions = positions[: nodes + 1]
    is_uplink = uplinks(count, size, spines)
    numbers = (_either(is_uplink, uplink_bandwidth, bandwidth), _either(is_uplink, uplink_latency, latency))
    return build_graph(nodes, ends, *numbers, positions, routes)


def uplinks(count: int, size: int, spines: int) -> Bool[np.ndarray, " link"]:
    """Which links of clusters join switches: up after those of nodes, and the same again for the way back."""
    return np.tile(np.repeat([False, True], [count * size, count * spines if count > 1 else 0]), 2)


def _uniform(
    nodes: int, ends: list[tuple[int, int]], bandwidth: Number, latency: Number, positions, routes=None
) -> Graph:
    """A graph whose links are all alike."""
    rates, delays = (filled(len(ends), number) for number in (bandwidth, latency))
    return build_graph(nodes, ends, rates, delays, positions, routes)


def _either(first: Bool[np.ndarray, " link"], one: Number, other: Number) -> Float[Array, " link"]:
    """One number for the links that are `first`, and another for the rest."""
    if isinstance(one, jax.Array) or isinstance(other, jax.Array):
        return jnp.where(first, jnp.asarray(one, jnp.float32), jnp.asarray(other, jnp.float32))
    return jnp.asarray(np.where(first, np.float32(one), np.float32(other)), jnp.float32)


def _both_ways(ends: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Links and their reverses; a ring of two would have each twice."""
    return list(dict.fromkeys(ends + [(end, start) for start, end in ends]))


def _around(source: int, destination: int, size: int) -> list[int]:
    """Positions on the shorter way round a ring, upwards where both ways are as long."""
    up = (destination - source) % size
    step = 1 if up <= size - up else -1
    return [(source + step * i) % size for i in range(min(up, size - up) + 1)]
