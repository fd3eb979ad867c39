"""One move that relieves the busiest rank: two copies change ranks, or one becomes a copy of another expert.

To turn a copy changes what all copies of both experts have to do. Compiled by Numba, on arrays of one layer: `load`
and `copies` [expert], `part` [expert, 3] (`parts`), `held` [rank, slot] experts, `busy` [rank], `count` [expert, rank]
copies, and `where` [expert, copy] the ranks of all copies.
"""

from typing import no_type_check

import numpy as np
from numba import njit

BETTER = 1 - 1e-9  # a rank that is relieved by less counts as no less busy
LESS, NOW, MORE = 0, 1, 2  # load of a copy with one copy fewer, as it is, and with one more
ROUNDING = 1 + 1e-12  # so that a bound never leaves out what only rounding puts beyond it


@njit(cache=True, nogil=True)
@no_type_check
def parts(load, copies):
    """Load of one copy of every expert, [expert, 3]: with one copy fewer, with as many as now, and with one more."""
    part = np.empty((len(load), 3))
    for expert in range(len(load)):
        _divide(load, copies, part, expert)
    return part


@njit(cache=True, nogil=True)
@no_type_check
def _divide(load, copies, part, expert):
    number = copies[expert]
    part[expert, LESS] = load[expert] / (number - 1) if number > 1 else np.inf
    part[expert, NOW] = load[expert] / number
    part[expert, MORE] = load[expert] / (number + 1)


@njit(cache=True, nogil=True)
@no_type_check
def relieved(load, copies, part, held, busy, count, where, repeats):
    """Make the move after which the busiest of the ranks that it touches has least. False where none helps."""
    hot = busy.argmax()
    least, index, rank, slot = _best_exchange(part, held, busy, count, hot, busy[hot] * BETTER, repeats)
    new, other, place = _best_further_copy(copies, part, held, busy, count, where, hot, least, repeats)
    if new < 0 and index < 0:
        new, other, place = _best_replaced(copies, part, held, busy, count, where, hot, least, repeats)
    if new >= 0:
        _turn(load, copies, part, held, busy, count, where, new, other, place)
    elif index >= 0:
        _exchange(part, held, busy, count, where, hot, index, rank, slot)
    return new >= 0 or index >= 0


@njit(cache=True, nogil=True)
@no_type_check
def _best_exchange(part, held, busy, count, hot, least, repeats):
    """A copy of the busiest rank for one of another rank: what the busier of both has then, and where they are."""
    ranks, per_rank = held.shape
    found, rank, slot = -1, -1, -1
    for index in range(per_rank):
        expert = held[hot, index]
        each = part[expert, NOW]
        rest = busy[hot] - each
        for other in range(ranks):
            # Both ranks keep their sum, so the busier one has half of it at least.
            if busy[hot] + busy[other] >= 2 * ROUNDING * least or (not repeats and count[expert, other]):
                continue
            full = busy[other] + each
            for place in range(per_rank):
                given = part[held[other, place], NOW]
                if rest + given >= least or full - given >= least or given >= each:
                    continue
                if repeats or count[held[other, place], hot] == 0:
                    least, found, rank, slot = max(rest + given, full - given), index, other, place
    return least, found, rank, slot


@njit(cache=True, nogil=True)
@no_type_check
def _best_further_copy(copies, part, held, busy, count, where, hot, least, repeats):
    """A further copy of an expert of the busiest rank, in place of a copy of another: which, and where."""
    ranks, per_rank = held.shape
    found, rank, slot = -1, -1, -1
    news = np.empty(per_rank, held.dtype)
    some = 0
    for expert in held[hot]:
        less = part[expert, NOW] - part[expert, MORE]
        if busy[hot] - less * count[expert, hot] < least and (repeats or copies[expert] < ranks):
            news[some] = expert
            some += 1
    if not some:
        return found, rank, slot
    busiest = _busiest_holders(copies, busy, where)
    for expert in news[:some]:
        less = part[expert, NOW] - part[expert, MORE]
        for other in range(ranks):
            if not repeats and count[expert, other]:
                continue
            full = busy[other] + part[expert, MORE]
            for place in range(per_rank):
                old = held[other, place]
                if copies[old] < 2 or full - part[old, NOW] >= least or old == expert:
                    continue
                # Other copies of the old expert have more to do, where they are busiest as well.
                at = busiest[old, 0] if busiest[old, 0] != other else busiest[old, 1]
                if at >= 0:
                    more = part[old, LESS] - part[old, NOW]
                    if busy[at] - less * count[expert, at] + more * count[old, at] >= ROUNDING * least:
                        continue
                value = _turned(copies, part, busy, count, where, old, expert, other, least)
                if value < least:
                    least, found, rank, slot = value, expert, other, place
    return found, rank, slot


