"""How many copies experts have where ranks have two slots: the heaviest copy goes beside the lightest.

No other pairing has a less busy rank, so only numbers of copies have to be searched, and the gain of a change is
known without placing anything. A search by chance moves a copy from one expert to another at the busiest pair. It takes
changes for the worse less and less. Compiled by Numba, on arrays of one layer: `load` and `copies` [expert].
"""

from typing import no_type_check

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
@no_type_check
def paired_copies(load, copies, most, changes, warm, repeats):
    """Numbers of copies, at most so many of each: the best of all that so many changes lead to.

    A change may be for the worse by a part of `warm` at first.
    """
    tried, kept = copies.copy(), copies.copy()
    each = load / tried
    order = np.argsort(-each)
    now, heavy, light = _busiest_pair(each, tried, order, repeats)
    best = now
    for change in range(changes):
        more, fewer = heavy if np.random.random() < 0.8 else light, np.random.randint(len(load))
        if more == fewer or tried[fewer] < 2 or tried[more] >= most:
            continue
        _given(load, tried, each, order, more, fewer)
        found, next_heavy, next_light = _busiest_pair(each, tried, order, repeats)
        if found > now * (1 + warm * (1 - change / changes)):
            _given(load, tried, each, order, fewer, more)
            continue
        now, heavy, light = found, next_heavy, next_light
        if now < best:
            best, kept = now, tried.copy()
    return kept


@njit(cache=True, nogil=True)
@no_type_check
def _given(load, copies, each, order, more, fewer):
    """Move a copy, and put experts in order of what a copy has to do again."""
    for expert, by in ((more, 1), (fewer, -1)):
        copies[expert] += by
        each[expert] = load[expert] / copies[expert]
    for place in range(1, len(order)):
        expert, at = order[place], place
        while at and each[order[at - 1]] < each[expert]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = expert


@njit(cache=True, nogil=True)
@no_type_check
def _busiest_pair(each, copies, order, repeats):
    """The largest sum when copies in order are paired from both ends, and the experts of that pair.

    Without `repeats` an expert that is left beside itself counts as beside the next heavier one, with which it can
    change places.
    """
    first, last = 0, len(order) - 1
    front, back = copies[order[first]], copies[order[last]]
    pairs, top, heavy, light = copies.sum() // 2, -1.0, 0, 0
    while pairs > 0:
        beside = first - 1 if first == last and first and not repeats else last
        both = each[order[first]] + each[order[beside]]
        if both > top:
            top, heavy, light = both, order[first], order[last]
        if first == last:
            break
        count = min(front, back)
        pairs, front, back = pairs - count, front - count, back - count
        if front == 0:
            first += 1
            front = copies[order[first]] if first < last else back
        if back == 0:
            last -= 1
            back = copies[order[last]] if last > first else front
    return top, heavy, light
