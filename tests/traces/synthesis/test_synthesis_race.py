"""That the first arrivals of a race are draws without replacement whose weights change with every choice."""

import jax
import numpy as np
import pytest
from oracles import synthesis as oracle
from oracles.arrays import full

from jaxmoe.traces.synthesis.sampling import race

LANES = 100_000
NO_LIMIT = (1, 1)
run = jax.jit(race, static_argnums=2)


def drawn(weights, together, top_k, groups=NO_LIMIT, lanes=LANES, seed=0):
    """Choices int [lane, top_k] of lanes with these log-weights, [expert] or [lane, expert]."""
    times = np.random.default_rng(seed).exponential(size=(lanes, np.shape(weights)[-1]))
    arrival = np.asarray(times * np.exp(-weights), np.float32)
    return np.asarray(run(arrival, np.asarray(np.exp(-together), np.float32), (top_k, *groups))[0])


def all_different(chosen):
    ordered = np.sort(chosen, axis=1)
    return bool((ordered[:, 1:] > ordered[:, :-1]).all() and ordered[:, 0].min() >= 0)


def assert_frequencies(chosen, expected):
    """Every order is as frequent as expected, within five standard errors of a binomial."""
    assert sum(expected.values()) == pytest.approx(1)
    for order, probability in expected.items():
        measured = (chosen == order).all(axis=1).mean()
        error = np.sqrt(probability * (1 - probability) / len(chosen))
        assert measured == pytest.approx(probability, abs=5 * error + 1e-12), order


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_orders_have_their_exact_probabilities(top_k):
    rng = np.random.default_rng(top_k)
    weights, together = rng.standard_normal(4), rng.standard_normal((4, 4))
    assert_frequencies(drawn(weights, together, top_k), oracle.orders(weights, together, top_k))


def test_all_experts_can_be_chosen():
    rng = np.random.default_rng(0)
    weights, together = rng.standard_normal(3), rng.standard_normal((3, 3))
    assert_frequencies(drawn(weights, together, 3), oracle.orders(weights, together, 3))


def test_extreme_log_weights_stay_legal():
    rng = np.random.default_rng(1)
    weights, together = rng.choice([-30.0, 0.0, 30.0], (500, 6)), rng.choice([-30.0, 0.0, 30.0], (6, 6))
    assert all_different(drawn(weights, together, 6, lanes=500))


def test_dead_heats_lose_nobody():
    assert all_different(np.asarray(run(full((2, 5), 0.25), full((5, 5), 1.0), (5, *NO_LIMIT))[0]))


def test_groups_have_their_exact_probabilities():
    weights = np.random.default_rng(2).standard_normal(6)
    chosen = drawn(weights, np.zeros((6, 6)), 3, groups=(3, 2))
    assert_frequencies(chosen, oracle.orders_within_groups(weights, 3, 3, 2))


@pytest.mark.parametrize(("groups", "allowed"), [(4, 1), (4, 2), (2, 1)])
def test_no_more_groups_than_allowed(groups, allowed):
    rng = np.random.default_rng(groups)
    together = rng.standard_normal((12, 12))
    chosen = drawn(np.zeros(12), together, 3, groups=(groups, allowed), lanes=20_000)
    used = (chosen[:, :, None] // (12 // groups) == np.arange(groups)).any(axis=1).sum(axis=1)
    assert used.max() == allowed
    assert all_different(chosen)


def test_groups_that_tie_are_not_all_open():
    chosen = np.asarray(run(full((1, 8), 0.25), full((8, 8), 1.0), (4, 4, 2))[0])
    assert len(set((chosen[0] // 2).tolist())) == 2


def test_all_groups_are_no_limit():
    rng = np.random.default_rng(3)
    weights, together = rng.standard_normal(6), rng.standard_normal((6, 6))
    free = drawn(weights, together, 2, lanes=1000)
    np.testing.assert_array_equal(drawn(weights, together, 2, groups=(3, 3), lanes=1000), free)
