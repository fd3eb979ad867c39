"""The best and the worst that prediction can be."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxmoe.traces.prediction.frequency import counts
from jaxmoe.traces.prediction.predictor import AbstractPredictor, History, State


class Perfect(AbstractPredictor):
    """Knows what will be chosen. The one predictor that looks ahead."""

    num_experts: int = eqx.field(static=True)

    def init(self, top_k: int) -> State:
        return ()

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        return state, counts(token.experts, self.num_experts)


class Random(AbstractPredictor):
    """An independent random ranking for every layer and place in the request."""

    key: Key[Array, ""]
    num_experts: int = eqx.field(static=True)

    def init(self, top_k: int) -> State:
        return jnp.zeros((), jnp.int32)

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        shape = (token.experts.shape[0], self.num_experts)
        return state + 1, jax.random.uniform(jax.random.fold_in(self.key, state), shape)
