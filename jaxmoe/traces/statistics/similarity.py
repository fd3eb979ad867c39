"""How alike two sets of loads or heatmaps are: in the order of their values, and in which experts are hottest."""

import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Float64, Int, Real

Values = Real[np.ndarray, "*lead value"]


def spearman(one: Values, other: Values) -> Float64[np.ndarray, "*lead"]:
    """Spearman's rho over the last axis, equal values having the mean of their ranks; NaN where all are equal.

    The measure of the wafer-scale study (III-B3), where above 0.7 is called strong and up to 0.4 weak.
    """
    ranks = [scipy.stats.rankdata(values, axis=-1) for values in (one, other)]
    a, b = (rank - rank.mean(axis=-1, keepdims=True) for rank in ranks)
    scale = np.sqrt((a * a).sum(axis=-1) * (b * b).sum(axis=-1))
    return np.divide((a * b).sum(axis=-1), scale, out=np.full(scale.shape, np.nan), where=scale > 0)


def spearman_of_heatmaps(
    one: Real[np.ndarray, "layer expert expert"], other: Real[np.ndarray, "layer expert expert"]
) -> Float64[np.ndarray, " layer"]:
    """Spearman's rho of two heatmaps, all cells of a layer being its values."""
    # One layer at a time, because the ranks of all heatmaps together take much memory.
    return np.array([spearman(a.ravel(), b.ravel()) for a, b in zip(one, other, strict=True)], np.float64)


def hottest(load: Real[np.ndarray, "*lead expert"], count: int) -> Int[np.ndarray, "*lead top"]:
    """The experts of the largest loads, the largest first; between equals the lower number."""
    return np.argsort(-load, axis=-1, kind="stable")[..., :count]


def common_fraction(
    one: Int[np.ndarray, "*lead top"], other: Int[np.ndarray, "*lead top"]
) -> Float64[np.ndarray, "*lead"]:
    """The part of two equally long lists of experts that is in both."""
    return (one[..., :, None] == other[..., None, :]).any(axis=-1).mean(axis=-1)


def jaccard(one: Int[np.ndarray, "*lead top"], other: Int[np.ndarray, "*lead top"]) -> Float64[np.ndarray, "*lead"]:
    """Experts in both of two equally long lists, over those in either."""
    common = common_fraction(one, other)
    return common / (2 - common)
