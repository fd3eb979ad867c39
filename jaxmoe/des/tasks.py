"""Task graphs of the simulator: transfers, computations and barriers, and the tasks that each one waits for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.fabric import FabricPaths, Rows, joined, one_each, rows_by, rows_of

# Tasks and what they wait for, as flat arrays for the event loop. Knows no topology and no collective.
#
# A task is an amount of work that passes through servers one after the other, in chunks:
#
# - a *transfer* takes bytes over the links of a path, in chunks of at most `chunk_bytes`, the last one the rest;
# - a *computation* keeps one node busy for some seconds, in one piece;
# - a *barrier* has no server: it is done when everything it waits for is done. So is a transfer with no path.
#
# Servers are numbered: the links first, then the nodes. Any topology will do: a path is a list of link numbers.


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in the order they were added; a task waits only for earlier ones, so there are no cycles.

    Sizes are bytes for transfers and seconds for computations. The servers of task `i` are
    `path[path_start[i] : path_start[i + 1]]`, and its successors are stored in the same way.
    """

    num_links: int
    num_nodes: int
    chunks: Int[np.ndarray, " task"]  # 0 for a task without servers
    chunk_size: Float[np.ndarray, " task"]  # every chunk but the last
    last_size: Float[np.ndarray, " task"]
    predecessors: Int[np.ndarray, " task"]  # how many tasks it waits for
    path_start: Int[np.ndarray, "task+1"]
    path: Int[np.ndarray, " hop"]
    successor_start: Int[np.ndarray, "task+1"]
    successor: Int[np.ndarray, " edge"]
    chunks_before: Int[np.ndarray, " task"]  # of its message; not 0 where chunks are tasks of their own
    background: Bool[np.ndarray, " task"] | None = None  # tasks served when no other needs a server; `None`: no such

    @property
    def num_tasks(self) -> int:
        return len(self.chunks)

    @property
    def chunk_hops(self) -> int:
        """Services the event loop has to simulate: one for every chunk at every server of its path."""
        return int(self.chunks @ np.diff(self.path_start))


def chunk_sizes(size: float, chunk_bytes: float | None) -> list[float]:
    """Chunks of one message, the last one the rest; one alone where `chunk_bytes` is `None` or not positive."""
    if chunk_bytes is None or chunk_bytes <= 0:
        return [size]
    count = max(math.ceil(size / chunk_bytes), 1)
    return [chunk_bytes] * (count - 1) + [size - (count - 1) * chunk_bytes]


class _Block(NamedTuple):
    """Tasks that were added together."""

    paths: Rows
    sizes: Float[np.ndarray, " task"]
    after: Rows
    whole: bool  # never cut in chunks
    background: bool = False
    chunks_before: Int[np.ndarray, " task"] | None = None  # `None`: 0


