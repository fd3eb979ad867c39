"""How many tokens each expert of the timed rank had, rebuilt for rows that state a distribution by its name.

The collector of ai-dynamo/aiconfigurator (095f58a5, collector/helper.py) draws a power law anew for every run and does
not keep its draws. What it does to a draw is exact here: rounding, the cap of one choice a token, where the remainder
goes, and that the most loaded rank is timed. A row is the mean of five draws; here it is that of `DRAWS`, which are the
same for all numbers of tokens.
"""

import math
from functools import cache
from typing import Literal, no_type_check

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from jaxmoe.hardware.gpu.terms import TILE_ROWS, ExpertLoads
from jaxmoe.placement.eplb import eplb

DRAWS = 8
LEAST_LOAD = 1e-2
EVEN, POWER_LAW = ("balanced", "uniform"), "power_law_"
GROUPS, CHOSEN_GROUPS = 8, 4  # of experts, of which DeepSeek-V3's gate lets a token choose
BLOCK = 128  # rows that DeepGEMM's contiguous layout gives to one expert
Routing = Literal["free", "grouped", "clamped", "blocks"]


def known_distribution(name: str) -> bool:
    """Whether tokens of a distribution can be rebuilt."""
    exponent = name.removeprefix(POWER_LAW)
    return name in EVEN or (exponent != name and exponent.replace(".", "", 1).isdigit() and float(exponent) != 1)


