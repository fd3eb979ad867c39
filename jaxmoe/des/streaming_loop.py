"""The event loop of `jaxmoe.des.streaming`, compiled.

Servers are the DDR channels, then the arrays of the dies, then their senders. `due` is when each is done, infinite
where it is idle; ties go to the lower number. A micro-slice on a die has two marks, computed and sent; with both it
leaves its slot. Only its newest copy is sent. What could not begin is tried again when what it waits for changes.
"""

from collections import namedtuple
from typing import no_type_check

import numpy as np
from numba import njit

from jaxmoe.des.buffers import admits, empty_buffers, give_slot, take_slot
from jaxmoe.des.heap import uncounted

LOAD, COMPUTE, SEND = range(3)
RECEIVED, LOADED, SENDING = range(3)  # lists of what waits on a die
IS_COMPUTED, IS_SENT = 1, 2

# `at`: of each die the group it is loading, how many of it, and of all; `chosen`: groups taken, computations left of
# these, and done; `counts`: services by kind, and recorded; `blocked[place, die]`: a sender that waits for a die, or
# in the last row for a link; `tries`: which dies and channels may be able to begin something.
State = namedtuple(
    "State",
    "due busy serving target marks left lists ends buffers at sequence taken chosen counts linked receiving blocked "
    "tries numbers moments",
)


@njit(cache=True, nogil=True)
@no_type_check
def event_loop(given, durations, rules, recorded):
    """Run the simulation until no server is at work any more.

    Returns the time of the last event, s, the number of computations done, the busy time of every server, s, the state
    of the buffers, counts of services, and the recorded services: their numbers, and begin and end, s.
    """
    made = _empty(given, durations, recorded)
    work, times, state = uncounted(given), uncounted(durations), uncounted(made)
    for one in range(len(work.expert)):
        expert, origin = work.expert[one], work.origin[one]
        state.left[one] = work.stops[expert] - work.needed[expert, origin]
        if work.held[one]:
            state.chosen[1] += work.stops[expert]
            take_slot(state.buffers, times.capacity, origin, 0.0)
            _loaded(work, state, one, origin)
    now = earlier = 0.0
    while True:
        _begin(work, times, rules, state, now)
        now, earlier = _soonest(state), now
        if now == np.inf:
            break
        for server in range(len(state.due)):
            if state.due[server] <= now:
                _finish(work, times, rules, state, server, now)
    return earlier, made.chosen[2], made.busy, made.buffers, made.counts, made.numbers, made.moments


@njit(inline="always")
@no_type_check
def _soonest(state):
    """Time at which the next server is done, s; infinite where none is at work."""
    soonest = np.inf
    for server in range(len(state.due)):
        if state.due[server] < soonest:
            soonest = state.due[server]
    return soonest


@njit(inline="always")
@no_type_check
def _empty(work, times, recorded):
    """Initial state of the simulation, with all servers idle and all buffers empty."""
    dies, channels, groups = work.needed.shape[1], times.channel.max() + 1, len(work.work)
    servers, slices = channels + 2 * dies, len(work.expert)
    links = work.links.max() + 1 if len(work.links) else 1
    return State(
        np.full(servers, np.inf),
        np.zeros(servers),
        np.full(servers, -1),
        np.full(servers, -1),
        np.zeros((slices, dies), np.uint8),
        np.zeros(slices, np.int64),
        np.zeros((3, dies, times.capacity.max() + 1), np.int64),
        np.zeros((3, dies), np.int64),
        empty_buffers(times.capacity),
        np.zeros((3, dies), np.int64),
        np.zeros(groups, np.int64),
        np.zeros(groups, np.bool_),
        np.zeros(3, np.int64),
        np.zeros(4, np.int64),
        np.zeros(links, np.bool_),
        np.zeros(dies, np.bool_),
        np.zeros((dies + 1, dies), np.bool_),
        np.ones((3, dies), np.bool_),
        np.full((4, recorded), -1),
        np.zeros((2, recorded)),
    )


@njit(inline="always")
@no_type_check
def _begin(work, times, rules, state, now):
    """Start every service that can start: computations of all dies, then their transfers, then loads of channels."""
    dies = work.needed.shape[1]
    channels = len(state.due) - 2 * dies
    for die in range(dies):
        if state.tries[COMPUTE, die] and state.due[channels + die] == np.inf:
            _compute(work, times, rules, state, die, now)
        state.tries[COMPUTE, die] = False
    for die in range(dies):
        if state.tries[SEND, die] and state.due[channels + dies + die] == np.inf:
            _send(work, times, state, die, now)
        state.tries[SEND, die] = False
    for channel in range(channels):
        if state.tries[LOAD, channel] and state.due[channel] == np.inf:
            _load(work, times, rules, state, channel, now)
        state.tries[LOAD, channel] = False


