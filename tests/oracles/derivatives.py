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
    sizes = [np.size(numbers[name]) for name in sorted(numbers)]
    step = 1e-5 * np.eye(sum(sizes))

    @jax.jit
    def everywhere(exponents):
        point, unravel = ravel_pytree(numbers)

        def scaled(exponent):
            found = times(unravel(point * jnp.exp(exponent)))
            return found, found

        # One point after the other, so that the function is compiled once for slopes and differences.
        return jax.lax.map(jax.jacrev(scaled, has_aux=True), exponents)

    slopes, found = map(np.asarray, everywhere(np.concatenate([0 * step[:1], step, -step])))
    slopes, (ahead, behind) = slopes[0], np.split(found[1:], 2)
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose(slopes, (ahead - behind).T / 2e-5, rtol=1e-5, atol=1e-8 * ahead.max())
    parts = [np.split(row, np.cumsum(sizes)[:-1]) for row in slopes]
    return [{name for name, part in zip(sorted(numbers), row, strict=True) if (part != 0).any()} for row in parts]
