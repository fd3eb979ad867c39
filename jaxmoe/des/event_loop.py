"""The event loop: links and nodes are first-come-first-served servers that pass chunks on, whole or cut through.

This is the scheduler of hd_moe IV-B2: messages cut in chunks, events in a priority queue, a record of when each link is
free. A chunk that reaches the head of a link keeps it for `chunk / bandwidth` seconds and is at the next node, whole,
`latency` seconds later. A computation keeps its node for its duration. A task is finished when its last chunk is
delivered; it is released when all tasks it waits for are finished, and then all its chunks stand at its first server,
in order.

**Switching.** The above is store-and-forward: a chunk moves on when it is there whole. With cut-through its head moves
on as soon as a link takes it, is at the next node `latency` seconds later, and may be served there at once. The link is
free again when `chunk / bandwidth` seconds have passed and the tail of the chunk has arrived over the link before, so
one that follows a slower link is held for longer than its own bandwidth asks for. Buffers are unbounded (virtual
cut-through): a chunk that must wait gathers at the node where its head is, and does not hold up the link it came over.
It is delivered when its tail is.

**Background tasks** have a queue of their own at every server, first come first served, and are served while no other
task needs the server. One that does interrupts them at once, and they go on from where they were (preemptive-resume):
no other task is ever later for them. Their chunks are stored and forwarded, however the network switches. The end of
their service at a server comes before all other events of its time.

**Bursts.** A link with a token bucket of `burst` bytes, filled at its bandwidth, passes what is in the bucket at once;
only what goes beyond waits for it to fill. So a lone message of B bytes takes max(B - burst, 0) / bandwidth.

**Order of simultaneous events.** Two kinds of event exist beside that: the completion of a task, and the arrival of a
chunk (with cut-through, of its head) at a server. Pending events are taken by (time, kind, task, chunk), completions
before arrivals. So a server's queue is in order of arrival, and ties go to the earlier task, then to the earlier chunk;
tasks released at time 0 queue in task order. An event caused at the present instant (by a zero latency or a zero size)
takes its place among those still pending. Times are compared as the floating-point numbers they are, without tolerance.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.des.fabric import Fabric
from jaxmoe.des.heap import drop_first, push
from jaxmoe.des.routers import RouterRun, simulate_routers
from jaxmoe.des.tasks import TaskGraph


@dataclass(frozen=True)
class ServiceRecord:
    """Every service of a chunk by a server, in the order of arrival; so those of one server in order of time.

    One in the background is listed when it ends or is interrupted, in as many pieces as it was served in. `server`
    counts the links first, then the nodes, and `chunk` within its task. `begin` and `end` are seconds;
    at `end` the server is free again.
    """

    task: Int[np.ndarray, " service"]
    server: Int[np.ndarray, " service"]
    chunk: Int[np.ndarray, " service"]
    begin: Float[np.ndarray, " service"]
    end: Float[np.ndarray, " service"]


@dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation: start and finish of every task, and busy time of every link and node, s.

    A task starts when its first chunk is first served. A link's busy time is its load, bytes over bandwidth, however
    it is switched: the time for which cut-through holds a link for a tail that comes slowly is not in it. `services`
    is `None` unless they were recorded.
    """

    start: Float[np.ndarray, " task"]
    finish: Float[np.ndarray, " task"]
    link_busy: Float[np.ndarray, " link"]
    node_busy: Float[np.ndarray, " node"]
    services: ServiceRecord | None

    @property
    def makespan(self) -> float:
        """Time at which the last task is finished, s; 0 without tasks."""
        return float(self.finish.max(initial=0.0))


