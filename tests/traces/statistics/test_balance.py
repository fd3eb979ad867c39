"""Imbalance and camoe's metrics, by hand and against its equations as loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import traces as oracle

from jaxmoe.traces.statistics import (
    avg_layer_cv,
    avg_layer_kl,
    cv,
    even_loads,
    excess_over_mean,
    global_cv,
    global_kl,
    max_over_mean,
    mean_over_max,
)

seeds = st.integers(0, 2**32 - 1)


def random_loads(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, rng.choice([3, 10**9]), (4, 7)) + np.eye(4, 7, dtype=int)


def test_imbalance_by_hand():
    load = np.array([[1, 2, 3], [4, 4, 4]])
    assert max_over_mean(load).tolist() == [1.5, 1]
    assert mean_over_max(load).tolist() == [1 / 1.5, 1]
    assert excess_over_mean(load).tolist() == [0.5, 0]
    np.testing.assert_allclose(cv(load), [np.sqrt(2 / 3) / 2, 0])


@pytest.mark.parametrize("figure", [max_over_mean, mean_over_max, excess_over_mean, cv])
def test_no_load_has_no_imbalance(figure):
    found = figure(np.array([[0, 0], [0, 2]]))
    assert np.isnan(found).tolist() == [True, False]


@given(seeds)
def test_imbalance_is_that_of_every_layer_alone(seed):
    load = random_loads(seed)
    mean = [sum(layer) / len(layer) for layer in load.tolist()]
    expected = [max(layer) / m for layer, m in zip(load.tolist(), mean, strict=True)]
    np.testing.assert_allclose(max_over_mean(load), expected)
    np.testing.assert_allclose(mean_over_max(load), 1 / np.array(expected))
    np.testing.assert_allclose(excess_over_mean(load), np.array(expected) - 1)
    np.testing.assert_allclose(cv(load), [oracle.cv(layer) for layer in load.tolist()])


@given(seeds, st.floats(1e-9, 100))
def test_metrics_of_camoe_are_its_equations(seed, epsilon):
    base, other = random_loads(seed), random_loads(seed + 1)
    total, other_total = ([sum(column) for column in zip(*loads.tolist(), strict=True)] for loads in (base, other))
    layers = list(zip(base.tolist(), other.tolist(), strict=True))
    np.testing.assert_allclose(global_cv(base), oracle.cv(total))
    np.testing.assert_allclose(avg_layer_cv(base), sum(oracle.cv(layer) for layer in base.tolist()) / len(base))
    np.testing.assert_allclose(
        global_kl(base, other, epsilon), oracle.kl(total, other_total, epsilon), rtol=1e-9, atol=1e-12
    )
    expected = sum(oracle.kl(*layer, epsilon) for layer in layers) / len(layers)
    np.testing.assert_allclose(avg_layer_kl(base, other, epsilon), expected, rtol=1e-9, atol=1e-12)


def test_a_model_does_not_diverge_from_itself():
    load = random_loads(0)
    assert global_kl(load, load) == avg_layer_kl(load, load) == 0
    assert global_kl(load, load[:, ::-1]) > 0


@given(seeds, st.integers(0, 200), st.integers(1, 6))
def test_even_loads_have_as_many_choices_and_no_expert_twice(seed, choices, top_k):
    loads = even_loads(np.array([choices, 7]), 6, top_k, seed)
    assert loads.sum(axis=1).tolist() == [choices, 7]
    assert loads.max() <= -(-max(choices, 7) // top_k)  # a token chooses an expert once


def test_even_loads_are_spread_as_independent_choices_are():
    """The variance of one load is that of a binomial, and loads are anti-correlated as their sum is fixed."""
    loads = even_loads(np.full(20_000, 300), 6, 3, seed=0).astype(float)
    variance = 100 * 0.5 * 0.5
    np.testing.assert_allclose(loads.mean(axis=0), 50, atol=0.2)
    np.testing.assert_allclose(loads.var(axis=0), variance, rtol=0.05)
    np.testing.assert_allclose(np.cov(loads.T)[~np.eye(6, dtype=bool)], -variance / 5, rtol=0.15)


def test_where_every_expert_is_chosen_all_loads_are_equal():
    assert even_loads(np.array([40]), 4, 4, seed=1).tolist() == [[10, 10, 10, 10]]
