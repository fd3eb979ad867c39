"""Running sums by triangular products: several times faster than `jnp.cumsum` on CPUs."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

WHOLE = 64  # positions up to which one product is faster than two smaller ones


def prefix_sums(values: Float[Array, "*lead position"]) -> Float[Array, "*lead position"]:
    """Sums of the last axis up to and with each position: within blocks, plus all blocks before."""
    size = values.shape[-1]
    block = max(part for part in range(1, math.isqrt(size) + 1) if size % part == 0)
    if size == 1:
        return values
    if size <= WHOLE or block == 1:  # a prime number of positions has no blocks
        return values @ _triangle(size, 0, values.dtype)
    parts = values.reshape(*values.shape[:-1], size // block, block)
    within = parts @ _triangle(block, 0, values.dtype)
    before = within[..., -1] @ _triangle(size // block, 1, values.dtype)
    return (within + before[..., None]).reshape(values.shape)


def _triangle(size: int, diagonal: int, dtype: jnp.dtype) -> Float[Array, "position position"]:
    """Ones above a diagonal."""
    return jnp.asarray(np.triu(np.ones((size, size)), diagonal), dtype)