@cache
def loads_of(
    tokens: int, experts: int, top_k: int, ranks: int, distribution: str, routing: Routing = "free"
) -> ExpertLoads:
    """Loads of the timed rank of so many, for `balanced`, `uniform` or `power_law_ALPHA`.

    `grouped`: the gate of DeepSeek-V3 ran over the choices. `clamped`: the rank got the tokens with a choice there
    alone, and their other choices fell on its first expert. `blocks`: each expert computes whole blocks of rows, or,
    where all have as many, the rank does. Raises `ValueError` for another distribution.
    """
    local = experts // ranks
    if not known_distribution(distribution):
        raise ValueError(distribution)
    even = distribution in EVEN
    if even and routing == "blocks":
        return _means(_packed(tokens * top_k // experts * local, local), float(tokens))
    if even:
        draws = [_balanced(tokens, experts, top_k)]
    else:
        counts = _power_law(tokens, experts, top_k, ranks, float(distribution.removeprefix(POWER_LAW)))
        if routing in ("free", "blocks"):  # which token chose what makes no difference
            unit = BLOCK if routing == "blocks" else 1
            return _means(-(-counts[:, :local] // unit) * unit, float(tokens))
        draws = [_assigned(row, tokens, top_k) for row in counts]
    if routing == "grouped":
        draws = [(_regrouped(chosen, experts), times) for chosen, times in draws]
    found = np.array([_counted(chosen, times, local) for chosen, times in draws])
    if routing == "clamped" and ranks > 1:
        given = np.array([times[(chosen < local).any(axis=1)].sum() for chosen, times in draws])
        found[:, 0] += given * top_k - found.sum(axis=1)
        return _means(found, float(given.mean()))
    return _means(found, float(tokens))


def _packed(slots: int, local: int) -> Int[np.ndarray, "1 expert"]:
    """Blocks of rows that all experts fill together, each block of one expert's weights."""
    blocks = math.ceil(slots / BLOCK)
    return (BLOCK * (np.arange(local) < blocks) * max(blocks / local, 1))[None].astype(int)


def _means(counts: Int[np.ndarray, "draw expert"], tokens: float) -> ExpertLoads:
    tiles = np.array([np.ceil(counts / rows).sum(axis=1).mean() for rows in TILE_ROWS])
    loads = ((counts > 0).sum(axis=1).mean(), counts.sum(axis=1).mean(), counts.max(axis=1).mean(), tokens, tiles)
    # Nothing of a draw may fall on the rank; its kernels start all the same.
    return ExpertLoads(*(np.maximum(part, LEAST_LOAD) for part in loads))


# Tokens that choose alike are one row, [row, choice], with how many there are: rows are few, however many the tokens.


def _balanced(tokens: int, experts: int, top_k: int) -> tuple[Int[np.ndarray, "row choice"], Int[np.ndarray, " row"]]:
    stride = math.ceil(experts / top_k)
    rows = np.arange(min(tokens, experts))  # after which choices begin anew
    times = (tokens - rows - 1) // experts + 1
    first = rows[:, None] if tokens >= stride else rows[:, None] * stride / tokens
    return ((first + np.arange(top_k)[None] * stride) % experts).astype(np.int32), times


@cache
def _uniform(experts: int) -> Float[np.ndarray, "draw expert"]:
    """Draws between 0 and 1, each part of the range as often as another over all draws of an expert."""
    rng = np.random.default_rng(experts)
    parts = rng.permuted(np.tile(np.arange(DRAWS)[:, None], (1, experts)), axis=0)
    return (parts + rng.random((DRAWS, experts))) / DRAWS


def power_law_draws(
    tokens: int, experts: int, top_k: int, ranks: int, distribution: str
) -> Int[np.ndarray, "draw expert"]:
    """Choices of every expert in each draw of `power_law_ALPHA`, the most loaded rank first.

    Raises `ValueError` for another distribution.
    """
    if distribution in EVEN or not known_distribution(distribution):
        raise ValueError(distribution)
    return _power_law(tokens, experts, top_k, ranks, float(distribution.removeprefix(POWER_LAW)))


def mean_loads(counts: Int[np.ndarray, "draw expert"], tokens: float) -> ExpertLoads:
    """The mean over draws of a rank's loads, by the choices of each of its experts."""
    return _means(counts, tokens)


def _power_law(tokens: int, experts: int, top_k: int, ranks: int, alpha: float) -> Int[np.ndarray, "draw expert"]:
    """Choices of every expert, the most loaded rank first."""
    least, most = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    power = 1 - alpha
    drawn = ((most**power - least**power) * _uniform(experts) + least**power) ** (1 / power)
    wanted = drawn / drawn.sum(axis=1, keepdims=True) * tokens * top_k
    counts = np.rint(wanted).astype(np.int64)
    _settle(counts, tokens, top_k, ranks)
    return counts


def _assigned(
    counts: Int[np.ndarray, " expert"], tokens: int, top_k: int
) -> tuple[Int[np.ndarray, "row choice"], Int[np.ndarray, " row"]]:
    """Experts from the fullest on fill the first choice of all tokens, then the second."""
    order = np.argsort(-counts, kind="stable")
    ends = np.cumsum(counts[order])
    starts = np.unique(np.concatenate([[0], ends[ends < tokens * top_k] % tokens]))
    places = starts[:, None] + tokens * np.arange(top_k)[None]
    return order[np.searchsorted(ends, places, side="right")].astype(np.int32), np.diff(starts, append=tokens)


@njit(cache=True, nogil=True)
@no_type_check
def _settle(counts, tokens, top_k, ranks):
    """Cap and complete the counts of every draw, and swap the most loaded rank to the front."""
    local = counts.shape[1] // ranks
    for draw in range(len(counts)):
        row = counts[draw]
        over = 0
        for expert in range(len(row)):
            if row[expert] > tokens:
                over += row[expert] - tokens
                row[expert] = tokens
        _spread(row, over, ranks, tokens)
        _spread(row, tokens * top_k - row.sum(), ranks, tokens)
        sums = row.reshape(ranks, local).sum(axis=1)
        best = int(np.argmax(sums))
        if best:
            chosen = row[best * local : (best + 1) * local].copy()
            row[best * local : (best + 1) * local] = row[:local]
            row[:local] = chosen


@njit(cache=True, nogil=True)
@no_type_check
def _counted(chosen, times, local):
    """Choices of each of the first experts."""
    counts = np.zeros(local, np.int64)
    for row in range(len(chosen)):
        for expert in chosen[row]:
            if expert < local:
                counts[expert] += times[row]
    return counts


@njit(cache=True, nogil=True)
@no_type_check
def _regrouped(chosen, experts):
    """Choices after a gate that keeps the groups with the most choices, up to two, and fills up from the first on."""
    size, top_k = experts // GROUPS, chosen.shape[1]
    found = np.empty_like(chosen)
    hits = np.zeros(GROUPS, np.int64)
    for row in range(len(chosen)):
        wanted = chosen[row]
        hits[:] = 0
        for expert in wanted:
            hits[expert // size] += 1
        kept = np.argsort(-np.minimum(hits, 2), kind="mergesort")[:CHOSEN_GROUPS]
        place = 0
        for expert in wanted:
            if (kept == expert // size).any():
                found[row, place] = expert
                place += 1
        for group in np.sort(kept):
            for expert in range(group * size, (group + 1) * size):
                if place < top_k and not (wanted == expert).any():
                    found[row, place] = expert
                    place += 1
    return found


@njit(cache=True, nogil=True)
@no_type_check
def _spread(row, amount, ranks, most):
    """Add an amount to the emptiest experts of each rank in turn, or take it from the fullest."""
    local = len(row) // ranks
    step = 1 if amount > 0 else -1
    left = abs(amount)
    while left > 0:
        moved = False
        for rank in range(ranks):
            at = -1
            for expert in range(rank * local, (rank + 1) * local):
                if (step > 0 and row[expert] < most and (at < 0 or row[expert] < row[at])) or (
                    step < 0 and row[expert] > 0 and (at < 0 or row[expert] > row[at])
                ):
                    at = expert
            if at < 0:
                continue
            row[at] += step
            left -= 1
            moved = True
            if left == 0:
                return
        if not moved:
            return


# Experts that EPLB put in slots, with copies: the collector gives it the loads of a draw's experts, and times the rank
# that then has the most to do. A copy of an expert has an equal part of its tokens.

BALANCED = "_eplb"  # at the end of a distribution's name


@cache
def slot_loads(tokens: int, experts: int, top_k: int, ranks: int, slots: int, distribution: str) -> ExpertLoads:
    """Loads of the timed rank, for `power_law_ALPHA` without EPLB or `power_law_ALPHA_eplb` with it.

    Raises `ValueError` for another distribution.
    """
    if not distribution.endswith(BALANCED):
        return loads_of(tokens, experts, top_k, ranks, distribution)
    drawn = power_law_draws(tokens, experts, top_k, ranks, distribution.removesuffix(BALANCED))
    held = eplb(drawn.astype(float), slots, ranks)
    copies = np.stack([np.bincount(row, minlength=experts) for row in held])
    each = np.take_along_axis(drawn / copies, held, axis=1).reshape(len(drawn), ranks, -1)
    most = each.sum(axis=2).argmax(axis=1)
    fullest = each[np.arange(len(each)), most]
    counts = np.floor(np.cumsum(fullest, axis=1) + 0.5)  # whole tokens, none lost
    return mean_loads(np.diff(counts, axis=1, prepend=0).astype(np.int64), float(tokens))
