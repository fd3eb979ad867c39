"""The loop over cycles of routers with finite buffers: tasks, nodes that inject and compute, every router's steps."""

from typing import NamedTuple, no_type_check

import numpy as np
from numba import njit

from jaxmoe.des.heap import drop_first, push
from jaxmoe.des.router_step import arrive, fits, give_credit, hold, note, put, step
from jaxmoe.des.router_tables import ARRIVALS, NOBODY, RETURNS, TAILS

TASK = np.dtype(
    [
        ("packets", np.int64),  # 0: none
        ("node", np.int64),  # that sends them, or computes
        ("computes", np.int64),
        ("first_packet", np.int64),
        ("path", np.int64),  # where it begins
        ("awaits", np.int64),  # tasks
        ("undelivered", np.int64),  # packets
        ("following", np.int64),  # the next task that its node sends, -1: none yet
        ("work", np.float64),  # cycles of a computation
        ("start", np.float64),
        ("finish", np.float64),
    ]
)
# An injection channel. That of a node's first port has what is of the node.
SOURCE = np.dtype(
    [
        ("now", np.int64),  # task whose packets it sends, -1: none
        ("at_packet", np.int64),  # of that task
        ("target", np.int64),  # buffer that it sends to, -1: none yet
        ("rest", np.int64),  # flits
        ("last", np.int64),  # task that was released last, -1: none
        ("released", np.int64),  # packets that were
        ("free_at", np.float64),  # when the node has computed
    ]
)


class RouterWork(NamedTuple):
    """Work of the nodes for the loop over cycles: tasks, their successors, injection channels, and a heap of tasks."""

    task: np.ndarray  # records `TASK`
    source: np.ndarray  # records `SOURCE`
    begins: np.ndarray  # where the successors of every task begin in `successor`
    successor: np.ndarray
    times: np.ndarray  # room for the heap of tasks that will be done
    codes: np.ndarray


@njit(_nrt=False, error_model="numpy")
@no_type_check
def _release(net, work, size, number, now):
    """Start a task whose predecessors are all finished. Returns the heap's new size."""
    task, source = work.task, work.source
    if task[number].packets == 0 and task[number].computes == 0:
        task[number].start = now
        return push(work.times, work.codes, size, now, number)
    first = task[number].node * net.lanes
    if task[number].computes:
        begin = max(now, source[first].free_at)
        task[number].start = begin
        source[first].free_at = begin + task[number].work
        return push(work.times, work.codes, size, source[first].free_at, number)
    if source[first].last >= 0:
        task[source[first].last].following = number
    source[first].last = number
    for lane in range(net.lanes):  # packets take the ports of their node in turn
        at_packet = (lane - source[first].released) % net.lanes
        if source[first + lane].now < 0 and at_packet < task[number].packets:
            source[first + lane].now, source[first + lane].at_packet = number, at_packet
    source[first].released += task[number].packets
    return size


@njit(inline="always", _nrt=False, error_model="numpy")
@no_type_check
def _begin_packet(net, work, at, now):
    """The next packet of an injection channel takes a virtual channel with room, in turn, where there is one."""
    task, c = work.source[at].now, net.injection + at
    number = work.task[task].first_packet + work.source[at].at_packet
    tries = 1 if net.channel[c].last_vc < 0 else net.vcs  # BookSim2 tries the first alone until one was used
    vc = net.channel[c].last_vc
    for _ in range(tries):
        vc = vc + 1 if vc + 1 < net.vcs else 0
        b = c * net.vcs + vc
        free = (net.channel[c].free >> vc) & 1 == 1 and net.buffer[b].credits > 0
        if work.source[at].target < 0 and free and fits(net, b, number):
            net.channel[c].last_vc = vc
            net.channel[c].free &= ~(np.int64(1) << vc)
            net.packet[number].hop, net.packet[number].born = work.task[task].path, now
            hold(net, b, number, NOBODY)
            work.source[at].target, work.source[at].rest = b, net.packet[number].flits


