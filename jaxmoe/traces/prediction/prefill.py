"""Prediction of a request's decode from its own prefill: Insight 1 of "wafer_scale_moe_data_movement", III-B4."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.relax import as_number
from jaxmoe.traces.prediction.frequency import counts
from jaxmoe.traces.prediction.heatmaps import AbstractHeatmap
from jaxmoe.traces.prediction.predictor import AbstractPredictor, History, State


class PrefillLoad(AbstractPredictor):
    """Choices counted over the request's prefill, and `prior` choices by the frequencies of a trace seen before."""

    frequency: Float[Array, "layer expert"]
    prior: Float[Array, ""] = eqx.field(converter=as_number)

    def init(self, top_k: int) -> State:
        return jnp.zeros_like(self.frequency)

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        after = state + token.prefill * counts(token.experts, self.frequency.shape[-1])
        return after, state + self.prior * self.frequency


class PrefillHeatmap(AbstractPredictor):
    """Rows counted over the request's prefill, each with `prior` choices by the rows of a trace seen before."""

    heatmap: AbstractHeatmap
    prior: Float[Array, ""] = eqx.field(converter=as_number)

    def init(self, top_k: int) -> State:
        return self.heatmap.init(top_k), jnp.zeros_like(self.heatmap.rows)

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        last, pairs = state
        given = self.heatmap.given(last, token)
        layer = jnp.arange(len(given))[:, None]
        rows = pairs[layer, given] + self.prior * self.heatmap.rows[layer, given]
        predicted = (rows / rows.sum(axis=-1, keepdims=True)).sum(axis=1)
        # Missing choices fall outside and are dropped. As everywhere, what is given but missing has the last row.
        num_experts = predicted.shape[-1]
        chosen = jnp.where(token.experts < 0, num_experts, token.experts)
        counted = pairs.at[layer[..., None], given[:, :, None], chosen[:, None]].add(token.prefill, mode="drop")
        return (token.experts, counted), predicted