@njit(inline="always")
@no_type_check
def _serve(state, server, kind, die, one, now, seconds, target):
    """Start a service of `seconds` on a server, and record it where services are recorded."""
    state.due[server], state.serving[server], state.target[server] = now + seconds, one, target
    state.busy[server] += seconds
    if state.numbers.shape[1] > 0:
        count, numbers = state.counts[3], state.numbers
        numbers[0, count], numbers[1, count], numbers[2, count], numbers[3, count] = kind, die, one, target
        state.moments[0, count], state.moments[1, count] = now, now + seconds
        state.counts[3] += 1


@njit(inline="always")
@no_type_check
def _finish(work, times, rules, state, server, now):
    """End the service of a server, and note what may start now that it is done."""
    dies = work.needed.shape[1]
    channels = len(state.due) - 2 * dies
    one, target = state.serving[server], state.target[server]
    state.due[server] = np.inf
    if server < channels:
        state.counts[LOAD] += 1
        state.tries[LOAD, server] = True
        _loaded(work, state, one, target)
        return
    die, mark = server - channels, IS_COMPUTED
    if die < dies:
        state.counts[COMPUTE] += 1
        state.tries[COMPUTE, die] = True
        state.chosen[1] -= 1
        state.chosen[2] += 1
        if rules.in_turn and state.chosen[1] == 0:
            state.tries[LOAD, :] = True
    else:
        die, mark = die - dies, IS_SENT
        state.counts[SEND] += 1
        state.receiving[target] = False
        pair = die * dies + target
        for link in range(work.paths[pair], work.paths[pair + 1]):
            state.linked[work.links[link]] = False
        _append(state, RECEIVED if rules.newest_first else LOADED, target, one)
        state.tries[COMPUTE, target] = True
        state.tries[SEND, die] = True
        _wake(state, target)
        _wake(state, dies)
    _mark(times, rules, state, one, die, mark, now)


@njit(inline="always")
@no_type_check
def _wake(state, place):
    """Let the senders that wait for this die, or for a link, try again."""
    for die in range(state.blocked.shape[1]):
        if state.blocked[place, die]:
            state.blocked[place, die] = False
            state.tries[SEND, die] = True


@njit(inline="always")
@no_type_check
def _append(state, kind, die, one):
    state.lists[kind, die, state.ends[kind, die]] = one
    state.ends[kind, die] += 1


@njit(inline="always")
@no_type_check
def _removed(state, kind, die, index):
    """Remove the entry at `index` from a list of waiting micro-slices, and return it; the others keep their order."""
    lists, last = state.lists, state.ends[kind, die] - 1
    one = lists[kind, die, index]
    for place in range(index, last):
        lists[kind, die, place] = lists[kind, die, place + 1]
    state.ends[kind, die] = last
    return one


@njit(inline="always")
@no_type_check
def _loaded(work, state, one, die):
    """Queue a loaded micro-slice for computation, or for sending on a die that has no tokens of its expert."""
    if work.needed[work.expert[one], die]:
        _append(state, LOADED, die, one)
        state.tries[COMPUTE, die] = True
    else:
        state.marks[one, die] = IS_COMPUTED
        _append(state, SENDING, die, one)
        state.tries[SEND, die] = True


@njit(inline="always")
@no_type_check
def _mark(times, rules, state, one, die, mark, now):
    """Mark a micro-slice as computed or sent; free its slot once it is both (rule 3)."""
    state.marks[one, die] |= mark
    if state.marks[one, die] == IS_COMPUTED | IS_SENT:
        give_slot(state.buffers, times.capacity, die, now)
        _wake(state, die)
        if rules.balanced:
            state.tries[LOAD, :] = True
        else:
            state.tries[LOAD, times.channel[die]] = True


