"""Copies of experts placed for given loads: how many each has, and on which rank, so that the busiest rank has least.

For those who rebalance every few minutes: mean loads alone, equal split over copies, nothing of the network. It starts
as EPLB does, with further copies for the experts whose copies have most to do and the heaviest copy on the least loaded
rank, and goes on where EPLB stops: while any move relieves the busiest rank without making another as busy, the best
such move is made. Unless it has to be fast, it does so again from other numbers of copies, and keeps the best.

All is compiled by Numba: the search is a few thousand steps of a few numbers each, which arrays would slow down.
"""

from typing import no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.placement.placement import PlanError
from jaxmoe.threads import cores, side_by_side
from jaxmoe.tune.replica_moves import BETTER, NOW, parts, relieved

MOVES = 400  # the most that one descent makes
VARIANTS = 7  # numbers of copies to start from
CHUNKS = 4  # of layers for every core, so that none waits long for another
ROOM = 64  # for further copies of an expert in one descent
FAST_MOVES, FAST_GOOD = 12, 1.002
GOOD = 1.0001  # times the mean of ranks: no need to go on
EFFORT = 60_000_000  # slots x ranks of a node x descents of a layer: more descents where a layer is small
MOST_DESCENTS = 1000
CHANGES, PAIRED = 3000, 20  # of numbers of copies, where ranks have two slots; again after so many descents
GROUPED = (1, 0, MOVES, GOOD)  # first numbers of copies, further ones, moves of a descent, what is good
WARM, WARMER = 3e-3, 1.1  # the part by which such a change may be for the worse at first, and times so when done again


