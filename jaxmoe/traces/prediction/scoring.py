"""How well predictors do on tokens that they have not seen, beside what no predictor could better."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmoe.traces.prediction.predictor import (
    AbstractPredictor,
    Frequency,
    MovingAveragePredictor,
    NextLayer,
    NextToken,
    PrefillHeatmap,
    PrefillLoad,
    RunningWindow,
    State,
    TokenHistory,
    counts,
    replay,
    shares,
)
from jaxmoe.traces.statistics.counting import count_pairs
from jaxmoe.traces.trace import MISSING, GatingTrace, TraceError

# How good predictions are: recall of the experts chosen, and error of the loads they add up to.


@eqx.filter_jit
def ranks(predictor: AbstractPredictor, tokens: TokenHistory) -> Int[Array, "token layer top_k"]:
    """The place, from 0, at which each chosen expert was ranked; -1 for missing choices.

    Of equal scores, the expert of the lower number is ranked first.
    """
    return replay(predictor, predictor.init(tokens.experts.shape[-1]), tokens, _ranks_of)[1]


@jax.jit
def recall(
    rank: Int[Array, "token layer top_k"], n: Int[Array, ""] | int, counted: Bool[Array, "token"] | None = None
) -> Float[Array, "layer"]:
    """The share of chosen experts that were among the `n` ranked highest, of the tokens counted or all.

    NaN for a layer of which no choice is counted.
    """
    known = rank != MISSING
    if counted is not None:
        known = known & counted[:, None, None]
    return (known & (rank < n)).sum(axis=(0, 2)) / known.sum(axis=(0, 2))


def _ranks_of(scores: Float[Array, "layer expert"], experts: Int[Array, "layer top_k"]) -> Int[Array, "layer top_k"]:
    own = jnp.take_along_axis(scores, experts, axis=-1)[..., None]
    other, first = scores[:, None], jnp.arange(scores.shape[-1]) < experts[..., None]
    place = ((other > own) | ((other == own) & first)).sum(axis=-1)
    return jnp.where(experts == MISSING, MISSING, place)


# The best and the worst that prediction can be.


class Perfect(AbstractPredictor):
    """Knows what will be chosen. The one predictor that looks ahead."""

    num_experts: int = eqx.field(static=True)

    def init(self, top_k: int) -> State:
        return ()

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        return state, counts(token.experts, self.num_experts)


class Random(AbstractPredictor):
    """An independent random ranking for every layer and place in the request."""

    key: Key[Array, ""]
    num_experts: int = eqx.field(static=True)

    def init(self, top_k: int) -> State:
        return jnp.zeros((), jnp.int32)

    def step(self, state: State, token: TokenHistory) -> tuple[State, Float[Array, "layer expert"]]:
        shape = (token.experts.shape[0], self.num_experts)
        return state + 1, jax.random.uniform(jax.random.fold_in(self.key, state), shape)


# All predictors fitted to one trace, and traces cut in two to fit on one part and score on the other.


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
        "exponential average": MovingAveragePredictor(frequency, jnp.asarray(rate)),
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
