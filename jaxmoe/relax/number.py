"""Numbers that a compiled function takes as arguments."""

import jax.numpy as jnp
from jaxtyping import Array


def as_number(value: Array | float) -> Array:
    """A Python float as a 0-d array of the default precision; arrays as they are.

    Equinox compiles a module's floats into a function, and would compile it anew for each value. Use it as
    `eqx.field(converter=...)`. The array promotes as a float does.
    """
    return jnp.asarray(value) if isinstance(value, float) else value
