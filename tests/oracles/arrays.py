"""Arrays that tests set up, made by NumPy: JAX would compile each of them for every new shape."""

import jax
import numpy as np


def floats(numbers) -> jax.Array:
    """Numbers in the precision that JAX computes in. Unlike by `jnp.asarray` nothing is compiled for a new shape."""
    return jax.device_put(np.array(numbers, float))


def full(shape: int | tuple[int, ...], number: float) -> jax.Array:
    """The same number everywhere."""
    return floats(np.full(shape, number))
