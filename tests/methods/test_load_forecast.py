"""Forecasts by hand, and that none but the perfect one looks ahead."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full

from jaxmoe.methods import CrossLayer, MovingAverage, PerfectForecast, StaticForecast
from jaxmoe.traces import GatingTrace
from jaxmoe.traces.prediction import NextLayer
from jaxmoe.traces.statistics.counting import count_pairs

FREQUENCY = floats([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
ROWS = floats([[[1.0, 0, 0], [1, 0, 0], [1, 0, 0]], [[0, 1, 0], [0, 0.5, 0.5], [0.25, 0.25, 0.5]]])
AVERAGE = MovingAverage(FREQUENCY, jnp.asarray(0.25))
FORECASTS = {
    "static": StaticForecast(FREQUENCY),
    "average": AVERAGE,
    "cross-layer": CrossLayer(ROWS, AVERAGE),
    "perfect": PerfectForecast(),
}
# Two iterations of eight choices in each of two layers.
LOADS = floats([[[8.0, 0, 0], [0, 4, 4]], [[2, 2, 4], [8, 0, 0]]])


@eqx.filter_jit
def told(forecast, loads):
    """Forecasts [iteration, layer, expert]."""
    return jax.lax.scan(lambda state, seen: forecast.step(state, seen), forecast.init(), loads)[1]


def test_forecasts_by_hand():
    start = [[4, 4, 0], [2, 2, 4]]
    # Averages after the first iteration: 3/4 of the frequencies and 1/4 of [1, 0, 0] and [0, 0.5, 0.5].
    later = [[5, 3, 0], [1.5, 2.5, 4]]
    np.testing.assert_allclose(told(FORECASTS["static"], LOADS), [start, start])
    np.testing.assert_allclose(told(FORECASTS["average"], LOADS), [start, later])
    # Layer 1: eight choices of expert 0, all followed by expert 1; then 2, 2 and 4 times the rows of layer 1.
    np.testing.assert_allclose(told(FORECASTS["cross-layer"], LOADS), [[start[0], [0, 8, 0]], [later[0], [1, 4, 3]]])
    np.testing.assert_allclose(told(FORECASTS["perfect"], LOADS), LOADS)


@pytest.mark.parametrize("name", FORECASTS)
def test_every_choice_is_forecast(name):
    np.testing.assert_allclose(told(FORECASTS[name], LOADS).sum(axis=-1), LOADS.sum(axis=-1))


@pytest.mark.parametrize("name", ["static", "average", "cross-layer"])
@pytest.mark.parametrize(("iteration", "layer"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_forecast_looks_back_only(name, iteration, layer):
    changed = LOADS.at[iteration, layer].set(jnp.roll(LOADS[iteration, layer], 1))
    before, after = told(FORECASTS[name], LOADS), told(FORECASTS[name], changed)
    np.testing.assert_array_equal(before[:iteration], after[:iteration])
    np.testing.assert_array_equal(before[iteration, : layer + 1], after[iteration, : layer + 1])


def test_an_iteration_without_choices_is_forgotten():
    idle = jnp.stack([LOADS[0], jnp.zeros_like(LOADS[0]), LOADS[1]])
    seen = told(AVERAGE, idle)
    np.testing.assert_array_equal(seen[1], jnp.zeros_like(LOADS[0]))
    np.testing.assert_allclose(seen[2], told(AVERAGE, LOADS)[1])


def test_rows_are_those_of_the_fitted_heatmap():
    experts = np.array([[[0], [1]], [[0], [1]], [[1], [0]], [[0], [0]]], np.int16)
    trace = GatingTrace(experts, 2, np.arange(2), np.array([0]), None, {})
    heatmap = NextLayer.from_counts(count_pairs(trace), prior=1.0)
    forecast = CrossLayer.from_heatmap(heatmap, StaticForecast(full((2, 2), 0.5)))
    # Of the three that chose 0, two went on to 1; layer 1 is [1/2, 1/2] in all, which counts as one more choice.
    np.testing.assert_allclose(forecast.rows[1], [[1.5 / 4, 2.5 / 4], [1.5 / 2, 0.5 / 2]])
    seen = told(forecast, floats([[[4.0, 0], [0, 0]]]))
    np.testing.assert_allclose(seen[0, 1], [1.5, 2.5])