@njit(inline="always")
@no_type_check
def _compute(work, times, rules, state, die, now):
    """Start the next computation of an idle die, by rules 1 and 2."""
    if rules.newest_first and state.ends[RECEIVED, die] > 0:
        one = _removed(state, RECEIVED, die, state.ends[RECEIVED, die] - 1)
    elif state.ends[LOADED, die] > 0:
        one = _removed(state, LOADED, die, 0)
    else:
        return
    channels = len(state.due) - 2 * work.needed.shape[1]
    _serve(state, channels + die, COMPUTE, die, one, now, times.compute[work.expert[one], die], -1)
    if state.left[one] > 0:
        _append(state, SENDING, die, one)
        state.tries[SEND, die] = True
    else:
        state.marks[one, die] |= IS_SENT


@njit(inline="always")
@no_type_check
def _send(work, times, state, die, now):
    """Start the first waiting transfer of an idle sender whose receiver and links are free."""
    dies = work.needed.shape[1]
    for index in range(state.ends[SENDING, die]):
        one = state.lists[SENDING, die, index]
        to = work.following[work.expert[one], die]
        if state.receiving[to] or not admits(state.buffers, to, state.left[one] - 1):
            state.blocked[to, die] = True
            continue
        first, last = work.paths[die * dies + to], work.paths[die * dies + to + 1]
        if not _free(work, state, first, last):
            state.blocked[dies, die] = True
            continue
        _removed(state, SENDING, die, index)
        for link in range(first, last):
            state.linked[work.links[link]] = True
        state.receiving[to] = True
        state.left[one] -= 1
        take_slot(state.buffers, times.capacity, to, now)
        _serve(state, len(state.due) - dies + die, SEND, die, one, now, times.send[die, to], to)
        return


@njit(inline="always")
@no_type_check
def _free(work, state, first, last):
    """Whether all links of a path are idle."""
    held = 0
    for link in range(first, last):
        held += state.linked[work.links[link]]
    return held == 0


@njit(inline="always")
@no_type_check
def _load(work, times, rules, state, channel, now):
    """Start the next load of an idle channel, by rules 4 and 5, for that of its dies which has had the fewest loads."""
    best, fewest, place, chosen = -1, 0, -1, -1
    for die in range(len(times.channel)):
        if times.channel[die] != channel or (best >= 0 and state.at[2, die] >= fewest):
            continue
        one = _next(work, rules, state, die)
        if one < 0:
            continue
        expert, to = work.expert[one], die
        if rules.balanced:
            for other in range(len(times.channel)):
                more = not work.needed[expert, to] or state.buffers[0][other] > state.buffers[0][to]
                if work.needed[expert, other] and more:
                    to = other
        if admits(state.buffers, to, work.stops[expert] - work.needed[expert, to]):
            best, fewest, place, chosen = die, state.at[2, die], to, one
    if best < 0:
        return
    expert = work.expert[chosen]
    state.at[1, best] += 1
    state.at[2, best] += 1
    state.left[chosen] = work.stops[expert] - work.needed[expert, place]
    take_slot(state.buffers, times.capacity, place, now)
    seconds = times.load[best] + (times.latency[channel] if state.busy[channel] == 0 else 0.0)
    _serve(state, channel, LOAD, place, chosen, now, seconds, place)


@njit(inline="always")
@no_type_check
def _next(work, rules, state, die):
    """The micro-slice that a die loads next; -1 where there is none now. Chooses the next group where it must."""
    at, chosen = state.at, state.chosen
    dies = work.needed.shape[1]
    while True:
        if at[0, die] == chosen[0]:
            if chosen[0] == len(state.taken) or (rules.in_turn and chosen[1] > 0):
                return -1
            group = _group(work, rules, state)
            state.taken[group] = True
            state.sequence[chosen[0]] = group
            chosen[0] += 1
            chosen[1] += work.work[group]
        here = state.sequence[at[0, die]] * dies + die
        if work.first[here] + at[1, die] < work.first[here + 1]:
            return work.queue[work.first[here] + at[1, die]]
        at[0, die] += 1
        at[1, die] = 0


@njit(inline="always")
@no_type_check
def _group(work, rules, state):
    """The first group left that has tokens on an idle die (Algorithm 1), or else the first that is left."""
    dies = work.needed.shape[1]
    channels, earliest = len(state.due) - 2 * dies, -1
    for group in range(len(state.taken)):
        if state.taken[group]:
            continue
        if earliest < 0:
            earliest = group
        if not rules.matched:
            break
        for die in range(dies):
            idle = state.due[channels + die] == np.inf and state.ends[RECEIVED, die] + state.ends[LOADED, die] == 0
            if work.covers[group, die] and idle:
                return group
    return earliest
