"""The event loop: links and nodes are first-come-first-served servers, chunks are stored and forwarded.

This is the scheduler of hd_moe IV-B2: messages cut in chunks, events in a priority queue, a record of when each
link is free. A chunk that reaches the head of a link keeps it for `chunk / bandwidth` seconds and is at the
next node, whole, `latency` seconds later. A computation keeps its node for its duration. A task is finished
when its last chunk is delivered; it is released when all tasks it waits for are finished, and then all its
chunks stand at its first server, in order.

**Order of simultaneous events.** Two kinds of event exist: the completion of a task, and the arrival of a chunk
at a server. Pending events are taken by (time, kind, task, chunk), completions before arrivals. So a server's
queue is in order of arrival, and ties go to the earlier task, then to the earlier chunk; tasks released at
time 0 queue in task order. An event caused at the present instant (by a zero latency or a zero size) takes its
place among those still pending. Times are compared as the floating-point numbers they are, without tolerance.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Float
from numba import njit

from jaxmoe.des.tasks import TaskGraph


@dataclass(frozen=True)
class Run:
    """What happened, in seconds. A task starts when its first chunk is first served."""

    start: Float[np.ndarray, " task"]
    finish: Float[np.ndarray, " task"]
    link_busy: Float[np.ndarray, " link"]
    node_busy: Float[np.ndarray, " node"]

    @property
    def makespan(self) -> float:
        """When the last task is finished; 0 without tasks."""
        return float(self.finish.max(initial=0.0))


def simulate(
    graph: TaskGraph, link_bandwidth: Float[np.ndarray, " link"], link_latency: Float[np.ndarray, " link"]
) -> Run:
    """Run `graph` on links of `link_bandwidth` (B/s) and `link_latency` (s per hop), in order as said above."""
    if not len(link_bandwidth) == len(link_latency) == graph.num_links:
        raise ValueError(
            f"{len(link_bandwidth)} bandwidths and {len(link_latency)} latencies for {graph.num_links} links"
        )
    if not ((link_bandwidth > 0).all() and (link_latency >= 0).all()):
        raise ValueError("every link needs a bandwidth above zero and a latency that is not negative")
    nodes = graph.num_nodes
    # A node is a server of one second per second that delivers at once.
    rate = np.concatenate([link_bandwidth, np.ones(nodes)])
    delay = np.concatenate([link_latency, np.zeros(nodes)])
    start, finish, busy = _event_loop(
        graph.chunks,
        graph.chunk_size,
        graph.last_size,
        graph.predecessors,
        graph.path_start,
        graph.path,
        graph.successor_start,
        graph.successor,
        rate,
        delay,
    )
    return Run(start, finish, busy[: graph.num_links], busy[graph.num_links :])


# The heap lies in two arrays. `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True)
@no_type_check
def _push(times, codes, size, time, code):
    """Put (time, code) in the heap of `size` events, and return its new size."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if times[above] < time or (times[above] == time and codes[above] < code):
            break
        times[at], codes[at] = times[above], codes[above]
        at = above
    times[at], codes[at] = time, code
    return size + 1


@njit(cache=True)
@no_type_check
def _drop_first(times, codes, size):
    """Take the first event out of the heap of `size` events, and return its new size."""
    size -= 1
    time, code = times[size], codes[size]
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        right = below + 1
        if right < size and (
            times[right] < times[below] or (times[right] == times[below] and codes[right] < codes[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and code < codes[below]):
            break
        times[at], codes[at] = times[below], codes[below]
        at = below
    times[at], codes[at] = time, code
    return size


@njit(cache=True)
@no_type_check
def _first_event(task, first_chunk):
    """Code of what a released task does first: its first chunk arrives, or, without servers, it completes."""
    if first_chunk[task] < first_chunk[task + 1]:
        return len(first_chunk) - 1 + first_chunk[task]
    return task


@njit(cache=True)
@no_type_check
def _event_loop(chunks, chunk_size, last_size, predecessors, path_start, path, successor_start, successor, rate, delay):
    """Start and finish of every task and busy time of every server.

    An event is a time and a code: below `tasks` the completion of that task, from there on the arrival of chunk
    `code - tasks`, counted over all tasks. Comparing codes compares (kind, task, chunk).

    One event for each chunk and hop is enough: arrivals are taken in order, so a queue is told by the time at
    which the server will have served all that has arrived. The chunks of a released task enter the heap one by
    one, each when the one before it is taken: it could not have been taken earlier, so the order is the same.
    """
    tasks = len(chunks)
    first_chunk = np.zeros(tasks + 1, np.int64)
    first_chunk[1:] = np.cumsum(chunks)
    task_of = np.repeat(np.arange(tasks), chunks)
    hop = path_start[task_of]  # where on the path each chunk is
    waits = predecessors.copy()
    start, finish = np.zeros(tasks), np.zeros(tasks)
    free, busy = np.zeros(len(rate)), np.zeros(len(rate))
    # At most one event is pending for every chunk, and one for every task.
    times, codes = np.empty(tasks + len(task_of)), np.empty(tasks + len(task_of), np.int64)
    size = 0
    for task in range(tasks):
        if waits[task] == 0:
            size = _push(times, codes, size, 0.0, _first_event(task, first_chunk))
    while size > 0:
        now, code = times[0], codes[0]
        size = _drop_first(times, codes, size)
        if code < tasks:
            finish[code] = now
            if chunks[code] == 0:
                start[code] = now
            for follower in successor[successor_start[code] : successor_start[code + 1]]:
                waits[follower] -= 1
                if waits[follower] == 0:
                    size = _push(times, codes, size, now, _first_event(follower, first_chunk))
            continue
        chunk = code - tasks
        task = task_of[chunk]
        is_last = chunk + 1 == first_chunk[task + 1]
        server = path[hop[chunk]]
        begin = max(now, free[server])
        service = (last_size[task] if is_last else chunk_size[task]) / rate[server]
        free[server] = begin + service
        busy[server] += service
        there = free[server] + delay[server]
        if hop[chunk] == path_start[task]:
            if chunk == first_chunk[task]:
                start[task] = begin
            if not is_last:
                size = _push(times, codes, size, now, code + 1)
        hop[chunk] += 1
        if hop[chunk] < path_start[task + 1]:
            size = _push(times, codes, size, there, code)
        elif is_last:
            size = _push(times, codes, size, there, task)
    return start, finish, busy
