"""Copies of experts for loads that change: the busiest rank of every window of time counts, not that of their sum.

Which expert is busy changes from window to window, so ranks that are even on the sum are not in any of them. A search
by chance goes on from slots that are good for the mean and some of the spread: it exchanges two copies, or turns one
into a copy of another expert, at the busiest rank of a window, and keeps what lowers the mean over windows of the
busiest rank. Compiled by Numba.
"""

from typing import no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.threads import cores, side_by_side
from jaxmoe.tune.replica_moves import BETTER
from jaxmoe.tune.replicas import balanced_slots

PROPOSALS = 30_000  # of each layer
SPREAD = 0.674  # standard deviations beside the mean, where the search begins: three quarters of normal loads are below


def steady_slots(
    windows: Float[np.ndarray, "window layer expert"],
    slots: int,
    ranks: int,
    repeats: bool = False,
    proposals: int = PROPOSALS,
    seed: int = 0,
) -> Int[np.ndarray, "layer slot"]:
    """The expert in every slot, rank by rank, for loads in windows of time: all count alike, unless loads drift.

    Without `repeats` no rank has an expert twice, where ranks have no more slots than there are experts. Raises
    `PlanError` as `balanced_slots` does.
    """
    start = balanced_slots(
        windows.mean(axis=0) + SPREAD * windows.std(axis=0), slots, ranks, repeats=repeats, fast=True
    )
    each = np.swapaxes(windows_to_come(windows), 0, 1)  # [layer, window, expert]
    mean = each.sum(axis=2, keepdims=True) / ranks
    scaled = np.where(mean > 0, each / np.where(mean > 0, mean, 1), 0)
    freely = repeats or slots // ranks > windows.shape[2]
    parts = np.array_split(np.arange(len(start)), min(cores(), len(start)))

    def steadied(rows: Int[np.ndarray, " layer"]) -> Int[np.ndarray, "layer slot"]:
        given = np.ascontiguousarray(scaled[rows])
        return _all_layers(given, start[rows].reshape(len(rows), ranks, -1), freely, proposals, seed)

    return np.concatenate([*side_by_side(steadied, parts)])


@njit(cache=True, nogil=True)
@no_type_check
def _all_layers(load, held, repeats, proposals, seed):
    placed = np.empty((len(held), held.shape[1] * held.shape[2]), np.int64)
    for layer in range(len(held)):
        np.random.seed(seed)  # every layer by itself, so that it does not matter which are placed together
        own = held[layer].copy()
        _search(load[layer], own, repeats, proposals)
        for rank in range(held.shape[1]):  # compiled sooner than an assignment of arrays
            for slot in range(held.shape[2]):
                placed[layer, rank * held.shape[2] + slot] = own[rank, slot]
    return placed


@njit(cache=True, nogil=True)
@no_type_check
def _search(load, held, repeats, proposals):
    """Change `held` [rank, slot]; `load` is [window, expert] over the mean of ranks."""
    windows, experts = load.shape
    ranks, per_rank = held.shape
    copies, count = np.zeros(experts, np.int64), np.zeros((experts, ranks), np.int64)
    for rank in range(ranks):
        for expert in held[rank]:
            copies[expert] += 1
            count[expert, rank] += 1
    busy = np.zeros((ranks, windows))
    for rank in range(ranks):
        for expert in held[rank]:
            for window in range(windows):
                busy[rank, window] += load[window, expert] / copies[expert]
    top, hot = np.zeros(windows), np.zeros(windows, np.int64)
    _tops(busy, top, hot)
    new, touched = np.zeros((ranks, windows)), np.zeros(ranks, np.bool_)
    most = held.size if repeats else ranks
    for _ in range(proposals):
        busiest = hot[np.random.randint(windows)]
        index, rank, slot = np.random.randint(per_rank), np.random.randint(ranks), np.random.randint(per_rank)
        expert, other = held[busiest, index], held[rank, slot]
        exchange = np.random.randint(3) < 2
        touched[:] = False
        if expert == other or (not repeats and count[expert, rank]):
            continue
        if exchange:
            if rank == busiest or (not repeats and count[other, busiest]):
                continue
            for window in range(windows):
                change = load[window, other] / copies[other] - load[window, expert] / copies[expert]
                new[busiest, window], new[rank, window] = busy[busiest, window] + change, busy[rank, window] - change
            touched[busiest] = touched[rank] = True
        else:
            if copies[other] < 2 or copies[expert] >= most:
                continue
            _turned(load, copies, count, busy, other, expert, rank, new, touched)
        if not _is_better(busy, new, touched, top, hot):
            continue
        for at in range(ranks):
            if touched[at]:
                for window in range(windows):
                    busy[at, window] = new[at, window]
        held[rank, slot] = expert
        count[expert, rank] += 1
        count[other, rank] -= 1
        if exchange:
            held[busiest, index] = other
            count[expert, busiest] -= 1
            count[other, busiest] += 1
        else:
            copies[expert] += 1
            copies[other] -= 1
        _tops(busy, top, hot)


