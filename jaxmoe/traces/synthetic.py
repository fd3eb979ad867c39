"""Made-up gating with stated skew, co-activation and reuse, for when no recorded trace is at hand."""

from collections.abc import Sequence

import numpy as np

from jaxmoe.traces.trace import GatingTrace, TraceError

SEQUENCE_TOKENS = 512


def synthetic_trace(
    tokens: int,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    skew: float,
    coactivation: float,
    reuse: float,
    seed: int,
) -> GatingTrace:
    """Draw a trace [tokens, layers, top_k]; layers are independent of each other.

    `skew` (>= 0) is the Zipf exponent of expert popularity: a token's first choice (column 0) is the expert
    of rank r = 1, 2, ... with a probability that goes as r ** -skew. Which expert has which rank is random
    in every layer. Further choices are drawn in the same way from the experts not yet chosen, so the load of
    all columns is flatter than column 0.

    `coactivation` in [0, 1] is the probability that further choices all come from the group of the first.
    Groups are a random, even division of a layer's experts into groups of 2 top_k or more; with fewer than
    4 top_k experts there is one group and no effect. The popularity of first choices is the same for any
    `coactivation`.

    `reuse` in [0, 1] is the probability that a token repeats the whole choice of the token before, order
    included, independently in every layer; else it chooses afresh. Where unrelated tokens share a part b of
    their experts, neighbours share reuse + (1 - reuse) b. Sequences start every 512 tokens, with a fresh
    choice.

    The same arguments give the same trace, and a layer is the same whichever others are asked for.
    Raises `TraceError` for numbers out of range.
    """
    _check_sizes(tokens, num_experts, top_k)
    _check_strengths(skew, coactivation, reuse)
    seq_start = np.arange(0, tokens, SEQUENCE_TOKENS)
    experts = np.empty((tokens, len(layer_ids), top_k), np.int16)
    for row, layer in enumerate(layer_ids):
        rng = np.random.default_rng((seed, layer))
        fresh = _fresh_choices(rng, tokens, num_experts, top_k, skew, coactivation)
        experts[:, row] = fresh[_chosen_at(rng, tokens, reuse, seq_start)]
    settings = f"skew={skew}, coactivation={coactivation}, reuse={reuse}, seed={seed}"
    return GatingTrace(
        experts=experts,
        num_experts=num_experts,
        layer_ids=np.asarray(layer_ids, np.int64),
        seq_start=seq_start,
        is_repeat=None,
        facts={
            "model": f"none: synthetic, {num_experts} experts, top {top_k}",
            "dataset": f"none: synthetic, {tokens} tokens",
            "source": f"synthetic, drawn by jaxmoe and not recorded from a model: {settings}",
        },
    )


def _fresh_choices(
    rng: np.random.Generator, tokens: int, num_experts: int, top_k: int, skew: float, coactivation: float
) -> np.ndarray:
    """Independent choices of one layer, int [token, top_k]: a race whose first top_k arrivals are chosen.

    Exponential arrivals at rates r ** -skew come in the order of draws without replacement. They are compared
    as logarithms, where no rate is too small.
    """
    rank = 1 + rng.permutation(num_experts)
    group = rng.permutation(num_experts) % max(1, num_experts // (2 * top_k))
    arrival = np.log(rng.standard_exponential((tokens, num_experts))) + skew * np.log(rank)
    # The order inside a group does not depend on those outside: to keep them out is to draw from the group.
    bound = rng.random(tokens) < coactivation
    outside = group != group[arrival.argmin(axis=1)][:, None]
    arrival[bound[:, None] & outside] = np.inf
    chosen = np.argpartition(arrival, top_k - 1, axis=1)[:, :top_k]
    order = np.argsort(np.take_along_axis(arrival, chosen, axis=1), axis=1)
    return np.take_along_axis(chosen, order, axis=1)


def _chosen_at(rng: np.random.Generator, tokens: int, reuse: float, seq_start: np.ndarray) -> np.ndarray:
    """The token whose fresh choice each token has, int [token]: itself, or the last fresh one before it."""
    fresh = rng.random(tokens) >= reuse
    fresh[seq_start] = True
    return np.maximum.accumulate(np.where(fresh, np.arange(tokens), 0))


def _check_sizes(tokens: int, num_experts: int, top_k: int) -> None:
    if tokens < 1:
        raise TraceError(f"tokens is {tokens}, expected at least 1")
    if not 1 <= top_k <= num_experts:
        raise TraceError(f"top_k is {top_k}, expected 1 to num_experts, {num_experts}")


def _check_strengths(skew: float, coactivation: float, reuse: float) -> None:
    if not 0 <= skew < np.inf:
        raise TraceError(f"skew is {skew}, expected a number from 0 up")
    for name, value in (("coactivation", coactivation), ("reuse", reuse)):
        if not 0 <= value <= 1:
            raise TraceError(f"{name} is {value}, expected a number from 0 to 1")
