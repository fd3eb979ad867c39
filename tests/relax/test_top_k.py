"""Relaxed Top-K: its sum, its limit, and its derivative against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe import relax
from jaxmoe.relax import straight_through

seeds = st.integers(0, 2**31)
counts = st.sampled_from([1, 2, 5, 8, 14, 15])  # of 16: each is compiled once
soft_top_k = jax.jit(relax.soft_top_k, static_argnums=1)


def values(seed: int, rows: int = 5, items: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, items))


@settings(deadline=None, max_examples=20)
@given(seeds, counts, st.floats(0.01, 3.0))
def test_parts_sum_to_k(seed, k, temperature):
    part = np.asarray(soft_top_k(jnp.asarray(values(seed), jnp.float32), k, temperature))
    np.testing.assert_allclose(part.sum(axis=-1), k, rtol=1e-3)
    assert float(part.min()) >= 0
    assert float(part.max()) <= 1


@settings(deadline=None, max_examples=20)
@given(seeds, counts)
def test_without_temperature_it_is_top_k(seed, k):
    given = values(seed)
    exact = np.zeros_like(given)
    np.put_along_axis(exact, np.argsort(-given, axis=1)[:, :k], 1, axis=1)
    ordered = np.sort(given, axis=1)
    gap = (ordered[:, -k] - ordered[:, -k - 1]).min()
    part = soft_top_k(jnp.asarray(given, jnp.float32), k, max(gap, 1e-5) / 20)
    np.testing.assert_allclose(part, exact, atol=1e-3 if gap > 1e-4 else 1)


def test_all_items_are_among_as_many():
    np.testing.assert_allclose(soft_top_k(jnp.asarray(values(0, items=4), jnp.float32), 4, 0.1), 1)


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_the_derivative_is_that_of_finite_differences(temperature):
    with jax.enable_x64(True):
        given, direction = jnp.asarray(values(3)), jnp.asarray(values(4))
        value = jnp.asarray(values(5))

        @jax.jit
        def objective(step):
            return (value * soft_top_k(given + step * direction, 4, temperature)).sum()

        found = jax.grad(objective)(0.0)
        expected = (objective(1e-5) - objective(-1e-5)) / 2e-5
        # What bisection leaves of the threshold's error, one Newton step takes away from the value, not from the slope.
        assert float(found) == pytest.approx(float(expected), rel=1e-3)


def test_straight_through_is_exact_with_a_smooth_derivative():
    def of(z):
        return straight_through(jnp.round(z), z**2)

    assert float(of(jnp.asarray(1.2))) == 1.0
    assert float(jax.grad(of)(jnp.asarray(1.2))) == pytest.approx(2.4)
