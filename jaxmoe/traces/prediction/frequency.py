"""Prediction from how often experts were chosen: ever, lately, or in the last tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.traces.prediction.predictor import AbstractPredictor, History, State


def shares(load: np.ndarray) -> Float[Array, "layer expert"]:
    """Each expert's share of its layer's load [layer, expert]; even where nothing was counted."""
    total = load.sum(axis=-1, keepdims=True)
    return jnp.asarray(np.where(total > 0, load / np.maximum(total, 1), 1 / load.shape[-1]), jnp.float32)


def counts(experts: Int[Array, "layer top_k"], num_experts: int) -> Float[Array, "layer expert"]:
    """How often a token chose each expert, 0 or 1. Missing choices count for none."""
    return jax.nn.one_hot(experts, num_experts).sum(axis=-2)


class Frequency(AbstractPredictor):
    """The shares of a trace seen before, whatever the request does: what any other predictor has to beat."""

    frequency: Float[Array, "layer expert"]

    def init(self, top_k: int) -> State:
        return ()

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        return state, self.frequency


class MovingAverage(AbstractPredictor):
    """Exponential moving average of the request's choices, from the shares of a trace seen before.

    After each token, average <- (1 - rate) average + rate (its choices as shares); a token all of whose choices
    are missing changes nothing.
    """

    frequency: Float[Array, "layer expert"]
    rate: Float[Array, ""]  # 0 to 1; about 2 / (tokens remembered + 1)

    def init(self, top_k: int) -> State:
        return self.frequency

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        chosen = counts(token.experts, self.frequency.shape[-1])
        known = chosen.sum(axis=-1, keepdims=True)
        latest = jnp.where(known > 0, chosen / jnp.maximum(known, 1), state)
        return state + self.rate * (latest - state), state


class RunningWindow(AbstractPredictor):
    """Choices counted over the last `window` tokens of the request; equal counts are ranked by frequency.

    A window of one token is the naive prediction that the last choice is repeated.
    """

    frequency: Float[Array, "layer expert"]
    window: int = eqx.field(static=True)

    def init(self, top_k: int) -> State:
        layers = self.frequency.shape[0]
        recent = jnp.full((self.window, layers, top_k), -1, jnp.int32)
        return recent, jnp.zeros_like(self.frequency), jnp.zeros((), jnp.int32)

    def step(self, state: State, token: History) -> tuple[State, Float[Array, "layer expert"]]:
        recent, counted, oldest = state
        num_experts = self.frequency.shape[-1]
        after = counted + counts(token.experts, num_experts) - counts(recent[oldest], num_experts)
        # Shares are at most 1, as much as one choice counts: halved, they only tell equal counts apart.
        return (recent.at[oldest].set(token.experts), after, (oldest + 1) % self.window), counted + self.frequency / 2