def simulate(
    graph: TaskGraph,
    link_bandwidth: Float[np.ndarray, " link"],
    link_latency: Float[np.ndarray, " link"],
    *,
    cut_through: bool = False,
    record: bool = False,
    burst: Float[np.ndarray, " link"] | None = None,
) -> SimulatedRun:
    """Run `graph` on links of `link_bandwidth` (B/s) and `link_latency` (s per hop), by the rules of this module.

    Chunks are stored and forwarded, or with `cut_through` cut through. With `record` the run lists its services.
    `burst` in B is of links with token buckets; `None`: there are none.
    Raises `ValueError` for links that are not the graph's, or have no bandwidth, or a negative latency.
    """
    given = len(link_bandwidth), len(link_latency)
    if given != (graph.num_links, graph.num_links):
        raise ValueError(f"{given[0]} bandwidths and {given[1]} latencies for {graph.num_links} links")
    if not ((link_bandwidth > 0).all() and (link_latency >= 0).all()):
        raise ValueError("every link needs a bandwidth above zero and a latency that is not negative")
    nodes = graph.num_nodes
    # A node serves seconds of work at rate 1, without delay.
    rate = np.concatenate([link_bandwidth, np.ones(nodes)])
    delay = np.concatenate([link_latency, np.zeros(nodes)])
    # Seconds by which a full bucket lets a link send ahead of its bandwidth.
    credit = np.zeros(len(rate)) if burst is None else np.concatenate([burst / link_bandwidth, np.zeros(nodes)])
    work = (graph.chunks, graph.chunk_size, graph.last_size, graph.predecessors)
    order = (graph.path_start, graph.path, graph.successor_start, graph.successor)
    behind = np.zeros(0, np.bool_) if graph.background is None else graph.background
    if len(behind) and burst is not None:
        raise ValueError("tasks in the background need links without a burst")
    # A service in the background has one more piece for each that interrupts it.
    recorded = graph.chunk_hops * (2 if len(behind) else 1) if record else 0
    start, finish, busy, services = _event_loop((*work, *order), rate, delay, credit, cut_through, recorded, behind)
    links = graph.num_links
    return SimulatedRun(start, finish, busy[:links], busy[links:], ServiceRecord(*services) if record else None)


def run_on(fabric: Fabric, graph: TaskGraph, record: bool = False) -> SimulatedRun:
    """Run `graph` on the routers of `fabric` where they have finite buffers, else in the event loop of this module.

    Flits of several packets may take turns on a link between routers, so its services may overlap.
    """
    if fabric.router is None:
        cut_through, burst = fabric.cut_through, fabric.burst
        return simulate(graph, fabric.rate, fabric.latency, cut_through=cut_through, record=record, burst=burst)
    run = simulate_routers(fabric, graph, record)
    servers, passed = len(fabric.rate), np.diff(graph.path_start)
    size = (graph.chunks - 1) * graph.chunk_size + graph.last_size
    busy = np.bincount(graph.path, np.repeat(size, passed), minlength=servers + graph.num_nodes)
    services = _router_services(graph, run, servers) if record else None
    return SimulatedRun(run.start, run.finish, busy[:servers] / fabric.rate, busy[servers:], services)


def _router_services(graph: TaskGraph, run: RouterRun, servers: int) -> ServiceRecord:
    """Every passage of a packet, and every computation, in order of its begin."""
    owner = np.repeat(np.arange(graph.num_tasks), graph.chunks)
    hops = np.diff(graph.path_start)[owner]
    service = np.repeat(np.arange(len(owner)), hops)
    task = owner[service]
    place = np.arange(len(service)) - np.repeat(np.cumsum(hops) - hops, hops)
    server = graph.path[graph.path_start[task] + place]
    chunk = service - (np.cumsum(graph.chunks) - graph.chunks)[task]
    moments = np.where((server >= servers)[:, None], np.stack([run.start, run.finish], axis=1)[task], run.record)
    order = np.argsort(moments[:, 0], kind="stable")
    return ServiceRecord(task[order], server[order], chunk[order], moments[order, 0], moments[order, 1])


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def _first_event(task, first_chunk):
    """Code of what a released task does first: its first chunk arrives, or, without servers, it completes."""
    if first_chunk[task] < first_chunk[task + 1]:
        return len(first_chunk) - 1 + first_chunk[task]
    return task


@njit(cache=True, nogil=True)
@no_type_check
def _release(times, codes, size, now, followers, waits, first_chunk):
    """Count down what `followers` wait for, and start those that wait for no task. Returns the heap's new size."""
    for task in followers:
        waits[task] -= 1
        if waits[task] == 0:
            size = push(times, codes, size, now, _first_event(task, first_chunk))
    return size


