"""A 2D mesh: its nodes, its directed links and its XY paths. A description only, no loads and no times.

Node (x, y) has index `x * Y + y`. Directed links are numbered in four blocks, each in row-major order
of the lower node: `+x` from (x, y) to (x+1, y), `-x` back, `+y` from (x, y) to (x, y+1), `-y` back.
A packet moves along x first, then along y, unless the mesh says otherwise.
"""

from functools import lru_cache
from typing import Literal

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.hardware.topology import AbstractTopology


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

    def paths(self) -> list[list[tuple[int, ...]]]:
        nodes = range(self.num_nodes)
        path = xy_path if self.routing == "xy" else yx_path
        return [[tuple(path(self.shape, source, destination)) for destination in nodes] for source in nodes]

    def positions(self) -> Float[np.ndarray, "node 2"]:
        return np.argwhere(np.ones(self.shape))[:, ::-1].astype(float)


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


@lru_cache
def _link_index(shape: tuple[int, int]) -> dict[tuple[int, int], int]:
    return {(int(a), int(b)): i for i, (a, b) in enumerate(link_ends(shape))}


def xy_path(shape: tuple[int, int], source: int, destination: int) -> list[int]:
    """Links of the path from `source` to `destination`: along x first, then along y."""
    index, path = _link_index(shape), []
    x, y = divmod(source, shape[1])
    to_x, to_y = divmod(destination, shape[1])
    while (x, y) != (to_x, to_y):
        step = (x + np.sign(to_x - x), y) if x != to_x else (x, y + np.sign(to_y - y))
        path.append(index[x * shape[1] + y, int(step[0] * shape[1] + step[1])])
        x, y = int(step[0]), int(step[1])
    return path


def yx_path(shape: tuple[int, int], source: int, destination: int) -> list[int]:
    """Links of the path along y first, then along x: the XY path of the way back, walked backwards."""
    back = reverse_links(shape)
    return [int(back[link]) for link in reversed(xy_path(shape, destination, source))]


def corner_nodes(topology: AbstractTopology) -> np.ndarray:
    """The corners of a mesh, int [corner]; every node of another network."""
    if not isinstance(topology, Mesh):
        return np.arange(topology.num_nodes)
    x, y = topology.shape
    return np.unique([0, y - 1, (x - 1) * y, x * y - 1])
