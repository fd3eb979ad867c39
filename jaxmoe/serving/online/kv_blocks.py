"""KV blocks of every rank in arrays, for compiled code: does what `Blocks` of the plain simulator among the tests does.

The blocks of a request are a path: each knows the one `BEFORE` it, and the request its `LAST`. Paths that begin alike
share blocks, so all paths of a rank are a tree. A text is cut into segments: a block of a prefix, then all that is a
request's own. Because a request lets go of its last block first, a free block is always older than the one before it
on a path, and is taken first: of a segment the cache has the first blocks, up to one that a table tells.
"""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Int
from numba import njit

# Columns of a request.
PROMPT, OUTPUT, KNOWN, COMPUTED, GIVEN, BROUGHT, NEXT, LAST, HELD, NAMED, UNNAMED, OWN = range(12)
CACHED, PREEMPTED, ENGINE, RANK, DECODE_ENGINE = range(12, 17)
PAUSED, TIMER, PASSES, DEFERRED = range(17, 21)  # of those who may wait at a layer, see `compiled_buffering`
REQUEST_COLUMNS = 21
# Columns of a block. OLDER and NEWER are its neighbours in the queue of free blocks.
OLDER, NEWER, HOLDERS, BEFORE, INDEX, SEGMENT = range(6)
BLOCK_COLUMNS = 6
# Columns of a pool.
APART, BUDGET, SEATS, BLOCKS, BLOCK_TOKENS, CACHES, SEGMENT_BLOCKS, AHEAD = range(8)
NONE = -1


class KvMemory(NamedTuple):
    """KV of all `Q` ranks. `R` requests, `B` blocks of all ranks; a table has twice the places of its rank's blocks."""

    jobs: Int[np.ndarray, "R columns"]
    pools: Int[np.ndarray, "pools columns"]
    pool_of: Int[np.ndarray, " Q"]
    first_segment: Int[np.ndarray, " R+1"]
    segments: Int[np.ndarray, " S"]
    blocks: Int[np.ndarray, "B columns"]
    used: Int[np.ndarray, " Q"]  # blocks that requests hold
    oldest: Int[np.ndarray, " Q"]
    newest: Int[np.ndarray, " Q"]
    first_place: Int[np.ndarray, " Q"]
    places: Int[np.ndarray, " Q"]  # of a rank's table, a power of 2
    keys: Int[np.ndarray, " P"]
    lasts: Int[np.ndarray, " P"]  # the last block that the cache has of the segment
    taken: Int[np.ndarray, " most"]  # room for the blocks of one request


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles.


@njit(cache=True, nogil=True)
@no_type_check
def _home(memory, rank, segment):
    mixed = segment * 0x9E3779B97F4A7C1
    return (mixed ^ (mixed >> 29)) & (memory.places[rank] - 1)


@njit(cache=True, nogil=True)
@no_type_check
def _place(memory, rank, segment):
    """Where the table of a rank has a segment, or a place to put it."""
    first, mask = memory.first_place[rank], memory.places[rank] - 1
    at = _home(memory, rank, segment)
    while memory.keys[first + at] != segment and memory.keys[first + at] != NONE:
        at = (at + 1) & mask
    return first + at


@njit(cache=True, nogil=True)
@no_type_check
def _remove(memory, rank, place):
    """Empty a place of the table; entries that had to step past it move up."""
    first, mask, keys = memory.first_place[rank], memory.places[rank] - 1, memory.keys
    hole = at = place - first
    while True:
        at = (at + 1) & mask
        if keys[first + at] == NONE:
            keys[first + hole] = NONE
            return
        if (at - _home(memory, rank, keys[first + at])) & mask >= (at - hole) & mask:
            keys[first + hole], memory.lasts[first + hole] = keys[first + at], memory.lasts[first + at]
            hole = at


@njit(cache=True, nogil=True)
@no_type_check
def _shared(memory, pool, row):
    """Blocks of a request that lie in named segments."""
    if memory.pools[pool, SEGMENT_BLOCKS] == 0:
        return 0
    names = memory.first_segment[row + 1] - memory.first_segment[row]
    own = memory.jobs[row, PROMPT] // memory.pools[pool, BLOCK_TOKENS]
    return min(own, names * memory.pools[pool, SEGMENT_BLOCKS])


