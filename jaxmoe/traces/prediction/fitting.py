"""All predictors fitted to one trace, and traces cut in two to fit on one part and score on the other."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.traces.prediction.frequency import Frequency, MovingAverage, RunningWindow, shares
from jaxmoe.traces.prediction.heatmaps import NextLayer, NextToken
from jaxmoe.traces.prediction.limits import Perfect, Random
from jaxmoe.traces.prediction.predictor import AbstractPredictor
from jaxmoe.traces.prediction.prefill import PrefillHeatmap, PrefillLoad
from jaxmoe.traces.statistics.counting import count_pairs
from jaxmoe.traces.trace import GatingTrace, TraceError


def fit(
    trace: GatingTrace,
    *,
    rate: float = 0.05,
    window: int = 64,
    prior: float = 10.0,
    prefill_prior: float = 100.0,
    seed: int = 0,
) -> dict[str, AbstractPredictor]:
    """Every predictor by name, fitted to a trace, with the limits random and perfect.

    `rate` is that of the exponential average and `window` the tokens of the running one; `prior` the choices
    by the frequencies that are added to each fitted row, `prefill_prior` those by the fitted loads and rows that
    are added to what a prefill shows; `seed` is for the random prediction.
    """
    counted = count_pairs(trace)
    frequency = shares(counted.load)
    next_token, next_layer = NextToken.from_counts(counted, prior), NextLayer.from_counts(counted, prior)
    return {
        "random": Random(jax.random.key(seed), trace.num_experts),
        "frequency": Frequency(frequency),
        "repeat last": RunningWindow(frequency, window=1),
        "running window": RunningWindow(frequency, window),
        "exponential average": MovingAverage(frequency, jnp.asarray(rate)),
        "prefill load": PrefillLoad(frequency, jnp.asarray(prefill_prior)),
        "next token": next_token,
        "prefill next token": PrefillHeatmap(next_token, jnp.asarray(prefill_prior)),
        "next layer": next_layer,
        "prefill next layer": PrefillHeatmap(next_layer, jnp.asarray(prefill_prior)),
        "perfect": Perfect(trace.num_experts),
    }


def split_sequences(trace: GatingTrace, share: float, seed: int) -> tuple[GatingTrace, GatingTrace]:
    """Two traces of whole sequences drawn at random; the first has that share of them, and each at least one.

    Raises `TraceError` for a trace of one sequence.
    """
    sequences = len(trace.seq_start)
    if sequences < 2:
        raise TraceError("a trace of one sequence cannot be split by sequences; use two traces")
    first = np.random.default_rng(seed).permutation(sequences) < np.clip(round(share * sequences), 1, sequences - 1)
    in_first = np.repeat(first, np.diff(trace.seq_start, append=trace.num_tokens))
    return trace.select_tokens(np.flatnonzero(in_first)), trace.select_tokens(np.flatnonzero(~in_first))