def balanced_slots(
    loads: Float[np.ndarray, "layer expert"] | Int[np.ndarray, "layer expert"],
    slots: int,
    ranks: int,
    groups: int = 1,
    nodes: int = 1,
    repeats: bool = False,
    fast: bool = False,
    seed: int = 0,
) -> Int[np.ndarray, "layer slot"]:
    """The expert in every slot, rank by rank.

    With `groups` of successive experts on `nodes` of successive ranks, where nodes divide groups, groups stay whole on
    a node. With `repeats` a rank may have an expert twice, which evens loads out but wastes memory; without it none
    has, where ranks have no more slots than there are experts. `fast` makes one short descent. Raises `PlanError` for
    numbers that do not divide each other, or fewer slots than experts.
    """
    experts = loads.shape[1]
    if nodes < 1 or groups % nodes:
        groups = nodes = 1
    _check(experts, slots, ranks, groups, nodes)
    groups = groups if nodes > 1 else 1
    loads = np.ascontiguousarray(loads, np.float64)
    layers, per_rank, own = len(loads), slots // ranks, ranks // nodes
    again = int(np.clip(EFFORT // (slots * own * max(layers, 1)), 1, MOST_DESCENTS))
    search = (1, 0, FAST_MOVES, FAST_GOOD) if fast else (VARIANTS, again, MOVES, GOOD)
    chunks = np.array_split(loads, min(CHUNKS * cores(), max(layers, 1)))

    def placed(part: Float[np.ndarray, "layer expert"]) -> Int[np.ndarray, "layer slot"]:
        return _all_layers(part, own, per_rank, groups, nodes, repeats, search, GROUPED, seed)

    # What is compiled leaves Python's lock.
    return np.concatenate([*side_by_side(placed, chunks)])


def _check(experts: int, slots: int, ranks: int, groups: int, nodes: int) -> None:
    for what, whole, part in (
        ("slots", slots, ranks),
        ("ranks", ranks, nodes),
        ("experts", experts, groups),
    ):
        if part < 1 or whole % part:
            raise PlanError(f"{whole} {what} do not divide by {part}; choose a multiple")
    if slots < experts:
        raise PlanError(f"{slots} slots cannot hold {experts} experts; every expert needs one")


@njit(cache=True, nogil=True)
@no_type_check
def _all_layers(loads, own, per_rank, groups, nodes, repeats, search, grouped, seed):
    """`own` is how many ranks a node has; groups are packed on nodes by `grouped`, and then copies on ranks."""
    placed = np.empty((len(loads), nodes * own * per_rank), np.int64)
    experts, size, each = loads.shape[1] // nodes, loads.shape[1] // groups, groups // nodes
    held = np.empty((nodes, experts))
    for layer in range(len(loads)):
        group = np.zeros(1, np.uint16)
        if nodes > 1:
            whole = loads[layer].reshape(groups, size).sum(axis=1)
            group = _layer(whole, 0.0, nodes, each, True, grouped, seed)
        for node in range(nodes):
            for index in range(experts):
                held[node, index] = loads[layer, group[node * each + index // size] * size + index % size]
        # No node need be more even than the busiest one of its layer can be.
        enough = held.sum(axis=1).max() / own
        for node in range(nodes):
            found = _layer(held[node], enough, own, per_rank, repeats, search, seed)
            for slot in range(len(found)):
                first = group[node * each + found[slot] // size] * size
                placed[layer, node * len(found) + slot] = first + found[slot] % size
    return placed


@njit(cache=True, nogil=True)
@no_type_check
def _layer(load, least, ranks, per_rank, repeats, search, seed):
    """The best of several descents: from EPLB's numbers of copies, from others, and from the best ones changed.

    It ends where no rank has more than `least`, or is good.
    """
    variants, descents, moves, good = search
    slots, experts, enough = ranks * per_rank, len(load), max(least, load.sum() / ranks * good)
    spare = slots - experts
    most = slots if repeats or experts * ranks < slots else ranks
    best, top, kept = np.zeros((ranks, per_rank), np.uint16), np.inf, np.ones(experts, np.int64)
    back = np.int64(0)  # for a plain 0 `_copies` is compiled once more
    if descents:
        np.random.seed(seed)  # every layer by itself, so that it does not matter which are placed together
    warm, known = WARM, False  # whether the descent from the numbers of copies that are kept was made already
    for descent in range(variants + descents):
        if descent == 0:
            copies = _copies(load, slots, most, back)
        elif descent < variants:
            back = max(2 * back, 1)
            if back > spare or experts < 2:
                continue
            copies = _copies(load, slots, most, back)
        elif per_rank == 2 and (descent - variants) % PAIRED == 0:
            copies, warm = paired_copies(load, kept, most, CHANGES, warm, most > ranks), warm * WARMER
        else:
            copies = kept.copy()
            for _ in range(1 + np.random.randint(2)):
                more, fewer = np.random.randint(experts), np.random.randint(experts)
                if more != fewer and copies[fewer] > 1 and copies[more] < most:
                    copies[more] += 1
                    copies[fewer] -= 1
            if (copies == kept).all():
                if known:
                    continue
                known = True
        held, busy = _descent(load, copies, ranks, per_rank, most > ranks, moves, enough)
        if busy.max() < top * BETTER:
            best, top, kept, known = held, busy.max(), copies, False
        if top <= enough:
            break
    return best.ravel()


@njit(cache=True, nogil=True)
@no_type_check
def _copies(load, slots, most, back):
    """Further copies one after the other for the expert whose copies have most to do.

    The last `back` of them go to experts whose copies have less than the mean of a slot, if any have: where ranks hold
    few copies, heavy ones are best left heavy and put beside very light ones.
    """
    copies, light = np.ones(len(load), np.int64), load.sum() / slots
    spare = slots - len(load)
    for turn in range(spare):
        best = -1
        for only_light in (turn >= spare - back, False):
            for expert in range(len(load)):
                if copies[expert] >= most or (only_light and load[expert] > light * copies[expert]):
                    continue
                if best < 0 or load[expert] * copies[best] > load[best] * copies[expert]:
                    best = expert
            if best >= 0:
                break
        copies[best] += 1
    return copies


@njit(cache=True, nogil=True)
@no_type_check
def _descent(load, copies, ranks, per_rank, repeats, moves, enough):
    """Experts [rank, slot] and the load of every rank; `copies` are those that it ends with."""
    part = parts(load, copies)
    held, busy, count = _packed(copies, part[:, NOW], ranks, per_rank, repeats)
    where, at = np.empty((len(load), copies.max() + ROOM), np.uint16), np.zeros(len(load), np.int64)
    for rank in range(ranks):
        for expert in held[rank]:
            where[expert, at[expert]] = rank
            at[expert] += 1
    for _ in range(moves):
        if busy.max() <= enough or not relieved(load, copies, part, held, busy, count, where, repeats):
            break
    return held, busy


@njit(cache=True, nogil=True)
@no_type_check
def _packed(copies, each, ranks, per_rank, repeats):
    """The heaviest copy first, each on the least loaded rank that has a slot left and, if need be, not the expert."""
    held, used = np.empty((ranks, per_rank), np.uint16), np.zeros(ranks, np.int64)
    busy, count = np.zeros(ranks), np.zeros((len(copies), ranks), np.int16)
    still = np.zeros(ranks)  # what ranks have that have a slot left; infinite where they have none
    for expert in np.argsort(-each, kind="mergesort"):
        for _ in range(copies[expert]):
            item, rank = expert, _least(still, count[expert], repeats)
            if rank < 0:  # all that have room have the expert: another rank takes it, and gives something up
                rank = _least(still, count[expert], True)
                item = _given_up(each, held, busy, count, expert, rank)
            held[rank, used[rank]] = item
            used[rank] += 1
            busy[rank] += each[item]
            count[item, rank] += 1
            still[rank] = busy[rank] if used[rank] < per_rank else np.inf
    return held, busy, count


@njit(cache=True, nogil=True)
@no_type_check
def _least(still, held, repeats):
    """The first of the ranks with least, where it is finite, of those that do not have the expert; -1 if there is none.

    With `repeats` of all ranks.
    """
    best, least = -1, np.inf
    for rank in range(len(still)):
        if still[rank] < least and (repeats or held[rank] == 0):
            best, least = rank, still[rank]
    return best


@njit(cache=True, nogil=True)
@no_type_check
def _given_up(each, held, busy, count, expert, free):
    """Put a copy on a full rank without it, and return what that rank gives up for the `free` one."""
    found, slot, least = -1, -1, np.inf
    for rank in range(len(held)):
        if count[expert, rank]:
            continue
        for place in range(held.shape[1]):
            other = held[rank, place]
            if count[other, free]:
                continue
            top = max(busy[rank] - each[other] + each[expert], busy[free] + each[other])
            if top < least:
                found, slot, least = rank, place, top
    if found < 0:
        return expert
    other = held[found, slot]
    held[found, slot] = expert
    busy[found] += each[expert] - each[other]
    count[expert, found] += 1
    count[other, found] -= 1
    return other


# How many copies experts have where ranks have two slots: the heaviest copy goes beside the lightest.
#
# No other pairing has a less busy rank, so only numbers of copies have to be searched, and the gain of a change is
# known without placing anything. A search by chance moves a copy from one expert to another at the busiest pair. It
# takes changes for the worse less and less. On arrays of one layer: `load` and `copies` [expert].


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