@njit(cache=True, nogil=True)
@no_type_check
def _turned(load, copies, count, busy, old, expert, rank, new, touched):
    """Write to `new` the loads [rank, window] after a copy of `old` on a rank becomes one of `expert`.

    `touched` [rank] marks the ranks whose loads change.
    """
    for at in range(len(busy)):
        if not (count[expert, at] or count[old, at] or at == rank):
            continue
        touched[at] = True
        here = 1 if at == rank else 0
        more = (count[expert, at] + here) / (copies[expert] + 1) - count[expert, at] / copies[expert]
        less = count[old, at] / copies[old] - (count[old, at] - here) / (copies[old] - 1)
        for window in range(load.shape[0]):
            new[at, window] = busy[at, window] + load[window, expert] * more - load[window, old] * less


@njit(cache=True, nogil=True)
@no_type_check
def _is_better(busy, new, touched, top, hot):
    """Whether the busiest ranks of all windows have less in the mean."""
    value, limit = 0.0, top.sum() * BETTER
    for window in range(len(top)):
        largest = 0.0 if touched[hot[window]] else top[window]
        for at in range(len(busy)):
            if touched[at]:
                largest = max(largest, new[at, window])
            elif touched[hot[window]]:
                largest = max(largest, busy[at, window])
        value += largest
        if value >= limit:
            return False
    return True


@njit(cache=True, nogil=True)
@no_type_check
def _tops(busy, top, hot):
    """The busiest rank of every window, and what it has."""
    for window in range(len(top)):
        top[window] = -1.0
        for at in range(len(busy)):
            if busy[at, window] > top[window]:
                top[window], hot[window] = busy[at, window], at


# Expected loads of future windows of time: the observed windows where loads only vary, forecasts where they drift.
#
# Where loads drift, the latest windows predict the next one best: a forecast is a mean in which a window counts less
# than the one after it (exponential smoothing). Forecasts are expected to err as they did before, so the last forecast
# times each earlier error, and over it, makes one expected window. An error is a factor for each expert.


KEPT = 0.3  # what a window counts beside the one after it
DRIFT = 1.1  # times by which the mean of all windows must miss later ones by more for loads to count as drifting
FEWEST = 4  # windows that show a drift
SMALL = 1e-4  # share of an expert that changes nothing

Windows = Float[np.ndarray, "window layer expert"]


def windows_to_come(windows: Windows) -> Float[np.ndarray, "told layer expert"]:
    """Windows to place copies for: those given, or where loads drift, the last two and forecasts, as shares."""
    total = windows.sum(axis=2, keepdims=True)
    share = np.where(total > 0, windows / np.where(total > 0, total, 1), 1 / windows.shape[2])
    if len(windows) < FEWEST or _missed(share, 1.0) < DRIFT * _missed(share, KEPT):
        return windows
    told = _forecasts(share, KEPT)
    factor = (share[1:] + SMALL) / (told[:-1] + SMALL)
    made = np.concatenate([told[-1] * factor, told[-1] / factor])
    return np.concatenate([share[-2:], share[-1:], made / made.sum(axis=2, keepdims=True)])


def _forecasts(share: Windows, kept: float) -> Windows:
    """Forecast after every window, by exponential smoothing of it and those before."""
    total, weight, told = np.zeros_like(share[0]), 0.0, np.empty_like(share)
    for number, window in enumerate(share):
        total, weight = kept * total + window, kept * weight + 1
        told[number] = total / weight
    return told


def _missed(share: Windows, kept: float) -> float:
    """Mean squared error of forecasts over all later windows, relative to the forecast."""
    first = max(len(share) // 4, 1)
    later, squares = (np.cumsum(each[::-1], axis=0)[::-1][first:] for each in (share, share**2))
    told, count = _forecasts(share, kept)[first - 1 : -1], np.arange(len(share) - first, 0, -1)[:, None, None]
    return float((((squares - 2 * told * later) / count + told**2) / (told + SMALL)).sum(axis=2).mean())
