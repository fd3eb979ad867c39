"""How unequal the loads of experts are, each figure beside what it would be by chance."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int32, Int64, Real

from jaxmoe.traces.statistics.topics import drawn_loads
from jaxmoe.traces.trace import GatingTrace

Load = Real[np.ndarray, "*lead expert"]
Figure = Float64[np.ndarray, "*lead"]


def max_over_mean(load: Load) -> Figure:
    """The largest load over the mean: 1 when all are equal."""
    mean = load.mean(axis=-1, dtype=np.float64)
    return np.divide(load.max(axis=-1), mean, out=np.full(mean.shape, np.nan), where=mean > 0)


def mean_over_max(load: Load) -> Figure:
    """The mean load over the largest: the part of the time that a part is busy on average."""
    return np.asarray(1 / max_over_mean(load))


def excess_over_mean(load: Load) -> Figure:
    """How far the largest load is above the mean, in means: the imbalance degree of moentwine (Eq. 2)."""
    return np.asarray(max_over_mean(load) - 1)


def cv(load: Load) -> Figure:
    """Standard deviation over mean, the coefficient of variation of one layer (camoe Eq. 15)."""
    mean = load.mean(axis=-1, dtype=np.float64)
    return np.divide(load.std(axis=-1, dtype=np.float64), mean, out=np.full(mean.shape, np.nan), where=mean > 0)


# What loads are when nothing but chance makes them unequal.


def even_loads(
    choices: Int64[np.ndarray, " layer"], num_experts: int, top_k: int, seed: int
) -> Int64[np.ndarray, "layer expert"]:
    """Loads of tokens that choose `top_k` different experts, all equally likely, independently of each other.

    `choices` is how many there are in each layer; what does not make a whole token makes one of fewer choices. The
    loads are drawn from their exact distribution, expert by expert, without drawing tokens: of the tokens with r
    choices left and n experts to come, each takes the next expert with probability r / n. The same seed gives the
    same loads.
    """
    rng = np.random.default_rng(seed)
    tokens = np.zeros((len(choices), top_k + 1), np.int64)  # tokens by choices left
    tokens[:, top_k] = choices // top_k
    tokens[np.arange(len(choices)), choices % top_k] += choices % top_k > 0
    left = np.arange(top_k + 1)
    loads = np.zeros((len(choices), num_experts), np.int64)
    for expert in range(num_experts):
        # Not above 1: a token cannot have more choices left than there are experts, unless no token is there.
        taken = rng.binomial(tokens, np.minimum(left / (num_experts - expert), 1))
        loads[:, expert] = taken.sum(axis=1)
        tokens -= taken
        tokens[:, :-1] += taken[:, 1:]
    return loads


# How much of what happens falls on the most frequent pairs of experts (wafer-scale study, Fig. 4c, 5d, 8c).

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


# The long tail: few experts with many tokens, many experts with few (expert streaming, Fig. 2b, c).

BATCH_TOKENS = (16, 32, 64, 128, 256, 512)


def long_tail(
    trace: GatingTrace, sizes: Sequence[int] = BATCH_TOKENS, batches: int = 64, seed: int = 0
) -> Int32[np.ndarray, "size batch layer rank"]:
    """Tokens of the busiest expert, the next, and so on, in drawn batches of each size.

    `sizes` are tokens in a batch, ascending. Experts are sorted anew in every batch. Raises `TraceError` when the
    trace has fewer tokens than a batch. The same seed gives the same batches.
    """
    runs = [-np.sort(-loads, axis=-1) for loads in drawn_loads(trace, sizes, batches, seed)]
    return np.swapaxes(np.concatenate(runs), 0, 1)


# How unequal loads are. The field has three figures for the largest load; each goes by its own name here.
#
# Loads may be of experts or of nodes, in any unit. A figure is NaN where there is no load at all.

# The metrics of camoe (A.4): how selective a whole model is, and how far its routing has shifted.
#
# `load` counts tokens of each expert, [layer, expert]. The global figures add up experts of equal number over layers.

LayerLoad = Real[np.ndarray, "layer expert"]

SMOOTHING = 1.0  # tokens; camoe does not say what its epsilon is


def global_cv(load: LayerLoad) -> float:
    """Coefficient of variation of loads added up over layers (Eq. 14)."""
    return float(cv(load.sum(axis=0)))


def avg_layer_cv(load: LayerLoad) -> float:
    """Mean over layers of each one's coefficient of variation (Eq. 15, 16)."""
    return float(cv(load).mean())


def global_kl(base: LayerLoad, other: LayerLoad, smoothing: float = SMOOTHING) -> float:
    """Divergence of `other` from `base`, nats, with loads added up over layers (Eq. 17, 18)."""
    return float(kl(base.sum(axis=0), other.sum(axis=0), smoothing))


def avg_layer_kl(base: LayerLoad, other: LayerLoad, smoothing: float = SMOOTHING) -> float:
    """Mean over layers of the divergence of `other` from `base`, nats (Eq. 19, 20)."""
    return float(kl(base, other, smoothing).mean())


def kl(
    base: Real[np.ndarray, "*lead expert"], other: Real[np.ndarray, "*lead expert"], smoothing: float = SMOOTHING
) -> Float64[np.ndarray, "*lead"]:
    """Kullback-Leibler divergence of two histograms, nats, with `smoothing` added to every count (Eq. 19)."""
    p, q = _distribution(base, smoothing), _distribution(other, smoothing)
    return np.asarray((p * np.log(p / q)).sum(axis=-1))


def _distribution(counts: Real[np.ndarray, "*lead expert"], smoothing: float) -> Float64[np.ndarray, "*lead expert"]:
    smooth = counts + float(smoothing)
    return smooth / smooth.sum(axis=-1, keepdims=True)
