"""Paths between all nodes of a network as flat lists, which a layer of many messages is laid on at once."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from jaxtyping import Int

from jaxmoe.des.rows import Rows, rows_by, rows_of
from jaxmoe.hardware import AbstractTopology, Graph, Mesh
from jaxmoe.hardware.mesh import hop_counts, link_ends


@dataclass(frozen=True)
class Paths:
    """What a message passes from every node to every other; nothing from a node to itself."""

    num_nodes: int
    rows: Rows  # that of source * num_nodes + destination

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, ...]:
        """The path from one node to another."""
        return self.rows[pair[0] * self.num_nodes + pair[1]]

    def between(self, source: Int[np.ndarray, " message"], destination: Int[np.ndarray, " message"]) -> Rows:
        """The paths of messages."""
        return self.rows.take(source * self.num_nodes + destination)

    @property
    def hops(self) -> Int[np.ndarray, "node node2"]:
        """Length of every path."""
        return self.rows.lengths.reshape(self.num_nodes, self.num_nodes)

    def mirrored(self, opposite: Int[np.ndarray, " link"]) -> "Paths":
        """From d to s, the path from s to d walked backwards over the `opposite` of every link."""
        source, destination = np.divmod(self.rows.owner[::-1], self.num_nodes)
        back = rows_by(destination * self.num_nodes + source, opposite[self.rows.items[::-1]], len(self.rows))
        return Paths(self.num_nodes, back)

    def with_ports(self, injection: int | None, ejection: int | None) -> "Paths":
        """Paths of messages that pass a port of their source and one of their destination; their first numbers."""
        nodes = self.num_nodes
        source, destination = np.divmod(np.arange(nodes**2), nodes)
        away = np.flatnonzero(source != destination)
        owner, items = [self.rows.owner], [self.rows.items]
        if injection is not None:
            owner, items = [away, *owner], [injection + source[away], *items]
        if ejection is not None:
            owner, items = [*owner, away], [*items, ejection + destination[away]]
        return Paths(nodes, rows_by(np.concatenate(owner), np.concatenate(items), nodes**2))


def paths_of(topology: AbstractTopology) -> Paths:
    """The links of every path."""
    if isinstance(topology, Mesh):
        return mesh_paths(topology.shape, topology.routing)
    if isinstance(topology, Graph):
        pair, link = np.asarray(topology.hop_pair), np.asarray(topology.hop_link, np.int64)
        return Paths(topology.num_nodes, rows_by(pair, link, topology.num_nodes**2))
    return Paths(topology.num_nodes, rows_of([*chain.from_iterable(topology.paths())]))


@lru_cache(maxsize=8)
def mesh_paths(shape: tuple[int, int], routing: str) -> Paths:
    """Paths along x first and then along y, or with routing `yx` the other way round; all take a step at a time."""
    nodes = shape[0] * shape[1]
    ends = link_ends(shape)
    link = np.zeros((nodes, nodes), np.int64)
    link[ends[:, 0], ends[:, 1]] = np.arange(len(ends))
    pair = np.arange(nodes**2)
    (x, y), (to_x, to_y) = (np.divmod(node, shape[1]) for node in np.divmod(pair, nodes))
    owner, items = [pair[:0]], [pair[:0]]
    for _ in range(int(hop_counts(shape).max(initial=0))):
        along_x = (x != to_x) & ((y == to_y) | (routing == "xy"))
        next_x = np.where(along_x, x + np.sign(to_x - x), x)
        next_y = np.where(along_x, y, y + np.sign(to_y - y))
        moves = np.flatnonzero((next_x != x) | (next_y != y))
        owner.append(moves)
        items.append(link[(x * shape[1] + y)[moves], (next_x * shape[1] + next_y)[moves]])
        x, y = next_x, next_y
    return Paths(nodes, rows_by(np.concatenate(owner), np.concatenate(items), nodes**2))