class GraphBuilder:
    """Collects tasks, one by one or many at once. Each method returns the numbers of new tasks, to be named in `after`.

    `after` lists the tasks that must be finished before the new one is released. `chunk_bytes` is the
    store-and-forward unit in B; `None`, or a value that is not positive, sends every message in one chunk.
    """

    def __init__(self, num_links: int, num_nodes: int, chunk_bytes: float | None = None) -> None:
        self._num_links, self._num_nodes = num_links, num_nodes
        self._chunk_bytes = chunk_bytes if chunk_bytes is not None and chunk_bytes > 0 else math.inf
        self._blocks: list[_Block] = []
        self._num_tasks = 0

    @property
    def num_tasks(self) -> int:
        """Tasks added so far."""
        return self._num_tasks

    def transfer(self, path: Sequence[int], size: float, after: Sequence[int] = ()) -> int:
        """Send `size` bytes over the links of `path`. An empty path delivers at once; 0 bytes take only latency."""
        return int(self.transfers(rows_of([path]), np.array([size], float), rows_of([after]))[0])

    def transfers(
        self,
        paths: Rows,
        sizes: Float[np.ndarray, " task"],
        after: Rows,
        background: bool = False,
        chunks_before: Int[np.ndarray, " task"] | None = None,
        whole: bool = False,
    ) -> Int[np.ndarray, " task"]:
        """Many of them: a path, a size and a row of tasks to wait for each. They are cut in chunks, or sent `whole`.

        In the `background` they are served when no other task needs a server, and make room at once for any that does.
        Where chunks of a message are transfers of their own, `chunks_before` says how many were cut off before each.
        """
        return self._add(_Block(paths, sizes, after, whole=whole, background=background, chunks_before=chunks_before))

    def compute(self, node: int, seconds: float, after: Sequence[int] = ()) -> int:
        """Keep `node` busy for `seconds`."""
        return int(self.computations(np.array([node]), np.array([seconds], float), rows_of([after]))[0])

    def computations(
        self, nodes: Int[np.ndarray, " task"], seconds: Float[np.ndarray, " task"], after: Rows
    ) -> Int[np.ndarray, " task"]:
        """Many of them."""
        for node in nodes[(nodes < 0) | (nodes >= self._num_nodes)][:1]:
            raise ValueError(f"node {node} is not one of the nodes 0..{self._num_nodes - 1}")
        return self._add(_Block(one_each(self._num_links + nodes), seconds, after, whole=True))

    def barrier(self, after: Sequence[int] | Int[np.ndarray, " task"]) -> int:
        """Be done, in no time, when all of `after` are."""
        waits = np.asarray(after, np.int64)
        block = _Block(rows_of([()]), np.zeros(1), Rows(np.array([0, len(waits)]), waits), whole=False)
        return int(self._add(block)[0])

    def _add(self, block: _Block) -> Int[np.ndarray, " task"]:
        first = self._num_tasks
        self._blocks.append(block)
        self._num_tasks += len(block.sizes)
        return np.arange(first, self._num_tasks)

    def build(self) -> TaskGraph:
        """The tasks added so far. Raises ValueError where one has a size, a path or a predecessor that cannot be."""
        tasks, blocks = self._num_tasks, self._blocks
        size = np.concatenate([np.zeros(0), *(block.sizes for block in blocks)])
        paths, after = joined(block.paths for block in blocks), joined(block.after for block in blocks)
        whole = np.repeat([block.whole for block in blocks] or [False], [len(b.sizes) for b in blocks] or [0])
        self._check(size, paths, after, whole)
        chunk = np.where(whole, size, np.minimum(size, self._chunk_bytes))
        count = np.where(chunk > 0, np.ceil(size / np.where(chunk > 0, chunk, 1)), 1)
        followers = rows_by(after.items, after.owner, tasks)
        before = [np.zeros(len(b.sizes), np.int64) if b.chunks_before is None else b.chunks_before for b in blocks]
        behind = np.repeat([block.background for block in blocks] or [False], [len(b.sizes) for b in blocks] or [0])
        return TaskGraph(
            num_links=self._num_links,
            num_nodes=self._num_nodes,
            chunks=np.where(paths.lengths > 0, count, 0).astype(np.int64),
            chunk_size=chunk,
            last_size=size - (count - 1) * chunk,
            predecessors=after.lengths,
            path_start=paths.start,
            path=paths.items,
            successor_start=followers.start,
            successor=followers.items,
            chunks_before=np.concatenate([np.zeros(0, np.int64), *before]),
            background=behind if behind.any() else None,
        )

    def _check(
        self, size: Float[np.ndarray, " task"], paths: Rows, after: Rows, whole: Bool[np.ndarray, " task"]
    ) -> None:
        """Refuse the first wrong task. All at once, for there are millions."""
        for task in np.flatnonzero(~((size >= 0) & (size < math.inf)))[:1]:
            raise ValueError(f"task {task} has size {size[task]}, expected a finite size that is not negative")
        waiting = after.owner
        for task in waiting[(after.items < 0) | (after.items >= waiting)][:1].tolist():
            raise ValueError(f"task {task} waits for {list(after[task])}, expected tasks added before it")
        passing = paths.owner
        for task in passing[~whole[passing] & ((paths.items < 0) | (paths.items >= self._num_links))][:1].tolist():
            raise ValueError(f"path {list(paths[task])} leaves the links 0..{self._num_links - 1}")


# Transfers of one stage as arrays: what they pass, whose readiness and which others they wait for.


@dataclass(frozen=True)
class Transfers:
    """Messages or parts of them. Each waits only for earlier ones."""

    paths: Rows  # servers of each
    size: Float[np.ndarray, " transfer"]  # B
    sender: Int[np.ndarray, " transfer"]  # node that has to be ready first; -1: none
    receiver: Int[np.ndarray, " transfer"]  # node that has something when it is finished; -1: none
    after: Rows  # for each the numbers of those it waits for
    chunks_before: Int[np.ndarray, " transfer"] | None = None  # of its message, where it is a chunk of one

    def __len__(self) -> int:
        return len(self.size)


