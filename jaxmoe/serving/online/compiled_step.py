"""Steps of an engine, compiled: what ranks in lockstep have to do, and how long it takes.

Most steps are quiet: every request that runs has one further token, none ends, none comes, and none that waits can be
admitted, as in the step before. They follow each other without a look at other engines, and contexts alone change.
"""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.serving.online.compiled_buffering import pass_layers
from jaxmoe.serving.online.compiled_rank import (
    CONTEXT,
    DECAYS,
    DECODING,
    FULL,
    LONGEST,
    LOST,
    READ,
    READ_CONTEXT,
    SEQUENCES,
    look,
)
from jaxmoe.serving.online.compiled_reserve import rest
from jaxmoe.serving.online.compiled_schedule import schedule
from jaxmoe.serving.online.kv_blocks import (
    AHEAD,
    APART,
    BLOCK_TOKENS,
    BLOCKS,
    COMPUTED,
    HELD,
    KNOWN,
    NONE,
    OUTPUT,
    PROMPT,
    grow,
)
from jaxmoe.serving.online.packed_table import step_seconds, steps_of_cell

ROW, IN_FLIGHT, ON_WAY, LOGGED = range(4)  # counts of the clock
LOG_ENGINE, LOG_TOKENS, LOG_RUNNING, LOG_WAITING, LOG_BLOCKS = range(5)


class Records(NamedTuple):
    """Token times and a log of steps, each empty if not asked for."""

    token_starts: Int[np.ndarray, " starts"]
    token_times: Float[np.ndarray, " T"]
    step_numbers: Int[np.ndarray, "L 5"]
    step_times: Float[np.ndarray, "L 2"]


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def begin_step(queues, memory, tables, routing, records, counts, features, where, now):
    """Run the batch of those whom the ranks knew of when the last step began, if any, else of all who are there.

    Returns its seconds, below 0 if there is nothing to do, and whether it may be the first of quiet steps.
    """
    engine, first, end, table, pause = where
    ahead, total, quiet = memory.pools[memory.pool_of[first], AHEAD] == 1, 0, True
    if ahead:
        total = _schedule(queues, memory, first, end, now)
    if total == 0:
        for rank in range(first, end):
            look(queues, memory, rank, now)
        total = _schedule(queues, memory, first, end, now)
    if total == 0:
        for rank in range(first, end):
            rest(queues, memory, rank)
        return -1.0, False
    apart = memory.pools[memory.pool_of[first], APART] == 1
    for rank in range(first, end):
        sums = queues.sums[rank]
        quiet &= sums[READ] == 0 and sums[LOST] == 0 and sums[DECODING] == queues.running[rank]
        quiet &= queues.seen[rank] == queues.waiting[rank]
        quiet &= not apart or queues.waiting[rank] == 0 or queues.counts[rank, FULL] == 1
    if len(routing.experts) > 0:
        quiet, seconds = False, pass_layers(queues, memory, tables, routing, first, table)
    else:
        _fill(queues, features, first, end)
        seconds = step_seconds(tables, table, features[: end - first], False)
    seconds = pause + seconds
    if len(records.step_times) > 0:
        _log(queues, memory, records, counts, engine, first, end, now, seconds)
    if ahead:
        for rank in range(first, end):
            look(queues, memory, rank, now)
    return seconds, quiet


@njit(cache=True, nogil=True)
@no_type_check
def _schedule(queues, memory, first, end, now):
    """Make a batch. Returns its tokens."""
    total = 0
    for rank in range(first, end):
        schedule(queues, memory, rank, now)
        total += queues.sums[rank, READ] + queues.sums[rank, DECODING]
    return total


@njit(cache=True, nogil=True)
@no_type_check
def _fill(queues, features, first, end):
    """Numbers of a batch, in the order of `step_table.FEATURES`."""
    total, most = 0, 0
    for rank in range(first, end):
        sums, row = queues.sums[rank], features[rank - first]
        tokens = sums[READ] + sums[DECODING]
        row[0], row[1], row[2], row[4], row[6] = tokens, sums[SEQUENCES], sums[READ], sums[DECODING], sums[LONGEST]
        row[3] = sums[READ_CONTEXT] / max(sums[READ], 1)
        row[5] = sums[CONTEXT] / max(sums[DECODING], 1)
        row[9] = tokens
        total, most = total + tokens, max(most, tokens)
    features[: end - first, 7], features[: end - first, 8] = total, most


