"""One move that relieves the busiest rank: two copies change ranks, or one becomes a copy of another expert.

To turn a copy changes what all copies of both experts have to do. Compiled by Numba, on arrays of one layer: `load`
and `copies` [expert], `held` [rank, slot] experts, `busy` [rank], `count` [expert, rank] copies, and `where`
[expert, copy] the ranks of all copies.
"""

from typing import no_type_check

from numba import njit

BETTER = 1 - 1e-9  # a rank that is relieved by less counts as no less busy


@njit(cache=True, nogil=True)
@no_type_check
def relieved(load, copies, held, busy, count, where, repeats):
    """Make the move after which the busiest of the ranks that it touches has least. False where none helps."""
    ranks, per_rank = held.shape
    hot = busy.argmax()
    top = busy[hot] * BETTER
    kind, least = 0, top
    first, rank, slot = -1, -1, -1
    for index in range(per_rank):  # exchange a copy of the busiest rank
        expert = held[hot, index]
        each = load[expert] / copies[expert]
        for other in range(ranks):
            if other == hot or busy[other] >= least or (not repeats and count[expert, other]):
                continue
            for place in range(per_rank):
                partner = held[other, place]
                given = load[partner] / copies[partner]
                value = max(busy[hot] - each + given, busy[other] + each - given)
                if given < each and value < least and (repeats or count[partner, hot] == 0):
                    kind, least, first, rank, slot = 1, value, index, other, place
    for index in range(per_rank):  # relieve it by a further copy of one of its experts, in place of another's
        expert = held[hot, index]
        each = load[expert] / copies[expert]
        less = each - load[expert] / (copies[expert] + 1)
        if busy[hot] - less * count[expert, hot] >= least or (not repeats and copies[expert] >= ranks):
            continue
        for other in range(ranks):
            if not repeats and count[expert, other]:
                continue
            for place in range(per_rank):
                old = held[other, place]
                if copies[old] < 2 or old == expert or busy[other] + each - less - load[old] / copies[old] >= least:
                    continue
                value = _turned(load, copies, busy, count, where, old, expert, other, least)
                if value < least:
                    kind, least, first, rank, slot = 2, value, expert, other, place
    if kind == 0:  # make a copy of the busiest rank one of another expert
        for place in range(per_rank):
            old = held[hot, place]
            if copies[old] < 2:
                continue
            for expert in range(len(load)):
                if old == expert or (not repeats and count[expert, hot]):
                    continue
                value = _turned(load, copies, busy, count, where, old, expert, hot, least)
                if value < least:
                    kind, least, first, rank, slot = 2, value, expert, hot, place
    if kind == 1:
        _exchange(load, copies, held, busy, count, where, hot, first, rank, slot)
    elif kind == 2:
        _turn(load, copies, held, busy, count, where, first, rank, slot)
    return kind > 0


@njit(cache=True, nogil=True)
@no_type_check
def _turned(load, copies, busy, count, where, old, new, rank, limit):
    """The busiest of the ranks that have either expert when a copy of `old` becomes one of `new`; `limit` if more."""
    if old == new or copies[old] < 2 or copies[new] >= where.shape[1]:
        return limit
    less = load[new] / copies[new] - load[new] / (copies[new] + 1)
    more = load[old] / (copies[old] - 1) - load[old] / copies[old]
    at = busy[rank] - less * count[new, rank] + more * (count[old, rank] - 1)
    largest = at + load[new] / (copies[new] + 1) - load[old] / copies[old]
    if largest >= limit:
        return limit
    for other in where[old, : copies[old]]:
        if other != rank:
            value = busy[other] - less * count[new, other] + more * count[old, other]
            if value >= limit:
                return limit
            largest = max(largest, value)
    for other in where[new, : copies[new]]:
        if other != rank:
            value = busy[other] - less * count[new, other] + more * count[old, other]
            if value >= limit:
                return limit
            largest = max(largest, value)
    return largest


@njit(cache=True, nogil=True)
@no_type_check
def _exchange(load, copies, held, busy, count, where, hot, index, rank, slot):
    expert, partner = held[hot, index], held[rank, slot]
    change = load[expert] / copies[expert] - load[partner] / copies[partner]
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
def _turn(load, copies, held, busy, count, where, new, rank, slot):
    old = held[rank, slot]
    held[rank, slot] = new
    less = load[new] / copies[new] - load[new] / (copies[new] + 1)
    more = load[old] / (copies[old] - 1) - load[old] / copies[old]
    for other in where[new, : copies[new]]:
        busy[other] -= less
    _moved(where[old], rank, where[old, copies[old] - 1])
    for other in where[old, : copies[old] - 1]:
        busy[other] += more
    busy[rank] += load[new] / (copies[new] + 1) - load[old] / copies[old]
    where[new, copies[new]] = rank
    for expert, change in ((new, 1), (old, -1)):
        count[expert, rank] += change
        copies[expert] += change


@njit(cache=True, nogil=True)
@no_type_check
def _moved(where, before, after):
    """One copy of an expert, by the ranks of all, is on another rank."""
    for index in range(len(where)):
        if where[index] == before:
            where[index] = after
            return