@njit(cache=True, nogil=True)
@no_type_check
def _busiest_holders(copies, busy, where):
    """The two busiest ranks of those that have each expert, where it has several copies; -1 for none."""
    busiest = np.full((len(copies), 2), -1)
    for expert in range(len(copies)):
        if copies[expert] < 2:
            continue
        first, second = -1, -1
        for copy in range(copies[expert]):
            rank = where[expert, copy]
            if first < 0 or busy[rank] > busy[first]:
                first, second = rank, first if first != rank else second
            elif rank != first and (second < 0 or busy[rank] > busy[second]):
                second = rank
        busiest[expert, 0], busiest[expert, 1] = first, second
    return busiest


@njit(cache=True, nogil=True)
@no_type_check
def _best_replaced(copies, part, held, busy, count, where, hot, least, repeats):
    """A copy of the busiest rank that becomes one of another expert: of which, and where."""
    found, slot = -1, -1
    for place in range(held.shape[1]):
        old = held[hot, place]
        if copies[old] < 2:
            continue
        for expert in range(len(copies)):
            if old == expert or (not repeats and count[expert, hot]):
                continue
            value = _turned(copies, part, busy, count, where, old, expert, hot, least)
            if value < least:
                least, found, slot = value, expert, place
    return found, hot, slot


@njit(cache=True, nogil=True)
@no_type_check
def _turned(copies, part, busy, count, where, old, new, rank, limit):
    """The busiest of the ranks that have either expert when a copy of `old` becomes one of `new`; `limit` if more."""
    if copies[new] >= where.shape[1]:
        return limit
    less, more = part[new, NOW] - part[new, MORE], part[old, LESS] - part[old, NOW]
    at = busy[rank] - less * count[new, rank] + more * (count[old, rank] - 1)
    largest = at + part[new, MORE] - part[old, NOW]
    if largest >= limit:
        return limit
    for holders in (where[old, : copies[old]], where[new, : copies[new]]):
        for other in holders:
            if other != rank:
                value = busy[other] - less * count[new, other] + more * count[old, other]
                if value >= limit:
                    return limit
                largest = max(largest, value)
    return largest


@njit(cache=True, nogil=True)
@no_type_check
def _exchange(part, held, busy, count, where, hot, index, rank, slot):
    expert, partner = held[hot, index], held[rank, slot]
    change = part[expert, NOW] - part[partner, NOW]
    held[hot, index], held[rank, slot] = partner, expert
    _moved(where[expert], hot, rank)
    _moved(where[partner], rank, hot)
    busy[hot] -= change
    busy[rank] += change
    count[expert, hot] -= 1
    count[expert, rank] += 1
    count[partner, hot] += 1
    count[partner, rank] -= 1


@njit(cache=True, nogil=True)
@no_type_check
def _turn(load, copies, part, held, busy, count, where, new, rank, slot):
    old = np.int64(held[rank, slot])
    held[rank, slot] = new
    less, more = part[new, NOW] - part[new, MORE], part[old, LESS] - part[old, NOW]
    for other in where[new, : copies[new]]:
        busy[other] -= less
    _moved(where[old], rank, where[old, copies[old] - 1])
    for other in where[old, : copies[old] - 1]:
        busy[other] += more
    busy[rank] += part[new, MORE] - part[old, NOW]
    where[new, copies[new]] = rank
    for expert, change in ((new, 1), (old, -1)):
        count[expert, rank] += change
        copies[expert] += change
        _divide(load, copies, part, expert)


@njit(cache=True, nogil=True)
@no_type_check
def _moved(where, before, after):
    """One copy of an expert, by the ranks of all, is on another rank."""
    for index in range(len(where)):
        if where[index] == before:
            where[index] = after
            return
