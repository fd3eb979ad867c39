"""Running sums by two small triangular products: several times faster than `jnp.cumsum` on CPUs."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def prefix_sums(values: Float[Array, "*lead position"]) -> Float[Array, "*lead position"]:
    """Sums of the last axis up to and with each position: within blocks, plus all blocks before."""
    size = values.shape[-1]
    block = max(part for part in range(1, math.isqrt(size) + 1) if size % part == 0)
    if block == 1:  # a prime number of positions has no blocks
        return values @ jnp.asarray(np.triu(np.ones((size, size))), values.dtype) if size > 1 else values
    parts = values.reshape(*values.shape[:-1], size // block, block)
    within = parts @ jnp.asarray(np.triu(np.ones((block, block))), values.dtype)
    before = within[..., -1] @ jnp.asarray(np.triu(np.ones((size // block, size // block)), 1), values.dtype)
    return (within + before[..., None]).reshape(values.shape)
