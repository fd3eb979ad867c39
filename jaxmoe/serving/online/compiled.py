"""The simulator of engines over time, compiled: event by event and to the last bit as the plain one among the tests."""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Bool, Float, Int
from numba import njit

from jaxmoe.des.heap import drop_first, push, uncounted
from jaxmoe.serving.online.compiled_buffering import earn
from jaxmoe.serving.online.compiled_rank import FINISH, FIRST_TOKEN, SENT, leave, push_last
from jaxmoe.serving.online.compiled_step import IN_FLIGHT, LOGGED, ON_WAY, ROW, begin_step, quiet_steps
from jaxmoe.serving.online.kv_blocks import (
    BROUGHT,
    COMPUTED,
    DECODE_ENGINE,
    ENGINE,
    GIVEN,
    KNOWN,
    NONE,
    OUTPUT,
    OWN,
    PAUSED,
    PROMPT,
    RANK,
    release,
)

LATENCY, PER_TOKEN = range(2)  # of the link


class Clock(NamedTuple):
    """Events to come: of `E` engines, those of a decode pool last, and of up to `W` transfers on their way."""

    arrival: Float[np.ndarray, " R"]
    counts: Int[np.ndarray, "4"]
    users: Int[np.ndarray, "1"]
    ends: Float[np.ndarray, " E"]  # of the steps under way
    quiet: Bool[np.ndarray, " E"]  # steps begun that may be followed by others like them
    first_engine: Int[np.ndarray, " pools+1"]
    first_rank: Int[np.ndarray, " E+1"]
    turn: Int[np.ndarray, " pools"]  # which engine is next
    rank_turn: Int[np.ndarray, " E"]
    least_loaded: Int[np.ndarray, " pools"]
    link: Float[np.ndarray, "2"]
    transfer_ends: Float[np.ndarray, " W"]
    transfer_rows: Int[np.ndarray, " W"]
    table: Int[np.ndarray, " E"]  # which table says what a step takes
    pause: Float[np.ndarray, " E"]  # by which the next step is longer
    due: Float[np.ndarray, " E"]  # when the next change comes, infinite without any
    next_change: Int[np.ndarray, " E"]
    first_change: Int[np.ndarray, " E+1"]
    change_at: Float[np.ndarray, " C"]
    change_table: Int[np.ndarray, " C"]
    change_pause: Float[np.ndarray, " C"]


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def run(clock, queues, memory, tables, routing, records, features):
    """Go on until all requests are served; False where the log of steps is full, to be read and emptied before."""
    return _run(
        uncounted(clock),
        uncounted(queues),
        uncounted(memory),
        uncounted(tables),
        uncounted(routing),
        uncounted(records),
        uncounted(features),
    )


@njit(cache=True, nogil=True)
@no_type_check
def _run(clock, queues, memory, tables, routing, records, features):
    engines, counts, quiet = len(clock.ends), clock.counts, clock.quiet
    while True:
        if 0 < len(records.step_times) < counts[LOGGED] + engines:
            return False
        now = _next_sending(clock)
        for engine in range(engines):
            now = min(now, clock.ends[engine])
        if counts[ON_WAY] > 0:
            now = min(now, clock.transfer_ends[0])
        if now == np.inf:
            return True
        for engine in range(engines):
            if clock.ends[engine] == now:
                clock.ends[engine] = np.inf
                for rank in range(clock.first_rank[engine], clock.first_rank[engine + 1]):
                    _end_step(clock, queues, memory, routing, records, rank, now, engine < clock.first_engine[1])
        while counts[ON_WAY] > 0 and clock.transfer_ends[0] == now:
            _end_transfer(clock, queues, memory)
        while _next_sending(clock) <= now:
            _send(clock, queues, memory, now)
        for engine in range(engines):
            if clock.ends[engine] == np.inf:
                _change(clock, engine, now)
                seconds, quiet[engine] = begin_step(
                    queues, memory, tables, routing, records, counts, features, _where(clock, engine), now
                )
                if seconds >= 0:
                    clock.ends[engine], clock.pause[engine] = now + seconds, 0.0
        for engine in range(engines):
            if quiet[engine]:
                quiet[engine], ends, until = False, clock.ends[engine], _until(clock, engine)
                clock.ends[engine] = quiet_steps(
                    queues, memory, tables, records, counts, features, _where(clock, engine), ends, until
                )


@njit(cache=True, nogil=True)
@no_type_check
def _where(clock, engine):
    """Number of an engine, its first rank, that after its last, its table, and the pause before its next step."""
    first, end = clock.first_rank[engine], clock.first_rank[engine + 1]
    return engine, first, end, clock.table[engine], clock.pause[engine]


@njit(cache=True, nogil=True)
@no_type_check
def _change(clock, engine, now):
    """Take the tables whose time has come."""
    while clock.due[engine] <= now:
        at = clock.next_change[engine]
        clock.table[engine] = clock.change_table[at]
        clock.pause[engine] += clock.change_pause[at]
        clock.next_change[engine] = at + 1
        clock.due[engine] = clock.change_at[at + 1] if at + 1 < clock.first_change[engine + 1] else np.inf


