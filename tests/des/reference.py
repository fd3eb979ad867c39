"""The event loop once more, in plain Python: lists, an unordered pile of events, every chunk released at once.

With cut-through a chunk is followed by its head; the time its tail leaves a server is worked out beside it.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxmoe.des import GraphBuilder, TaskGraph

COMPLETION, ARRIVAL = 0, 1


@dataclass(frozen=True)
class Task:
    """A transfer of `size` bytes over `path`, or `size` seconds on `node`; a barrier has neither."""

    size: float = 0.0
    path: tuple[int, ...] = ()
    node: int | None = None
    after: tuple[int, ...] = ()

    def pieces(self, chunk_bytes: float) -> list[float]:
        if self.node is not None:
            return [self.size]
        if not self.path:
            return []
        pieces, rest = [], self.size
        while rest > chunk_bytes:
            pieces.append(chunk_bytes)
            rest -= chunk_bytes
        return [*pieces, rest]


def build(tasks: list[Task], links: int, nodes: int, chunk_bytes: float) -> TaskGraph:
    graph = GraphBuilder(links, nodes, chunk_bytes)
    for task in tasks:
        if task.node is not None:
            graph.compute(task.node, task.size, task.after)
        elif task.path:
            graph.transfer(task.path, task.size, task.after)
        else:
            graph.barrier(task.after)
    return graph.build()


@dataclass(frozen=True)
class Outcome:
    """Start and finish of every task, busy time of every link and node, and all services in order of arrival.

    A service is (task, server, chunk within the task, begin, end).
    """

    start: list[float]
    finish: list[float]
    link_busy: list[float]
    node_busy: list[float]
    services: list[tuple[int, int, int, float, float]]


def run_reference(
    tasks: list[Task],
    bandwidth: list[float],
    latency: list[float],
    nodes: int,
    chunk_bytes: float,
    cut_through: bool,
) -> Outcome:
    """Work through the events one by one, always the least of (time, kind, task, chunk)."""
    rate, delay = [*bandwidth, *[1.0] * nodes], [*latency, *[0.0] * nodes]
    links = len(bandwidth)
    routes = [task.path if task.node is None else (links + task.node,) for task in tasks]
    pieces = [task.pieces(chunk_bytes) for task in tasks]
    services: list[tuple[int, int, int, float, float]] = []
    tails: dict[tuple[int, int], float] = {}  # by task and chunk: when its tail reaches the server of its head
    free, busy = [0.0] * len(rate), [0.0] * len(rate)
    start, finish = [math.nan] * len(tasks), [math.nan] * len(tasks)
    delivered: list[list[float]] = [[] for _ in tasks]
    done: set[int] = set()
    events: set[tuple[float, int, int, int, int]] = set()

    def release(number: int, now: float) -> None:
        if not pieces[number]:
            start[number] = now
            events.add((now, COMPLETION, number, 0, 0))
        events.update((now, ARRIVAL, number, chunk, 0) for chunk in range(len(pieces[number])))

    for number, task in enumerate(tasks):
        if not task.after:
            release(number, 0.0)
    while events:
        event = min(events)
        events.remove(event)
        now, kind, number, chunk, hop = event
        if kind == COMPLETION:
            finish[number] = now
            done.add(number)
            for other, task in enumerate(tasks):
                if number in task.after and done.issuperset(task.after):
                    release(other, now)
            continue
        server = routes[number][hop]
        service = pieces[number][chunk] / rate[server]
        tail_arrival = tails[number, chunk] if hop > 0 else now  # stored and forwarded, it is `now` at every hop
        begin = max(now, free[server])
        end = max(begin + service, tail_arrival)
        if service > 0:
            free[server] = end
        services.append((number, server, chunk, begin, end))
        busy[server] += service
        if hop == 0 and chunk == 0:
            start[number] = begin
        head_there, tail_there = begin + delay[server], end + delay[server]
        tails[number, chunk] = tail_there
        if hop + 1 < len(routes[number]):
            events.add((head_there if cut_through else tail_there, ARRIVAL, number, chunk, hop + 1))
        else:
            delivered[number].append(tail_there)
            if len(delivered[number]) == len(pieces[number]):
                events.add((max(delivered[number]), COMPLETION, number, 0, 0))
    return Outcome(start, finish, busy[:links], busy[links:], services)


def bytes_over_links(tasks: list[Task], links: int) -> np.ndarray:
    """What every link has to carry in all."""
    total = np.zeros(links)
    for task in tasks:
        for link in task.path:
            total[link] += task.size
    return total