@njit(cache=True, nogil=True)
@no_type_check
def found(memory, rank, row):
    """How many blocks the cache has of how a request begins, one token short of it, and the last of them."""
    pool = memory.pool_of[rank]
    if memory.pools[pool, CACHES] == 0:
        return 0, NONE
    limit = (memory.jobs[row, KNOWN] - 1) // memory.pools[pool, BLOCK_TOKENS]
    length, shared = memory.pools[pool, SEGMENT_BLOCKS], _shared(memory, pool, row)
    start, last, segment = 0, NONE, memory.first_segment[row]
    while start < limit:
        if start < shared:
            place, end = _place(memory, rank, memory.segments[segment]), min(start + length, shared)
            if memory.keys[place] == NONE:
                return start, last
            block = memory.lasts[place]
            segment += 1
        else:
            block, end = memory.jobs[row, OWN], limit
            if block == NONE:
                return start, last
        end = min(end, limit)
        if memory.blocks[block, INDEX] < end - 1:
            return memory.blocks[block, INDEX] + 1, block
        while memory.blocks[block, INDEX] > end - 1:
            block = memory.blocks[block, BEFORE]
        start, last = end, block
    return start, last


@njit(cache=True, nogil=True)
@no_type_check
def idle(memory, last, most):
    """Blocks up to `last` that nobody holds; of more than `most`, one more."""
    count, block = 0, last
    while block != NONE and memory.blocks[block, HOLDERS] == 0 and count <= most:
        count, block = count + 1, memory.blocks[block, BEFORE]
    return count


