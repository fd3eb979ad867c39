"""Scheduling of one data-parallel rank, compiled: does what `Rank` of the plain simulator among the tests does."""

from typing import no_type_check

from numba import njit

from jaxmoe.serving.online.compiled_rank import BATCH, FULL, LOST, SCHEDULED, decodes, give, unseat
from jaxmoe.serving.online.compiled_reserve import may_read, promised, retract, to_come, too_much
from jaxmoe.serving.online.kv_blocks import (
    APART,
    BLOCK_TOKENS,
    BROUGHT,
    BUDGET,
    CACHED,
    CACHES,
    COMPUTED,
    HELD,
    KNOWN,
    NEXT,
    NONE,
    PAUSED,
    PROMPT,
    SEATS,
    found,
    grow,
)

# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


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
    if queues.sums[rank, LOST] == 0 and (not apart or may_read(queues, rank)):
        left = _admit(queues, memory, rank, left, apart, now)
    if apart and left == budget:
        retract(queues, memory, rank)
        _go_on(queues, memory, rank, queues.running[rank], False)


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
            give(queues, jobs, rank, row, 1)
            continue
        if budget == 0:
            continue
        tokens = min(jobs[row, KNOWN] - jobs[row, COMPUTED], budget)
        end = jobs[row, COMPUTED] + tokens
        if end > jobs[row, HELD] * block_tokens or (caches and end % block_tokens == 0) or tokens > 1:
            while not grow(memory, rank, row, end, 0, NONE):
                if _preempt(queues, memory, rank) == row:
                    return budget
        give(queues, jobs, rank, row, tokens)
        budget -= tokens
    return budget


@njit(cache=True, nogil=True)
@no_type_check
def _preempt(queues, memory, rank):
    """Let the request admitted last, but for those that leave, wait before all others. Returns which."""
    at = queues.running[rank] - 1
    while queues.seats[rank, at] < 0:
        at -= 1
    row = unseat(queues, memory, rank, at)
    memory.jobs[row, NEXT] = NONE if queues.waiting[rank] == 0 else queues.head[rank]
    if queues.waiting[rank] == 0:
        queues.tail[rank] = row
    queues.head[rank] = row
    queues.waiting[rank] += 1
    queues.seen[rank] += 1
    return row


@njit(cache=True, nogil=True)
@no_type_check
def _admit(queues, memory, rank, budget, apart, now):
    """Seats for those that wait, as far as the budget, seats and blocks go. Returns the rest of the budget."""
    jobs, pool, counts = memory.jobs, memory.pool_of[rank], queues.counts
    reserved = promised(queues, memory, rank) if apart and queues.seen[rank] > 0 else 0.0
    while queues.seen[rank] > 0 and budget > 0:
        seated = max(counts[rank, BATCH], queues.running[rank]) if apart else queues.running[rank]
        if seated >= memory.pools[pool, SEATS]:
            counts[rank, FULL] = apart
            break
        row = queues.head[rank]
        hits, last = found(memory, rank, row)
        computed = max(hits * memory.pools[pool, BLOCK_TOKENS], jobs[row, BROUGHT])
        left = jobs[row, KNOWN] - computed
        tokens = min(left, budget)
        if apart:
            if too_much(queues, memory, rank, row, hits, last, reserved):
                counts[rank, FULL] = 1
                break
            reserved += to_come(queues, memory, rank, row, tokens == left)
            if left == 1 and jobs[row, KNOWN] > jobs[row, PROMPT]:
                tokens = 0
        if not grow(memory, rank, row, computed + tokens, hits, last):
            break
        queues.head[rank] = jobs[row, NEXT]
        queues.waiting[rank] -= 1
        queues.seen[rank] -= 1
        queues.seats[rank, queues.running[rank]] = row
        queues.running[rank] += 1
        counts[rank, BATCH] += 1
        jobs[row, COMPUTED] = computed
        if queues.moments[row, SCHEDULED] < 0:
            queues.moments[row, SCHEDULED], jobs[row, CACHED] = now, computed
        give(queues, jobs, rank, row, tokens)
        budget -= tokens
    return budget
