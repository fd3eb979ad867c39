"""Derivatives against central differences."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


def check_slopes(times: Callable[[dict], jax.Array], numbers: dict[str, jax.Array]) -> list[set[str]]:
    """Compare derivatives of `times` with central differences; returns the numbers that each time depends on.

    Derivatives are by the logarithm of every number, so all are in seconds. Needs double precision.
    """
    point, unravel = ravel_pytree(numbers)

    def scaled(exponent):
        return times(unravel(point * jnp.exp(exponent)))

    step = 1e-5 * jnp.eye(point.size)
    slopes = jax.jit(jax.jacrev(scaled))(jnp.zeros_like(point))
    ahead, behind = jnp.split(jax.jit(jax.vmap(scaled))(jnp.concatenate([step, -step])), 2)
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose(slopes, (ahead - behind).T / 2e-5, rtol=1e-5, atol=1e-8 * float(ahead.max()))
    return [{name for name, slope in unravel(row).items() if (slope != 0).any()} for row in slopes]
