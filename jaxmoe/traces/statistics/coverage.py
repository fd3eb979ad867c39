"""How much of what happens falls on the most frequent pairs of experts (wafer-scale study, Fig. 4c, 5d, 8c)."""

import numpy as np
from jaxtyping import Float64, Real

Events = Real[np.ndarray, "*lead pair"]


def every_pair(table: Real[np.ndarray, "*lead expert expert"]) -> Events:
    """All E x E ordered pairs in one axis: the possible pairs of neighbouring tokens or layers."""
    return table.reshape(*table.shape[:-2], table.shape[-1] ** 2)


def pairs_above(table: Real[np.ndarray, "*lead expert expert"]) -> Events:
    """The E (E - 1) / 2 pairs i < j in one axis: the possible pairs of one token."""
    return table[(..., *np.triu_indices(table.shape[-1], 1))]


def coverage_curve(events: Events) -> Float64[np.ndarray, "*lead pair"]:
    """The share of all events on the 1, 2, ... most frequent pairs; NaN where there are no events."""
    running = np.cumsum(-np.sort(-events, axis=-1), axis=-1, dtype=np.float64)
    total = running[..., -1:]
    return np.divide(running, total, out=np.full(running.shape, np.nan), where=total > 0)


def coverage(events: Events, share: float) -> Float64[np.ndarray, "*lead"]:
    """The share of all events on the most frequent `share` of all possible pairs; NaN where there are none.

    That many pairs are rounded to a whole number, halves to the even one.
    """
    count = round(share * events.shape[-1])
    if events.shape[-1] == 0:
        return np.full(events.shape[:-1], np.nan)
    top = -np.sort(-events, axis=-1)[..., :count].sum(axis=-1)
    total = events.sum(axis=-1)
    return np.divide(top, total, out=np.full(total.shape, np.nan), where=total > 0)


def coverage_of(chosen: Events, events: Events, share: float) -> Float64[np.ndarray, "*lead"]:
    """The share of `events` on the pairs that are the most frequent `share` among `chosen`.

    Between equally frequent ones the first counts as the more frequent. NaN where there are no events.
    """
    count = round(share * events.shape[-1])
    top = np.argsort(-chosen, axis=-1, kind="stable")[..., :count]
    covered, total = np.take_along_axis(events, top, axis=-1).sum(axis=-1), events.sum(axis=-1)
    return np.divide(covered, total, out=np.full(total.shape, np.nan), where=total > 0)