@njit(inline="always", _nrt=False, error_model="numpy")
@no_type_check
def _inject_flit(net, work, at, b, now):
    """A flit of a packet enters an injection channel."""
    task, source, c = work.task, work.source, net.injection + at
    sent, number = source[at].now, task[source[at].now].first_packet + source[at].at_packet
    if source[at].at_packet == 0 and source[at].rest == net.packet[number].flits:
        task[sent].start = now
    net.buffer[b].credits -= 1
    source[at].rest -= 1
    net.channel[c].free_at = max(float(now), net.channel[c].free_at) + net.channel[c].period
    put(net, ARRIVALS, now + net.channel[c].wire, b)
    if len(net.record) > 0:
        note(net, number, task[sent].path, source[at].rest, float(now), net.channel[c].free_at)
    if source[at].rest == 0:
        net.channel[c].free |= np.int64(1) << net.buffer[b].vc
        source[at].target = -1
        source[at].at_packet += net.lanes
        while source[at].now >= 0 and source[at].at_packet >= task[source[at].now].packets:
            source[at].at_packet -= task[source[at].now].packets
            source[at].now = task[source[at].now].following


@njit(inline="always", _nrt=False, error_model="numpy")
@no_type_check
def _inject(net, work, at, now):
    """A flit of the next packet enters an injection channel, if there is room. Returns whether one did or soon will."""
    moved = 1
    if net.channel[net.injection + at].free_at <= now:
        if work.source[at].target < 0:
            _begin_packet(net, work, at, now)
        b = work.source[at].target
        moved = 1 if b >= 0 and net.buffer[b].credits > 0 else 0
        if moved:
            _inject_flit(net, work, at, b, now)
    return moved


@njit(inline="always", _nrt=False, error_model="numpy")
@no_type_check
def _happen(net, work, size, now):
    """Deliver the flits, credits and packets that arrive in this cycle.

    Returns the new size of the heap of finished tasks, and the number of arrivals.
    """
    slot = now & (len(net.wheel) - 1)
    flits, credits, tails = net.wheel[slot, ARRIVALS], net.wheel[slot, RETURNS], net.wheel[slot, TAILS]
    for event in range(flits):
        arrive(net, net.wheel[slot, 3 + event])
    for event in range(credits):
        give_credit(net, net.wheel[slot, 3 + net.width + event])
    for event in range(tails):
        number = net.packet[net.wheel[slot, 3 + 2 * net.width + event]].task
        work.task[number].undelivered -= 1
        if work.task[number].undelivered == 0:
            size = push(work.times, work.codes, size, float(now), number)
    for kind in range(3):
        net.wheel[slot, kind] = 0
    return size, flits + credits + tails


@njit(inline="always", _nrt=False, error_model="numpy")
@no_type_check
def _next_arrival(wheel, now):
    """The first cycle from this one on in which something on its way arrives; -1 where nothing is."""
    for cycle in range(now, now + len(wheel)):
        slot = cycle & (len(wheel) - 1)
        if wheel[slot, ARRIVALS] + wheel[slot, RETURNS] + wheel[slot, TAILS] > 0:
            return cycle
    return -1


@njit(cache=True, _nrt=False, nogil=True, error_model="numpy")
@no_type_check
def run_routers(net, work):
    """Run all tasks. Returns how many are done: fewer than all where nothing can move any more."""
    tasks, size = len(work.task), 0
    for number in range(tasks):
        if work.task[number].awaits == 0:
            size = _release(net, work, size, number, 0.0)
    now, done, partial = 0, 0, 0.0
    while True:
        size, moved = _happen(net, work, size, now)
        while size > 0 and work.times[0] <= now:
            time, number = work.times[0], work.codes[0]
            size = drop_first(work.times, work.codes, size)
            work.task[number].finish = time
            done += 1
            for edge in range(work.begins[number], work.begins[number + 1]):
                then = work.successor[edge]
                work.task[then].awaits -= 1
                if work.task[then].awaits == 0:
                    size = _release(net, work, size, then, time)
        if done == tasks:
            return done
        for at in range(len(work.source)):
            if work.source[at].now >= 0:
                moved += _inject(net, work, at, now)
        partial += net.speedup
        while partial >= 1.0:
            partial -= 1.0
            leaves = now if partial >= 1.0 else now + 1
            for at in range(len(net.router)):
                if net.router[at].sends | net.router[at].waits:
                    moved += step(net, at, now, leaves)
        now += 1
        if moved == 0:  # nor does anything until what is on its way arrives, or a task is done
            then = _next_arrival(net.wheel, now)
            if then < 0 and size == 0:
                return done
            if size > 0 and (then < 0 or work.times[0] <= then):
                then = max(now, np.int64(np.ceil(work.times[0])))
            while now < then:
                partial = (partial + net.speedup) % 1.0
                now += 1
