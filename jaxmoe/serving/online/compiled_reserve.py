"""Memory that SGLang's ranks reserve before they read a prompt, and requests that they retract, compiled: `Reserve`."""

from typing import no_type_check

import numpy as np
from numba import njit

from jaxmoe.serving.online.compiled_rank import BATCH, DECAYS, FULL, READ, decodes, push_last, unseat
from jaxmoe.serving.online.kv_blocks import (
    BLOCK_TOKENS,
    BLOCKS,
    COMPUTED,
    GIVEN,
    HELD,
    KNOWN,
    NONE,
    OUTPUT,
    PAUSED,
    PROMPT,
    forget_output,
    idle,
)

FIRST, LEAST, DECAY, STEPS_AHEAD, MOST = range(5)  # columns of rules, in the order of `Reserve`

# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def may_read(queues, rank):
    """Whether who waits is looked at: nobody is refused, or somebody reads, or nobody runs."""
    running = queues.running[rank] - queues.leaving[rank]
    if running == 0:
        queues.counts[rank, BATCH] = 0
    if running == 0 or queues.sums[rank, READ] > 0:
        queues.counts[rank, FULL] = 0
    return queues.counts[rank, FULL] == 0


@njit(cache=True, nogil=True)
@no_type_check
def to_come(queues, memory, rank, row, ends):
    """Tokens to keep for a request that reads: those of its output, if the prompt `ends` with them, and a block."""
    pool = memory.pool_of[rank]
    return (_further(queues, memory, pool, row) if ends else 0) + memory.pools[pool, BLOCK_TOKENS]


@njit(cache=True, nogil=True)
@no_type_check
def promised(queues, memory, rank):
    """Tokens that are kept for requests that run: of those that decode a part, the ratio, of what may come."""
    jobs, pool, decoding, reading = memory.jobs, memory.pool_of[rank], 0, 0
    for at in range(queues.running[rank]):
        row = queues.seats[rank, at]
        if row < 0:
            continue
        if decodes(jobs, row):
            decoding += _further(queues, memory, pool, row)
        else:
            ends = jobs[row, COMPUTED] + jobs[row, GIVEN] == jobs[row, KNOWN]
            reading += to_come(queues, memory, rank, row, ends)
    return reading + _ratio(queues, rank, pool) * decoding


@njit(cache=True, nogil=True)
@no_type_check
def too_much(queues, memory, rank, row, hits, last, reserved):
    """Whether blocks that are free, less those that are `reserved`, do not hold a request with its output."""
    pool = memory.pool_of[rank]
    size, total = memory.pools[pool, BLOCK_TOKENS], memory.pools[pool, BLOCKS]
    if total == NONE:
        return False
    needed = memory.jobs[row, KNOWN] - hits * size + to_come(queues, memory, rank, row, True)
    free = total - memory.used[rank] - idle(memory, last, total)
    return needed >= free * size - reserved


@njit(cache=True, nogil=True)
@no_type_check
def retract(queues, memory, rank):
    """Let those that decode have their next tokens: as many as it takes lose theirs and wait behind all others."""
    jobs, counts, pool, lost = memory.jobs, queues.counts, memory.pool_of[rank], False
    size, total = memory.pools[pool, BLOCK_TOKENS], memory.pools[pool, BLOCKS]
    while total != NONE and _blocks_needed(queues, memory, rank, size) > total - memory.used[rank]:
        at = _least_done(queues, jobs, rank)
        forget_output(memory, rank, queues.seats[rank, at])
        push_last(queues, memory, rank, unseat(queues, memory, rank, at))
        lost = True
    running = queues.running[rank] - queues.leaving[rank]
    if running < counts[rank, BATCH]:
        counts[rank, FULL], counts[rank, BATCH] = 0, running
    counts[rank, DECAYS] += running > 0
    if lost:
        queues.ratio[rank], counts[rank, DECAYS] = _part_done(queues, jobs, rank, pool), 0


@njit(cache=True, nogil=True)
@no_type_check
def rest(queues, memory, rank):
    """Begin anew after a time without anything to do."""
    queues.ratio[rank], queues.counts[rank, DECAYS] = queues.rules[memory.pool_of[rank], FIRST], 0


@njit(cache=True, nogil=True)
@no_type_check
def _ratio(queues, rank, pool):
    rules, decays = queues.rules[pool], queues.counts[rank, DECAYS]
    if decays == 0:
        return queues.ratio[rank]
    return max(queues.ratio[rank] - decays * rules[DECAY], rules[LEAST])


@njit(cache=True, nogil=True)
@no_type_check
def _further(queues, memory, pool, row):
    jobs = memory.jobs
    return min(jobs[row, OUTPUT] - (jobs[row, KNOWN] - jobs[row, PROMPT]), np.int64(queues.rules[pool, MOST]))


@njit(cache=True, nogil=True)
@no_type_check
def _blocks_needed(queues, memory, rank, size):
    """Blocks that the next token of all that run takes."""
    jobs, needed = memory.jobs, 0
    for at in range(queues.running[rank]):
        row = queues.seats[rank, at]
        needed += row >= 0 and jobs[row, PAUSED] == NONE and jobs[row, COMPUTED] + 1 > jobs[row, HELD] * size
    return needed


@njit(cache=True, nogil=True)
@no_type_check
def _least_done(queues, jobs, rank):
    """The seat of who has the fewest tokens of output; of equals the longest prompt, then the one admitted last."""
    seats, chosen = queues.seats, NONE
    for at in range(queues.running[rank]):
        row = seats[rank, at]
        if row < 0:
            continue
        if chosen != NONE:
            other = seats[rank, chosen]
            done = (jobs[row, KNOWN] - jobs[row, PROMPT]) - (jobs[other, KNOWN] - jobs[other, PROMPT])
            if done > 0 or (done == 0 and jobs[row, PROMPT] < jobs[other, PROMPT]):
                continue
        chosen = at
    return chosen


@njit(cache=True, nogil=True)
@no_type_check
def _part_done(queues, jobs, rank, pool):
    """The ratio after a retraction: of what those left may have in all, what they have and some steps more."""
    done, most, left = 0, 1, 0
    for at in range(queues.running[rank]):
        row = queues.seats[rank, at]
        if row >= 0:
            done, most, left = done + jobs[row, KNOWN] - jobs[row, PROMPT], most + jobs[row, OUTPUT], left + 1
    return min(1.0, (done + queues.rules[pool, STEPS_AHEAD] * left) / most)