@njit(cache=True, nogil=True)
@no_type_check
def grow(memory, rank, row, tokens, hits, last):
    """Hold the `hits` blocks up to `last`, and blocks for so many tokens; False, and no change, without room."""
    pool, jobs, blocks = memory.pool_of[rank], memory.jobs, memory.blocks
    size, total = memory.pools[pool, BLOCK_TOKENS], memory.pools[pool, BLOCKS]
    new = (tokens + size - 1) // size - jobs[row, HELD] - hits
    room = total - memory.used[rank] - new
    if total != NONE and room < 0:
        return False
    if memory.pools[pool, CACHES] == 0:
        memory.used[rank] += new
        jobs[row, HELD] += new
        return True
    unheld = idle(memory, last, room)
    if unheld > room:
        return False
    memory.used[rank] += new + unheld
    block = last
    while block != NONE:
        if blocks[block, HOLDERS] == 0:
            _leave_queue(memory, rank, block)
        blocks[block, HOLDERS] += 1
        block = blocks[block, BEFORE]
    if hits > 0:
        jobs[row, LAST], jobs[row, HELD], jobs[row, NAMED] = last, hits, hits
    partial = jobs[row, LAST] if jobs[row, HELD] > jobs[row, NAMED] else NONE
    if new > 0:
        _take(memory, rank, row, new)
    if jobs[row, UNNAMED] == 0 and jobs[row, NAMED] < tokens // size:
        _name(memory, rank, row, partial, new, tokens // size)
    return True


@njit(cache=True, nogil=True)
@no_type_check
def _take(memory, rank, row, count):
    """Give a request so many of the oldest free blocks, which lose their text; they are in `taken` too."""
    jobs, blocks, taken = memory.jobs, memory.blocks, memory.taken
    block, last, index = memory.oldest[rank], jobs[row, LAST], jobs[row, HELD]
    lost, end, before = NONE, NONE, NONE  # a segment whose blocks are being taken, its last, and what is left before
    for each in range(count):
        segment = blocks[block, SEGMENT]
        if segment != lost:
            _forget(memory, rank, lost, end, before)
            lost, end = segment, block
        before, taken[each] = blocks[block, BEFORE], block
        blocks[block, SEGMENT], blocks[block, HOLDERS] = NONE, 1
        blocks[block, BEFORE], blocks[block, INDEX] = last, index + each
        last, block = block, blocks[block, NEWER]
    _forget(memory, rank, lost, end, before)
    memory.oldest[rank] = block
    if block == NONE:
        memory.newest[rank] = NONE
    else:
        blocks[block, OLDER] = NONE
    jobs[row, LAST], jobs[row, HELD] = last, index + count


@njit(cache=True, nogil=True)
@no_type_check
def _forget(memory, rank, segment, end, before):
    """The cache loses the blocks of a segment from its last, `end`, back to, and without, `before`."""
    if segment == NONE:
        return
    goes_on = before != NONE and memory.blocks[before, SEGMENT] == segment
    if segment < NONE:
        row = -2 - segment
        if memory.jobs[row, OWN] == end:  # else the request is at another engine by now
            memory.jobs[row, OWN] = before if goes_on else NONE
        return
    place = _place(memory, rank, segment)
    if goes_on:
        memory.lasts[place] = before
    else:
        _remove(memory, rank, place)


@njit(cache=True, nogil=True)
@no_type_check
def _name(memory, rank, row, partial, new, full):
    """Put blocks of a request that are full now into the cache, up to one whose text that has already.

    They are `partial`, if it is any, and those `taken` last.
    """
    jobs, blocks, pool = memory.jobs, memory.blocks, memory.pool_of[rank]
    length, shared, index = memory.pools[pool, SEGMENT_BLOCKS], _shared(memory, pool, row), jobs[row, NAMED]
    at = NONE if partial != NONE else 0  # in `taken`
    while index < full:
        segment, end, place = -2 - row, full, NONE
        if index < shared:
            segment = memory.segments[memory.first_segment[row] + index // length]
            end = min((index // length + 1) * length, shared, full)
            place = _place(memory, rank, segment)
            last = memory.lasts[place] if memory.keys[place] != NONE else NONE
        else:
            last = jobs[row, OWN]
        if last != NONE and blocks[last, INDEX] >= index:
            jobs[row, UNNAMED] = 1
            break
        while index < end:
            last = partial if at == NONE else memory.taken[at]
            blocks[last, SEGMENT] = segment
            index, at = index + 1, at + 1
        if place == NONE:
            jobs[row, OWN] = last
        else:
            memory.keys[place], memory.lasts[place] = segment, last
    jobs[row, NAMED] = index


@njit(inline="always")
@no_type_check
def _leave_queue(memory, rank, block):
    older, newer = memory.blocks[block, OLDER], memory.blocks[block, NEWER]
    if older == NONE:
        memory.oldest[rank] = newer
    else:
        memory.blocks[older, NEWER] = newer
    if newer == NONE:
        memory.newest[rank] = older
    else:
        memory.blocks[newer, OLDER] = older


@njit(cache=True, nogil=True)
@no_type_check
def forget_output(memory, rank, row):
    """The cache loses blocks of a request that are not of its prompt alone."""
    jobs, blocks, own = memory.jobs, memory.blocks, -2 - row
    first = jobs[row, PROMPT] // memory.pools[memory.pool_of[rank], BLOCK_TOKENS]
    block, named = jobs[row, LAST], False
    while block != NONE and blocks[block, INDEX] >= first:
        named |= blocks[block, SEGMENT] == own
        blocks[block, SEGMENT] = NONE
        block = blocks[block, BEFORE]
    if named:
        jobs[row, OWN] = block if block != NONE and blocks[block, SEGMENT] == own else NONE


@njit(cache=True, nogil=True)
@no_type_check
def release(memory, rank, row):
    """Let go of all blocks of a request, the last first."""
    jobs, blocks = memory.jobs, memory.blocks
    if memory.pools[memory.pool_of[rank], CACHES] == 0:
        memory.used[rank] -= jobs[row, HELD]
    block = jobs[row, LAST]
    while block != NONE:
        blocks[block, HOLDERS] -= 1
        if blocks[block, HOLDERS] == 0:
            memory.used[rank] -= 1
            newest = memory.newest[rank]
            blocks[block, OLDER], blocks[block, NEWER] = newest, NONE
            if newest == NONE:
                memory.oldest[rank] = block
            else:
                blocks[newest, NEWER] = block
            memory.newest[rank] = block
        block = blocks[block, BEFORE]
    jobs[row, LAST], jobs[row, HELD], jobs[row, NAMED], jobs[row, UNNAMED] = NONE, 0, 0, 0
