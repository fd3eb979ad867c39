"""Pairs of experts over tokens and layers, how alike two heat maps are, and phases of a request."""

import math
from dataclasses import dataclass

import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Float64, Int, Real

from jaxmoe.traces.statistics.counting import CHUNK_TOKENS, Report, count_pairs
from jaxmoe.traces.trace import DECODE, PREFILL, GatingTrace, TraceError

# Which expert comes with which: heatmaps of counts, one for each layer.

Table = Real[np.ndarray, "layer expert expert"]
Heatmap = Float64[np.ndarray, "layer expert expert"]


def conditional(pairs: Table) -> Heatmap:
    """Where one of the events of a row's expert goes to: counts with rows that sum to 1.

    Of token pairs, that one of the next token's choices is j, given a choice of i (wafer-scale study, Fig. 5); of
    layer pairs, the same for the next layer (Fig. 4). The probability that j is among all K choices is K times
    that. Rows without events are 0.
    """
    total = pairs.sum(axis=-1, keepdims=True)
    return np.divide(pairs, total, out=np.zeros(pairs.shape), where=total > 0)


def affinity(together: Table, load: Real[np.ndarray, "layer expert"]) -> Heatmap:
    """The probability that a token chose j, given that it chose i (hd_moe Fig. 3c), from pairs i < j.

    The diagonal, and rows of experts that were never chosen, are 0.
    """
    return np.divide(_both_ways(together), load[..., None], out=np.zeros(together.shape), where=load[..., None] > 0)


def coactivation(together: Table) -> Heatmap:
    """How often i and j were chosen together, over how often by chance (wafer-scale study, Fig. 8a, b).

    A pair's share of all pairs, over 2 / (E (E - 1)), from counts of pairs i < j; symmetric, 0 on the diagonal. A
    layer without pairs is 0.
    """
    experts = together.shape[-1]
    total = together.sum(axis=(1, 2), keepdims=True)
    share = np.divide(_both_ways(together), total, out=np.zeros(together.shape), where=total > 0)
    return share * (experts * (experts - 1) / 2)


def _both_ways(together: Table) -> Table:
    return together + np.swapaxes(together, 1, 2)


# How alike two sets of loads or heatmaps are: in the order of their values, and in which experts are hottest.

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


# Whether experts that a prompt chose are those that the answer chooses (wafer-scale study, Ob3, Fig. 6).

BLOCK_TOKENS = 64  # long enough that few steps lead from block to block


@dataclass(frozen=True)
class PhaseAgreement:
    """Spearman's rho of prefill and decode; NaN where a phase has nothing to rank.

    Of the loads of a layer, of its heatmap from token to token, and of its heatmap to the next layer row.
    """

    load: Float64[np.ndarray, " layer"]
    token_heatmap: Float64[np.ndarray, " layer"]
    layer_heatmap: Float64[np.ndarray, " step"]


def phase_agreement(
    trace: GatingTrace,
    phase: Int[np.ndarray, " token"],
    report: Report | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> PhaseAgreement:
    """How alike the tokens of both phases are. Steps from one phase to the other belong to neither.

    `phase` is that of the trace, or another one. Raises `TraceError` when it lacks prefill or decode.
    """
    for kind, name in ((PREFILL, "prefill"), (DECODE, "decode")):
        if not (phase == kind).any():
            raise TraceError(f"has no {name} token to compare with the other phase")
    prefill, decode = (
        count_pairs(trace, report, only=phase == kind, chunk_tokens=chunk_tokens) for kind in (PREFILL, DECODE)
    )
    return PhaseAgreement(
        spearman(prefill.load, decode.load),
        spearman_of_heatmaps(conditional(prefill.token_pairs), conditional(decode.token_pairs)),
        spearman_of_heatmaps(conditional(prefill.layer_pairs), conditional(decode.layer_pairs)),
    )


def shuffled_phases(phase: Int[np.ndarray, " token"], seed: int) -> Int[np.ndarray, " token"]:
    """Phases dealt anew: with them, `phase_agreement` is that of two samples of one and the same thing.

    The phases are cut into blocks of 64 consecutive tokens and the blocks put in random order, so each phase keeps
    its number of tokens and nearly all of its steps. The same seed gives the same order.
    """
    blocks = np.array_split(phase, math.ceil(len(phase) / BLOCK_TOKENS))
    order = np.random.default_rng(seed).permutation(len(blocks))
    return np.concatenate([blocks[block] for block in order])
