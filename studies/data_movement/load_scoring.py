"""Predicted sets of experts and predicted loads, and how far they are from what was chosen."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.traces import TraceError
from jaxmoe.traces.prediction import AbstractPredictor, TokenHistory, advance, replay
from jaxmoe.traces.prediction.predictor import Rows, State, counts


def top_of_rows(heatmap: Rows, n: int) -> Rows:
    """The paper's rule: a row names its top `n` experts. Scores become votes, and the predicted set is `scores > 0`."""
    place = jnp.argsort(jnp.argsort(-heatmap.rows, axis=-1), axis=-1)
    return eqx.tree_at(lambda heatmap: heatmap.rows, heatmap, (place < n).astype(jnp.float32))


@eqx.filter_jit
def set_recall(
    predictor: AbstractPredictor, tokens: TokenHistory
) -> tuple[Float[Array, " layer"], Float[Array, " layer"]]:
    """The share of chosen experts in the predicted sets, those with a score above 0, and the mean size of the sets."""

    def look(scores: Float[Array, "layer expert"], experts: Int[Array, "layer top_k"]) -> tuple[Array, ...]:
        predicted, chosen = scores > 0, counts(experts, scores.shape[-1])
        return (predicted * chosen).sum(axis=-1), chosen.sum(axis=-1), predicted.sum(axis=-1)

    hits, known, size = replay(predictor, predictor.init(tokens.experts.shape[-1]), tokens, look)[1]
    return hits.sum(axis=0) / known.sum(axis=0), size.mean(axis=0)


@eqx.filter_jit
def batch_loads(
    predictor: AbstractPredictor, tokens: TokenHistory, batch: Int[Array, " token"], batches: int
) -> tuple[Float[Array, "batch layer expert"], Float[Array, "batch layer expert"]]:
    """Predicted and real choices of each expert in batches of tokens that run side by side, as in decode.

    `batch` is the batch of each token, from 0, or -1 for none. The predicted load is the sum of the predictions
    made for each of its tokens: scores as shares, times the number of choices that are known.
    """

    def add(
        carry: tuple[State, Float[Array, "2 batch layer expert"]], one: tuple[TokenHistory, Int[Array, ""]]
    ) -> tuple[tuple[State, Float[Array, "2 batch layer expert"]], None]:
        (state, loads), (token, batch) = carry, one
        state, scores = advance(predictor, state, token)
        real = counts(token.experts, scores.shape[-1])
        both = jnp.stack([_shares(scores) * real.sum(axis=-1, keepdims=True), real])
        place = jnp.where(batch == -1, batches, batch)  # past the last, and so dropped
        return (state, loads.at[:, place].add(both, mode="drop")), None

    state = predictor.init(tokens.experts.shape[-1])
    first = jax.tree.map(lambda leaf: leaf[0], tokens)
    layers, experts = eqx.filter_eval_shape(advance, predictor, state, first)[1].shape
    (_, loads), _ = jax.lax.scan(add, (state, jnp.zeros((2, batches, layers, experts))), (tokens, batch))
    return loads[0], loads[1]


def window_loads(
    predictor: AbstractPredictor, tokens: TokenHistory, window: int
) -> tuple[Float[Array, "window layer expert"], Float[Array, "window layer expert"]]:
    """Load forecast at the first token of every `window` tokens one after another, and the load that came.

    The forecast is the first token's scores as shares, times the number of choices that the window knows. Windows
    that run into another request are zero in both, and tokens after the last whole window are left out. Raises
    `TraceError` when there are fewer tokens than a window has.
    """
    windows = len(tokens.start) // window
    if windows < 1:
        raise TraceError(f"{len(tokens.start)} tokens make no window of {window}; use a smaller window")
    return _window_loads(predictor, tokens, windows, window)


@jax.jit
def load_error(
    predicted: Float[Array, "batch layer expert"], real: Float[Array, "batch layer expert"]
) -> Float[Array, " layer"]:
    """Mean over experts of |predicted - real| over their mean real load, averaged over batches with any load."""
    load = real.sum(axis=-1)
    error = jnp.abs(predicted - real).sum(axis=-1) / jnp.where(load > 0, load, 1)
    return error.sum(axis=0, where=load > 0) / (load > 0).sum(axis=0)


@eqx.filter_jit
def _window_loads(
    predictor: AbstractPredictor, tokens: TokenHistory, windows: int, window: int
) -> tuple[Float[Array, "window layer expert"], Float[Array, "window layer expert"]]:
    def look(scores: Float[Array, "layer expert"], experts: Int[Array, "layer top_k"]) -> tuple[Array, Array]:
        return _shares(scores), counts(experts, scores.shape[-1])

    def one_window(state: State, tokens: TokenHistory) -> tuple[State, tuple[Array, Array]]:
        state, (forecast, chosen) = replay(predictor, state, tokens, look)
        real = jnp.where(tokens.start[1:].any(), 0, chosen.sum(axis=0))
        return state, (forecast[0] * real.sum(axis=-1, keepdims=True), real)

    cut = jax.tree.map(lambda leaf: leaf[: windows * window].reshape(windows, window, *leaf.shape[1:]), tokens)
    return jax.lax.scan(one_window, predictor.init(tokens.experts.shape[-1]), cut)[1]


def _shares(scores: Float[Array, "layer expert"]) -> Float[Array, "layer expert"]:
    return scores / jnp.maximum(scores.sum(axis=-1, keepdims=True), jnp.finfo(scores.dtype).tiny)
