"""Who waits and who runs at data-parallel ranks, in arrays for compiled code, whatever the way to batch."""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.serving.online.kv_blocks import (
    BROUGHT,
    COMPUTED,
    GIVEN,
    KNOWN,
    NEXT,
    NONE,
    PAUSED,
    PREEMPTED,
    PROMPT,
    release,
)

SENT, QUEUED, SCHEDULED, FIRST_TOKEN, FINISH = range(5)  # columns of moments
# Columns of sums, of the step to come; LOST counts the preempted.
READ, READ_CONTEXT, SEQUENCES, DECODING, CONTEXT, LONGEST, LOST = range(7)
SUM_COLUMNS = 7
# Columns of counts, of SGLang's ranks: seats taken, whether nobody may begin, and steps that decode since the ratio's.
BATCH, FULL, DECAYS = range(3)
COUNT_COLUMNS = 3
MOVED = -1  # a seat whose request goes on at another engine; that of request `r` that is done: -2 - r


class Queues(NamedTuple):
    """Who waits and who runs at each of `Q` ranks. Those that wait are a list, each with its `NEXT`."""

    waiting: Int[np.ndarray, " Q"]
    head: Int[np.ndarray, " Q"]
    tail: Int[np.ndarray, " Q"]
    seen: Int[np.ndarray, " Q"]  # of those that wait
    unseen: Int[np.ndarray, " Q"]  # the first of the others
    running: Int[np.ndarray, " Q"]
    leaving: Int[np.ndarray, " Q"]  # of those that run
    seats: Int[np.ndarray, "Q seats"]  # in the order of admission
    sums: Int[np.ndarray, "Q sums"]
    rules: Float[np.ndarray, "pools rules"]  # of what SGLang's ranks reserve, see `compiled_reserve`
    ratio: Float[np.ndarray, " Q"]
    counts: Int[np.ndarray, "Q counts"]
    moments: Float[np.ndarray, "R moments"]  # of every request


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def decodes(jobs, row):
    """Whether a request needs one more token only to have its next."""
    return jobs[row, KNOWN] > jobs[row, PROMPT] and jobs[row, KNOWN] - jobs[row, COMPUTED] == 1


@njit(cache=True, nogil=True)
@no_type_check
def push_last(queues, memory, rank, row):
    """Let a request wait behind all others of a rank."""
    memory.jobs[row, NEXT] = NONE
    if queues.seen[rank] == queues.waiting[rank]:
        queues.unseen[rank] = row
    if queues.waiting[rank] == 0:
        queues.head[rank] = row
    else:
        memory.jobs[queues.tail[rank], NEXT] = row
    queues.tail[rank] = row
    queues.waiting[rank] += 1


@njit(cache=True, nogil=True)
@no_type_check
def leave(queues, rank, at, done):
    """Mark a seat: it is free when the rank looks, and so are the blocks of a request that is done."""
    queues.seats[rank, at] = -2 - queues.seats[rank, at] if done else MOVED
    queues.leaving[rank] += 1


@njit(cache=True, nogil=True)
@no_type_check
def look(queues, memory, rank, now):
    """See who came, and let go of who leaves."""
    if queues.seen[rank] < queues.waiting[rank]:
        row = queues.unseen[rank]
        while row != NONE:
            if queues.moments[row, QUEUED] < 0:
                queues.moments[row, QUEUED] = now
            row = memory.jobs[row, NEXT]
        queues.seen[rank] = queues.waiting[rank]
    if queues.leaving[rank] == 0:
        return
    if queues.sums[rank, READ] > 0:  # SGLang counts who ends with its prompt no further
        queues.counts[rank, BATCH] -= queues.leaving[rank]
        queues.counts[rank, FULL] = 0
    seats, kept = queues.seats, 0
    for at in range(queues.running[rank]):
        row = seats[rank, at]
        if row >= 0:
            seats[rank, kept] = row
            kept += 1
        elif row != MOVED:
            release(memory, rank, -2 - row)
    queues.running[rank], queues.leaving[rank] = kept, 0


@njit(cache=True, nogil=True)
@no_type_check
def give(queues, jobs, rank, row, tokens):
    """Count a request's tokens of the step."""
    sums, computed = queues.sums, jobs[row, COMPUTED]
    jobs[row, GIVEN] = tokens
    if tokens == 0:
        return
    if decodes(jobs, row):
        sums[rank, DECODING] += 1
        sums[rank, CONTEXT] += computed
        sums[rank, LONGEST] = max(sums[rank, LONGEST], computed)
    else:
        sums[rank, READ] += tokens
        sums[rank, READ_CONTEXT] += tokens * computed
    if computed + tokens == jobs[row, KNOWN]:
        sums[rank, SEQUENCES] += 1


@njit(cache=True, nogil=True)
@no_type_check
def unseat(queues, memory, rank, at):
    """Take seat and blocks from a request, which is computed anew when it is seated again. Returns which."""
    jobs, seats = memory.jobs, queues.seats
    row = seats[rank, at]
    queues.running[rank] -= 1
    for later in range(at, queues.running[rank]):
        seats[rank, later] = seats[rank, later + 1]
    release(memory, rank, row)
    jobs[row, COMPUTED] = jobs[row, BROUGHT] = jobs[row, GIVEN] = 0
    jobs[row, PAUSED] = NONE
    jobs[row, PREEMPTED] += 1
    queues.sums[rank, LOST] += 1
    return row
