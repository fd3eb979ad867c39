"""The largest of many numbers, exactly or smoothly."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.relax.number import as_number


class AbstractReduction(eqx.Module):
    """Reduces the last axis to its largest value or to a smooth bound of it."""

    @abc.abstractmethod
    def __call__(self, values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
        """Reduce non-negative `values`; the result has their unit."""


class HardMax(AbstractReduction):
    """The maximum itself."""

    def __call__(self, values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
        return jnp.max(values, axis=-1, initial=0)


class SmoothMax(AbstractReduction):
    """Log-sum-exp at a temperature relative to the largest value.

    With t = temperature * max, max <= t * logsumexp(values / t) <= max * (1 + temperature * log(items)),
    so the value tends to the maximum linearly in the temperature. Zeros reduce to 0.
    """

    temperature: Float[Array, ""] = eqx.field(converter=as_number)

    def __call__(self, values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
        largest = jnp.max(values, axis=-1, keepdims=True, initial=0)
        busy = largest > 0
        scale = self.temperature * jnp.where(busy, largest, 1)
        smooth = scale * jax.nn.logsumexp(values / scale, axis=-1, keepdims=True)
        return jnp.where(busy, smooth, 0)[..., 0]