# An event is a time and a code: below `tasks` the completion of that task, from there on the arrival of chunk
# `code - tasks`, counted over all tasks. Comparing codes compares (kind, task, chunk).
#
# One event for each chunk and hop is enough: arrivals are taken in order, so a queue is told by the time at which the
# server will have served all that has arrived. With cut-through the tail needs no event of its own: when the head is
# taken, it is known when the tail will leave, and so when it reaches the next server.
#
# What leaves a server comes to the next ones in the order in which it left, so of the chunks on their way from one
# server only the first is in the heap; the others are in a list behind it. The heap is then about as large as the
# network, not as what is sent.
#
# The chunks of a released task are taken one by one, each after the one before it. All stand at the first server from
# the time of release, so a chunk could not have been taken before the one ahead of it, and the order is the same. It
# stays so at every server, as chunks of a task that arrive together are taken in turn: they never overtake each other,
# and the delivery of the last completes the task. Nothing here depends on how much of a chunk must have arrived before
# it moves on, so all of it holds for cut-through too.
#
# A chunk in the background waits in a list of its server. For the one being served is known since when, or from when
# on, it has the server, and when it will be done if nobody comes. Whoever comes puts that off. So one pending event for
# each server is enough, with code -1 - server: one that comes too early is pending again, for the later time.


