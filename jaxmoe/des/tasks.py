"""Tasks and what they wait for, as flat arrays for the event loop. Knows no topology and no collective.

A task is an amount of work that passes through servers one after the other, in chunks:

- a *transfer* takes bytes over the links of a path, in chunks of at most `chunk_bytes`, the last one the rest;
- a *computation* keeps one node busy for some seconds, in one piece;
- a *barrier* has no server: it is done when everything it waits for is done. So is a transfer with no path.

Servers are numbered: the links first, then the nodes. Any topology will do: a path is a list of link numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Float, Int


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

    @property
    def num_tasks(self) -> int:
        return len(self.chunks)

    @property
    def chunk_hops(self) -> int:
        """Services the event loop has to simulate: one for every chunk at every server of its path."""
        return int(self.chunks @ np.diff(self.path_start))


class GraphBuilder:
    """Collects tasks one by one. Each method returns the number of the new task, to be named in `after`.

    `after` lists the tasks that must be finished before the new one is released. `chunk_bytes` is the
    store-and-forward unit in B; `None`, or a value that is not positive, sends every message in one chunk.
    """

    def __init__(self, num_links: int, num_nodes: int, chunk_bytes: float | None = None) -> None:
        self._num_links, self._num_nodes = num_links, num_nodes
        self._chunk_bytes = chunk_bytes if chunk_bytes is not None and chunk_bytes > 0 else math.inf
        self._paths: list[Sequence[int]] = []
        self._after: list[Sequence[int]] = []
        self._sizes: list[float] = []
        self._computations: list[int] = []

    def transfer(self, path: Sequence[int], size: float, after: Sequence[int] = ()) -> int:
        """Send `size` bytes over the links of `path`. An empty path delivers at once; 0 bytes take only latency."""
        return self._add(path, size, after)

    def compute(self, node: int, seconds: float, after: Sequence[int] = ()) -> int:
        """Keep `node` busy for `seconds`."""
        if not 0 <= node < self._num_nodes:
            raise ValueError(f"node {node} is not one of the nodes 0..{self._num_nodes - 1}")
        self._computations.append(self._add((self._num_links + node,), seconds, after))
        return self._computations[-1]

    def barrier(self, after: Sequence[int]) -> int:
        """Be done, in no time, when all of `after` are."""
        return self._add((), 0.0, after)

    def _add(self, path: Sequence[int], size: float, after: Sequence[int]) -> int:
        self._paths.append(path)
        self._after.append(after)
        self._sizes.append(size)
        return len(self._paths) - 1

    def build(self) -> TaskGraph:
        """The tasks added so far. Raises ValueError where one has a size, a path or a predecessor that cannot be."""
        tasks = len(self._paths)
        size = np.array(self._sizes, np.float64)
        path_start, path = _flatten(self._paths)
        wait_start, waits_for = _flatten(self._after)
        waiting = np.repeat(np.arange(tasks), np.diff(wait_start))
        self._check(size, np.repeat(np.arange(tasks), np.diff(path_start)), path, waiting, waits_for)
        whole = np.isin(np.arange(tasks), self._computations)
        chunk = np.where(whole, size, np.minimum(size, self._chunk_bytes))
        count = np.where(chunk > 0, np.ceil(size / np.where(chunk > 0, chunk, 1)), 1)
        followers = np.bincount(waits_for, minlength=tasks)
        return TaskGraph(
            num_links=self._num_links,
            num_nodes=self._num_nodes,
            chunks=np.where(np.diff(path_start) > 0, count, 0).astype(np.int64),
            chunk_size=chunk,
            last_size=size - (count - 1) * chunk,
            predecessors=np.diff(wait_start),
            path_start=path_start,
            path=path,
            successor_start=np.concatenate([[0], np.cumsum(followers)]).astype(np.int64),
            successor=waiting[np.argsort(waits_for, kind="stable")],
        )

    def _check(
        self,
        size: Float[np.ndarray, " task"],
        passing: Int[np.ndarray, " hop"],
        path: Int[np.ndarray, " hop"],
        waiting: Int[np.ndarray, " edge"],
        waits_for: Int[np.ndarray, " edge"],
    ) -> None:
        """Refuse the first wrong task. All at once, for there are millions: `passing` are the tasks of hops."""
        for task in np.flatnonzero(~((size >= 0) & (size < math.inf)))[:1]:
            raise ValueError(f"task {task} has size {size[task]}, expected a finite size that is not negative")
        for task in waiting[(waits_for < 0) | (waits_for >= waiting)][:1]:
            raise ValueError(f"task {task} waits for {list(self._after[task])}, expected tasks added before it")
        strays = passing[(path < 0) | (path >= self._num_links)]
        for task in np.setdiff1d(strays, self._computations)[:1]:
            raise ValueError(f"path {list(self._paths[task])} leaves the links 0..{self._num_links - 1}")


def _flatten(rows: list[Sequence[int]]) -> tuple[Int[np.ndarray, " start"], Int[np.ndarray, " item"]]:
    start = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return start, np.fromiter(chain.from_iterable(rows), np.int64, count=int(start[-1]))