@njit(cache=True, nogil=True)
@no_type_check
def quiet_steps(queues, memory, tables, records, counts, features, where, ends, until):
    """Take quiet steps after one that `ends`, as long as they begin before `until`. Returns the end of the last."""
    engine, first, end, table, _ = where
    steps, most, logs = 0, _most_quiet(queues, memory, first, end), len(records.step_times) > 0
    records_all = logs or len(records.token_times) > 0
    while steps < most and ends < until and (not logs or counts[LOGGED] < len(records.step_times)):
        for rank in range(first, end):
            queues.sums[rank, CONTEXT] += queues.sums[rank, DECODING]
            queues.sums[rank, LONGEST] += queues.sums[rank, DECODING] > 0
            if records_all:
                _advance(queues, memory, records, rank, 1, ends)
        if steps == 0:
            _fill(queues, features, first, end)
        else:
            for rank in range(first, end):
                features[rank - first, 5] = queues.sums[rank, CONTEXT] / max(queues.sums[rank, DECODING], 1)
                features[rank - first, 6] = queues.sums[rank, LONGEST]
        seconds = step_seconds(tables, table, features[: end - first], steps > 0)
        if logs:
            _log(queues, memory, records, counts, engine, first, end, ends, seconds)
        steps, ends = steps + 1, ends + seconds
        if not records_all and end - first == 1 and tables.changing[table] >= 0:
            sums, before = queues.sums[first], steps
            sums[CONTEXT], steps, ends = steps_of_cell(
                tables, table, features, sums[CONTEXT], sums[DECODING], steps, most, ends, until
            )
            sums[LONGEST] += steps - before
    if not records_all and steps > 0:
        for rank in range(first, end):
            _advance(queues, memory, records, rank, steps, ends)
    return ends


@njit(cache=True, nogil=True)
@no_type_check
def _most_quiet(queues, memory, first, end):
    """Further steps in which nobody ends and blocks suffice for sure."""
    jobs, most = memory.jobs, 1 << 60
    for rank in range(first, end):
        pool, running, room = memory.pool_of[rank], queues.running[rank], 1 << 60
        size, total = memory.pools[pool, BLOCK_TOKENS], memory.pools[pool, BLOCKS]
        for at in range(running):
            row = queues.seats[rank, at]
            most = min(most, jobs[row, OUTPUT] - (jobs[row, KNOWN] - jobs[row, PROMPT]) - 1)
            room = min(room, jobs[row, HELD] * size - jobs[row, COMPUTED] - 1)
        if total != NONE and running > 0:
            most = min(most, room + (total - memory.used[rank]) // running * size)
    return most


@njit(cache=True, nogil=True)
@no_type_check
def _advance(queues, memory, records, rank, steps, now):
    """Tokens of so many steps for all that run at a rank; where tokens are recorded, of one step that ends now."""
    jobs = memory.jobs
    if queues.running[rank] > 0:
        queues.counts[rank, DECAYS] += steps
    for at in range(queues.running[rank]):
        row = queues.seats[rank, at]
        if len(records.token_times) > 0:
            records.token_times[records.token_starts[row] + jobs[row, KNOWN] - jobs[row, PROMPT]] = now
        jobs[row, KNOWN] += steps
        jobs[row, COMPUTED] += steps
        grow(memory, rank, row, jobs[row, COMPUTED] + 1, 0, NONE)


@njit(cache=True, nogil=True)
@no_type_check
def _log(queues, memory, records, counts, engine, first, end, start, seconds):
    """Write a step down."""
    at, numbers = counts[LOGGED], records.step_numbers
    counts[LOGGED] += 1
    records.step_times[at, 0], records.step_times[at, 1] = start, seconds
    numbers[at, :] = 0
    numbers[at, LOG_ENGINE] = engine
    for rank in range(first, end):
        numbers[at, LOG_TOKENS] += queues.sums[rank, READ] + queues.sums[rank, DECODING]
        numbers[at, LOG_RUNNING] += queues.running[rank]
        numbers[at, LOG_WAITING] += queues.waiting[rank]
        numbers[at, LOG_BLOCKS] += memory.used[rank]