@njit(cache=True, nogil=True)
@no_type_check
def _event_loop(graph, rate, delay, credit, cut_through, recorded, behind):
    """Start and finish of every task, busy time of every server, and the fields of `recorded` services (0: none).

    `behind` marks tasks in the background; of no length without any.
    """
    chunks, chunk_size, last_size, predecessors, path_start, path, successor_start, successor = graph
    tasks = len(chunks)
    first_chunk = np.zeros(tasks + 1, np.int64)
    first_chunk[1:] = np.cumsum(chunks)
    task_of = np.repeat(np.arange(tasks), chunks)
    hop = path_start[task_of]  # where on the path each chunk is
    waits = predecessors.copy()
    start, finish, busy = np.zeros(tasks), np.zeros(tasks), np.zeros(len(rate))
    free = 0.0 - credit  # buckets are full at first
    tail = np.zeros(len(task_of) if cut_through else 0)  # when the tail of each chunk reaches its server
    # task, server and chunk of each service, and when it began and ended
    numbers, moments, served = np.empty((3, recorded), np.int64), np.empty((2, recorded)), 0
    # Of every server the chunk that it serves in the background, the first and last of those that wait, and since when
    # it is served, what is left of it, and when it will be done, s.
    shared = len(behind) > 0
    at_work, first_waiting, last_waiting = np.full((3, len(rate) if shared else 0), -1, np.int64)
    since, left, due = np.zeros((3, len(at_work)))
    next_waiting = np.full(len(task_of) if shared else 0, -1, np.int64)
    begun = np.zeros(len(behind), np.bool_)
    # Of every server the first and last chunk on their way from it; of each chunk its arrival, and the one behind it.
    first_sent, last_sent = np.full((2, len(rate)), -1, np.int64)
    arrives, next_sent = np.empty(len(task_of)), np.empty(len(task_of), np.int64)
    # At most one event is pending for every chunk, one for every task, and one for every server.
    most = tasks + len(task_of) + len(at_work)
    times, codes = np.empty(most), np.empty(most, np.int64)
    size = 0
    for task in np.flatnonzero(waits == 0):
        size = push(times, codes, size, 0.0, _first_event(task, first_chunk))
    now, following = 0.0, -1  # the next chunk of the task whose chunk was just taken at its first server
    while size > 0 or following >= 0:
        if following >= 0 and (size == 0 or times[0] > now or codes[0] > following):
            code = following
        else:
            if following >= 0:
                size = push(times, codes, size, now, following)
            now, code = times[0], codes[0]
            size = drop_first(times, codes, size)
        following = -1
        if code < 0:  # a chunk in the background may be served
            server = -1 - code
            if now < due[server]:
                size = push(times, codes, size, due[server], code)
                continue
            chunk = at_work[server]
            task = task_of[chunk]
            is_last = chunk + 1 == first_chunk[task + 1]
            busy[server] += (last_size[task] if is_last else chunk_size[task]) / rate[server]
            if not begun[task]:
                begun[task], start[task] = True, since[server]
            if recorded > 0:
                numbers[0, served], numbers[1, served], numbers[2, served] = task, server, chunk - first_chunk[task]
                moments[0, served], moments[1, served] = since[server], now
                served += 1
            hop[chunk] += 1
            if hop[chunk] < path_start[task + 1]:
                size = push(times, codes, size, now + delay[server], tasks + chunk)
            elif is_last:
                size = push(times, codes, size, now + delay[server], task)
            chunk = first_waiting[server]
            at_work[server] = chunk
            if chunk >= 0:
                first_waiting[server] = next_waiting[chunk]
                task = task_of[chunk]
                is_last = chunk + 1 == first_chunk[task + 1]
                left[server] = (last_size[task] if is_last else chunk_size[task]) / rate[server]
                since[server] = max(now, free[server])
                due[server] = since[server] + left[server]
                size = push(times, codes, size, due[server], code)
            continue
        if code < tasks:
            finish[code] = now
            if chunks[code] == 0:
                start[code] = now
            followers = successor[successor_start[code] : successor_start[code + 1]]
            size = _release(times, codes, size, now, followers, waits, first_chunk)
            continue
        chunk = code - tasks
        task = task_of[chunk]
        is_last = chunk + 1 == first_chunk[task + 1]
        server = path[hop[chunk]]
        if hop[chunk] > path_start[task]:
            sender = path[hop[chunk] - 1]
            if first_sent[sender] == chunk:
                first_sent[sender] = behind_it = -1 if last_sent[sender] == chunk else next_sent[chunk]
                if behind_it >= 0:
                    size = push(times, codes, size, arrives[behind_it], tasks + behind_it)
        # With a bucket the server may be free before now: since when it is filling up.
        begin = max(now - credit[server], free[server])
        service = (last_size[task] if is_last else chunk_size[task]) / rate[server]
        if shared and behind[task]:
            if hop[chunk] == path_start[task] and not is_last:
                following = code + 1
            if at_work[server] < 0:
                at_work[server], since[server], left[server], due[server] = chunk, begin, service, begin + service
                size = push(times, codes, size, due[server], -1 - server)
            else:
                if first_waiting[server] < 0:
                    first_waiting[server] = chunk
                else:
                    next_waiting[last_waiting[server]] = chunk
                last_waiting[server], next_waiting[chunk] = chunk, -1
            continue
        filled = begin + service
        begin, leave = max(now, begin), max(now, filled)
        if cut_through:
            leave = max(leave, tail[chunk])
            tail[chunk] = leave + delay[server]
        if service > 0:  # what takes no time, as at a server without limit, holds nobody up
            free[server] = leave if credit[server] == 0 else filled
            if shared and at_work[server] >= 0:
                if since[server] < begin:
                    left[server] = max(left[server] - (begin - since[server]), 0.0)
                    held = task_of[at_work[server]]
                    if not begun[held]:
                        begun[held], start[held] = True, since[server]
                    if recorded > 0:
                        numbers[0, served], numbers[1, served] = held, server
                        numbers[2, served] = at_work[server] - first_chunk[held]
                        moments[0, served], moments[1, served] = since[server], begin
                        served += 1
                since[server] = leave
                due[server] = leave + left[server]
        busy[server] += service
        if recorded > 0:
            numbers[0, served], numbers[1, served], numbers[2, served] = task, server, chunk - first_chunk[task]
            moments[0, served], moments[1, served] = begin, leave
            served += 1
        if hop[chunk] == path_start[task]:
            if chunk == first_chunk[task]:
                start[task] = begin
            if not is_last:
                following = code + 1
        hop[chunk] += 1
        if hop[chunk] < path_start[task + 1]:
            arrives[chunk] = (begin if cut_through else leave) + delay[server]
            last = last_sent[server]
            if first_sent[server] < 0:
                first_sent[server] = last_sent[server] = chunk
                size = push(times, codes, size, arrives[chunk], code)
            elif arrives[last] < arrives[chunk] or (arrives[last] == arrives[chunk] and last < chunk):
                next_sent[last] = last_sent[server] = chunk
            else:  # it took no time and comes before one that left as late
                size = push(times, codes, size, arrives[chunk], code)
        elif is_last:
            size = push(times, codes, size, leave + delay[server], task)
    numbers, moments = numbers[:, :served], moments[:, :served]
    return start, finish, busy, (numbers[0], numbers[1], numbers[2], moments[0], moments[1])