@njit(cache=True, nogil=True)
@no_type_check
def _until(clock, engine):
    """A time before which no request can come to an engine, and its table stays."""
    users, reading, row = clock.users[0] >= 0, clock.first_engine[1], clock.counts[ROW]
    until = _next_sending(clock)
    if not users and not clock.least_loaded[0] and engine < reading:  # in turn
        row += (engine - clock.turn[0]) % reading
        until = clock.arrival[row] if row < len(clock.arrival) else np.inf
    if clock.counts[ON_WAY] > 0:
        until = min(until, clock.transfer_ends[0])
    # Whoever ends elsewhere sends a user's next request, and whoever is read elsewhere comes here to be decoded.
    others = len(clock.ends) if users else reading if len(clock.transfer_ends) > 0 else 0
    for other in range(others):
        if other != engine:
            until = min(until, clock.ends[other])
    return min(until, clock.due[engine])


@njit(cache=True, nogil=True)
@no_type_check
def _next_sending(clock):
    row = clock.counts[ROW]
    full = 0 <= clock.users[0] <= clock.counts[IN_FLIGHT]
    return np.inf if full or row == len(clock.arrival) else clock.arrival[row]


@njit(cache=True, nogil=True)
@no_type_check
def _load(queues, first, end):
    load = 0
    for rank in range(first, end):
        load += 4 * queues.waiting[rank] + queues.running[rank] - queues.leaving[rank]
    return load


@njit(cache=True, nogil=True)
@no_type_check
def _choose_engine(clock, queues, pool):
    first, end = clock.first_engine[pool], clock.first_engine[pool + 1]
    chosen, least = first + clock.turn[pool], np.int64(-1)
    if clock.least_loaded[pool]:
        for step in range(end - first):
            engine = first + (clock.turn[pool] + step) % (end - first)
            load = _load(queues, clock.first_rank[engine], clock.first_rank[engine + 1])
            if least < 0 or load < least:
                chosen, least = engine, load
    clock.turn[pool] = (chosen - first + 1) % (end - first)
    return chosen


@njit(cache=True, nogil=True)
@no_type_check
def _queue(clock, queues, memory, row, engine):
    """Let a request wait at the least loaded rank of an engine. Returns which."""
    first, end = clock.first_rank[engine], clock.first_rank[engine + 1]
    chosen, least = first, np.int64(-1)
    for step in range(end - first):
        rank = first + (clock.rank_turn[engine] + step) % (end - first)
        load = _load(queues, rank, rank + 1)
        if least < 0 or load < least:
            chosen, least = rank, load
    clock.rank_turn[engine] = (chosen - first + 1) % (end - first)
    push_last(queues, memory, chosen, row)
    return chosen - first


@njit(cache=True, nogil=True)
@no_type_check
def _send(clock, queues, memory, now):
    row, jobs = clock.counts[ROW], memory.jobs
    clock.counts[ROW] += 1
    clock.counts[IN_FLIGHT] += 1
    queues.moments[row, SENT] = now
    jobs[row, ENGINE] = _choose_engine(clock, queues, 0)
    jobs[row, RANK] = _queue(clock, queues, memory, row, jobs[row, ENGINE])


@njit(cache=True, nogil=True)
@no_type_check
def _end_step(clock, queues, memory, routing, records, rank, now, reads):
    """Hand out the tokens of a step. Requests that are done leave, as do those of an engine that only `reads`."""
    jobs, seats, moments, counts = memory.jobs, queues.seats, queues.moments, clock.counts
    reads_only = reads and len(clock.transfer_ends) > 0
    for at in range(queues.running[rank]):
        row = seats[rank, at]
        if row < 0:
            continue
        given = jobs[row, GIVEN]
        jobs[row, GIVEN] = 0
        if jobs[row, PAUSED] != NONE:
            continue
        jobs[row, COMPUTED] += given
        if given > 0 and jobs[row, COMPUTED] == jobs[row, KNOWN]:
            token = jobs[row, KNOWN] - jobs[row, PROMPT]
            jobs[row, KNOWN] += 1
            if len(routing.experts) > 0:
                earn(jobs, routing, row)
            if len(records.token_times) > 0:
                records.token_times[records.token_starts[row] + token] = now
            if token == 0:
                moments[row, FIRST_TOKEN] = now
            if token + 1 == jobs[row, OUTPUT]:
                moments[row, FINISH] = now
                counts[IN_FLIGHT] -= 1
                leave(queues, rank, at, True)
            elif reads_only:
                seconds = clock.link[LATENCY] + jobs[row, PROMPT] * clock.link[PER_TOKEN]
                counts[ON_WAY] = push(clock.transfer_ends, clock.transfer_rows, counts[ON_WAY], now + seconds, row)
                leave(queues, rank, at, False)


@njit(cache=True, nogil=True)
@no_type_check
def _end_transfer(clock, queues, memory):
    """KV of a prompt is where it will be decoded: the engine that read it lets go of it."""
    row, jobs = clock.transfer_rows[0], memory.jobs
    clock.counts[ON_WAY] = drop_first(clock.transfer_ends, clock.transfer_rows, clock.counts[ON_WAY])
    release(memory, clock.first_rank[jobs[row, ENGINE]] + jobs[row, RANK], row)
    jobs[row, COMPUTED], jobs[row, BROUGHT], jobs[row, OWN] = 0, jobs[row, PROMPT], NONE
    jobs[row, DECODE_ENGINE] = _choose_engine(clock, queues, 1)
    _queue(clock, queues, memory, row, jobs[row, DECODE_ENGINE])
