"""Forecasts of expert loads, made before a layer gates its tokens: f^ of hd_moe Eq. 13."""

from abc import abstractmethod
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.traces import GatingTrace
from jaxmoe.traces.prediction import NextLayer
from jaxmoe.traces.prediction.predictor import shares
from jaxmoe.traces.statistics.counting import count_pairs

Forecast = Literal["moving_average", "static", "perfect", "cross_layer"]
State = Any  # a pytree of arrays, of the forecast's own kind

Loads = Float[Array, "layer expert"]


class AbstractForecast(eqx.Module):
    """Forecasts the loads of an iteration, tokens per expert, in every layer just before it.

    A pytree of what was fitted, with an `init` and a `step` that work under `jit`, `vmap` and `lax.scan`.
    """

    @abstractmethod
    def init(self) -> State:
        """Returns the state before the first iteration."""

    @abstractmethod
    def step(self, state: State, loads: Loads) -> tuple[State, Loads]:
        """The state after an iteration, and the loads that were forecast for it, from those that came.

        The forecast of a layer depends on the state, on the loads of the layers before, and on how many choices
        the batch makes, which is known beforehand.
        """


class StaticForecast(AbstractForecast):
    """Forecasts the frequencies of an earlier trace in every iteration, such as that of the placement's tuning."""

    frequency: Loads  # each expert's share of its layer's choices

    def init(self) -> State:
        return ()

    def step(self, state: State, loads: Loads) -> tuple[State, Loads]:
        return state, self.frequency * _choices(loads)


class MovingAverage(AbstractForecast):
    """Exponential moving average of earlier iterations: the temporal locality of hd_moe IV-D1.

    It begins with the frequencies of a trace seen before. After each iteration, average <- (1 - rate) average +
    rate (its loads as shares); an iteration without choices changes nothing.
    """

    frequency: Loads
    rate: Float[Array, ""]  # 0 to 1; about 2 / (iterations remembered + 1)

    def init(self) -> State:
        return self.frequency

    def step(self, state: State, loads: Loads) -> tuple[State, Loads]:
        choices = _choices(loads)
        latest = jnp.where(choices > 0, loads / jnp.maximum(choices, 1), state)
        return state + self.rate * (latest - state), state * choices


class CrossLayer(AbstractForecast):
    """Forecasts a layer's loads from the loads of the layer before; `first` forecasts the first layer.

    A choice of expert i is followed by expert j with the probability in row i, column j. This stands for hd_moe's
    prediction by the gates of neighbouring layers, which no recorded trace can replay.
    """

    rows: Float[Array, "layer given expert"]  # P(expert in a layer | given expert in the layer before); sum 1
    first: AbstractForecast

    @classmethod
    def from_heatmap(cls, heatmap: NextLayer, first: AbstractForecast) -> "CrossLayer":
        """Takes the rows of a fitted predictor, without the one for a missing expert."""
        return cls(heatmap.rows[:, :-1], first)

    def init(self) -> State:
        return self.first.init()

    def step(self, state: State, loads: Loads) -> tuple[State, Loads]:
        state, first = self.first.step(state, loads)
        following = (loads[:-1, :, None] * self.rows[1:]).sum(axis=1)
        return state, jnp.concatenate([first[:1], following])


class PerfectForecast(AbstractForecast):
    """Returns the loads that will come: an upper limit on the benefit of forecasts."""

    def init(self) -> State:
        return ()

    def step(self, state: State, loads: Loads) -> tuple[State, Loads]:
        return state, loads


def forecast_of(name: Forecast, history: GatingTrace, rate: float = 0.5, prior: float = 10.0) -> AbstractForecast:
    """The forecast of this name, fitted on what was seen before.

    `rate` is of the moving average. `cross_layer` has `prior` choices by the frequencies added to every row, and a
    moving average for the first layer.
    """
    if name == "perfect":
        return PerfectForecast()
    counts = count_pairs(history)
    frequency = shares(counts.load)
    average = MovingAverage(frequency, jnp.asarray(rate))
    match name:
        case "static":
            return StaticForecast(frequency)
        case "cross_layer":
            return CrossLayer.from_heatmap(NextLayer.from_counts(counts, prior), average)
    return average


def _choices(loads: Loads) -> Float[Array, "layer 1"]:
    return loads.sum(axis=-1, keepdims=True)
