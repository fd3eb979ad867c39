"""Scheduling of one data-parallel rank, compiled: does what `Rank` of the plain simulator among the tests does."""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.serving.online.kv_blocks import (
    APART,
    BLOCK_TOKENS,
    BROUGHT,
    BUDGET,
    CACHED,
    CACHES,
    COMPUTED,
    GIVEN,
    HELD,
    KNOWN,
    NEXT,
    NONE,
    PAUSED,
    PREEMPTED,
    PROMPT,
    SEATS,
    found,
    grow,
    release,
)

SENT, QUEUED, SCHEDULED, FIRST_TOKEN, FINISH = range(5)  # columns of moments
# Columns of sums, of the step to come; LOST counts the preempted.
READ, READ_CONTEXT, SEQUENCES, DECODING, CONTEXT, LONGEST, LOST = range(7)
SUM_COLUMNS = 7
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
def schedule(queues, memory, rank, now):
    """Give out the tokens of a rank's next step, and sum up what it has."""
    queues.sums[rank, :] = 0
    if queues.running[rank] == 0 and queues.waiting[rank] == 0:
        return
    pool = memory.pool_of[rank]
    apart, budget = memory.pools[pool, APART] == 1, memory.pools[pool, BUDGET]
    left = _go_on(queues, memory, rank, budget, apart)
    if queues.sums[rank, LOST] == 0:
        left = _admit(queues, memory, rank, left, apart, now)
    if apart and left == budget:
        _go_on(queues, memory, rank, queues.running[rank], False)


@njit(cache=True, nogil=True)
@no_type_check
def _give(queues, jobs, rank, row, tokens):
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
def _go_on(queues, memory, rank, budget, leaves_decoding):
    """Tokens for those that run, from a budget whose rest is returned; the last are preempted if blocks run out.

    Who waited at a layer goes on without: the token of a pass is counted where it begins.
    """
    jobs, seats, pool = memory.jobs, queues.seats, memory.pool_of[rank]
    block_tokens, caches = memory.pools[pool, BLOCK_TOKENS], memory.pools[pool, CACHES] == 1
    at = 0
    while at < queues.running[rank]:
        row = seats[rank, at]
        at += 1
        if row < 0 or (leaves_decoding and decodes(jobs, row)):
            continue
        if jobs[row, PAUSED] != NONE:
            _give(queues, jobs, rank, row, 1)
            continue
        if budget == 0:
            continue
        tokens = min(jobs[row, KNOWN] - jobs[row, COMPUTED], budget)
        end = jobs[row, COMPUTED] + tokens
        if end > jobs[row, HELD] * block_tokens or (caches and end % block_tokens == 0) or tokens > 1:
            while not grow(memory, rank, row, end, 0, NONE):
                last = _unseat_last(queues, rank)
                _preempt(queues, memory, rank, last)
                if last == row:
                    return budget
        _give(queues, jobs, rank, row, tokens)
        budget -= tokens
    return budget


@njit(cache=True, nogil=True)
@no_type_check
def _unseat_last(queues, rank):
    """Free the seat of the request admitted last, but for those that leave. Returns which."""
    seats, at = queues.seats, queues.running[rank] - 1
    while seats[rank, at] < 0:
        at -= 1
    row = seats[rank, at]
    queues.running[rank] -= 1
    for later in range(at, queues.running[rank]):
        seats[rank, later] = seats[rank, later + 1]
    return row


@njit(cache=True, nogil=True)
@no_type_check
def _preempt(queues, memory, rank, row):
    """Take all blocks from the request admitted last, and let it wait before all others."""
    jobs = memory.jobs
    release(memory, rank, row)
    jobs[row, COMPUTED] = jobs[row, BROUGHT] = jobs[row, GIVEN] = 0
    jobs[row, PAUSED] = NONE
    jobs[row, PREEMPTED] += 1
    queues.sums[rank, LOST] += 1
    jobs[row, NEXT] = NONE if queues.waiting[rank] == 0 else queues.head[rank]
    if queues.waiting[rank] == 0:
        queues.tail[rank] = row
    queues.head[rank] = row
    queues.waiting[rank] += 1
    queues.seen[rank] += 1


@njit(cache=True, nogil=True)
@no_type_check
def _admit(queues, memory, rank, budget, apart, now):
    """Seats for those that wait, as far as the budget, seats and blocks go. Returns the rest of the budget."""
    jobs, pool = memory.jobs, memory.pool_of[rank]
    while queues.seen[rank] > 0 and budget > 0 and queues.running[rank] < memory.pools[pool, SEATS]:
        row = queues.head[rank]
        hits, last = found(memory, rank, row)
        computed = max(hits * memory.pools[pool, BLOCK_TOKENS], jobs[row, BROUGHT])
        left = jobs[row, KNOWN] - computed
        tokens = min(left, budget)
        if apart and left == 1 and jobs[row, KNOWN] > jobs[row, PROMPT]:
            tokens = 0
        if not grow(memory, rank, row, computed + tokens, hits, last):
            break
        queues.head[rank] = jobs[row, NEXT]
        queues.waiting[rank] -= 1
        queues.seen[rank] -= 1
        queues.seats[rank, queues.running[rank]] = row
        queues.running[rank] += 1
        jobs[row, COMPUTED] = computed
        if queues.moments[row, SCHEDULED] < 0:
            queues.moments[row, SCHEDULED], jobs[row, CACHED] = now, computed
        _give(queues, jobs, rank, row, tokens)
        budget -= tokens
    return budget