def messages(
    paths: FabricPaths,
    source: Int[np.ndarray, " message"],
    destination: Int[np.ndarray, " message"],
    size: Float[np.ndarray, " message"],
    chunks_before: Int[np.ndarray, " message"] | None = None,
) -> Transfers:
    """Messages that wait for their source alone."""
    return Transfers(paths.between(source, destination), size, source, destination, no_rows(len(size)), chunks_before)


def no_rows(count: int) -> Rows:
    """So many rows without items."""
    return Rows(np.zeros(count + 1, np.int64), np.zeros(0, np.int64))


def add_transfers(
    graph: GraphBuilder, transfers: Transfers, ready: Rows, background: bool = False, whole: bool = False
) -> Rows:
    """Add them to `graph`; `ready` has for every node the tasks after which it may send. `whole`, none is cut.

    Returns for every node the tasks that deliver to it.
    """
    sending = np.flatnonzero(transfers.sender >= 0)
    released = ready.take(transfers.sender[sending])
    waiting = np.concatenate([sending[released.owner], transfers.after.owner])
    awaited = np.concatenate([released.items, graph.num_tasks + transfers.after.items])
    after = rows_by(waiting, awaited, len(transfers))
    tasks = graph.transfers(transfers.paths, transfers.size, after, background, transfers.chunks_before, whole)
    delivers = transfers.receiver >= 0
    return rows_by(transfers.receiver[delivers], tasks[delivers], len(ready))


# Who sends what to whom, and after which receipts: collectives as lists of sends.
#
# A schedule knows nodes but no links. `add_sends` lays it on the paths of a fabric. A send waits for what it passes on,
# and not for rounds. `first` is everywhere the offset of the new sends in the whole schedule.


Ints = Int[np.ndarray, " send"]


class Send(NamedTuple):
    """One message of `size` bytes; it waits for the sends of its schedule whose indices are in `after`."""

    source: int
    destination: int
    size: float
    after: tuple[int, ...] = ()


def ring_all_reduce_sends(order: Sequence[int], size: float, bidirectional: bool = False, first: int = 0) -> list[Send]:
    """Reduce-scatter, then all-gather, of buffers of `size` B cut in R parts: 2 (R - 1) steps of a ring.

    The first part to be gathered is the one that was reduced last, so the steps go on without a break. With
    `bidirectional` half of every part goes the other way round; a ring of two has but one way.
    """
    nodes = len(order)
    ways = [order, order[::-1]] if bidirectional and nodes > 2 else [order]
    sends: list[Send] = []
    for way in ways:
        sends += _ring_steps(way, size / nodes / len(ways), 2 * (nodes - 1), first + len(sends))
    return sends


def _ring_steps(order: Sequence[int], size: float, steps: int, first: int) -> list[Send]:
    sends = zip(*(ends.tolist() for ends in ring_steps(order, steps, first)), strict=True)
    return [Send(node, to, size, (received,) if received >= 0 else ()) for node, to, received in sends]


def ring_steps(order: Sequence[int], steps: int, first: int = 0) -> tuple[Ints, Ints, Ints]:
    """Source and destination of a ring's sends, step by step, and which send brought what each passes on (-1: none)."""
    nodes, ring = len(order), np.asarray(order, np.int64)
    step, place = (index.ravel() for index in np.indices((steps, nodes)))
    received = first + (step - 1) * nodes + (place - 1) % nodes
    return ring[place], ring[(place + 1) % nodes], np.where(step > 0, received, -1)


def transfers_of(sends: Sequence[Send], paths: FabricPaths) -> Transfers:
    """Transfers of a schedule of sends, each over the path of a fabric between its two nodes."""
    source, destination = (np.array([send[end] for send in sends], np.int64) for end in (0, 1))
    laid = messages(paths, source, destination, np.array([send.size for send in sends], float))
    return replace(laid, after=rows_of([send.after for send in sends]))


def add_sends(
    graph: GraphBuilder, sends: Sequence[Send], paths: FabricPaths, ready: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Add a schedule to `graph`; `ready[node]` are the tasks after which that node may send.

    Returns for every node the tasks that deliver to it.
    """
    received = add_transfers(graph, transfers_of(sends, paths), rows_of(ready))
    return [list(received[node]) for node in range(len(ready))]
