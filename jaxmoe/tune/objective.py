"""Objectives over the times of batches: the mean, mixed with the 95th percentile and with the worst topic."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.compiling import SOONER
from jaxmoe.relax import AbstractReduction, HardMax, as_number


def objective(seconds: Float[Array, "*lead batch"], p95_weight: Float[Array, ""] | float) -> Float[Array, "*lead"]:
    """The mean over batches, s, mixed with their 95th percentile by its weight."""
    mean = jnp.mean(seconds, axis=-1)
    return mean + p95_weight * (jnp.quantile(seconds, 0.95, axis=-1) - mean)


class Objective(eqx.Module):
    """Objective over the times of batches that come from topics in turn: batch b from topic b modulo `topics`.

    Each topic counts with its `objective`, however many batches it has. Their mean is mixed with the worst of them by
    `worst_weight`.
    """

    p95_weight: Float[Array, ""] = eqx.field(default=0.0, converter=as_number)
    worst_weight: Float[Array, ""] = eqx.field(default=0.0, converter=as_number)
    topics: int = eqx.field(static=True, default=1)

    def __call__(
        self, seconds: Float[Array, "*lead batch"], reduction: AbstractReduction | None = None
    ) -> Float[Array, "*lead"]:
        """The objective, s. The worst topic is that of the largest one unless a `reduction` softens the maximum."""
        each = self.by_topic(seconds)
        if each.shape[-1] == 1:
            return each[..., 0]
        mean = each.mean(axis=-1)
        return mean + self.worst_weight * ((HardMax() if reduction is None else reduction)(each) - mean)

    def of(self, seconds: Float[np.ndarray, "*lead batch"]) -> Float[np.ndarray, "*lead"]:
        """The objective outside `jit`, s."""
        return np.asarray(_soon(self, jnp.asarray(seconds, jnp.float32)), float)

    def by_topic(self, seconds: Float[Array, "*lead batch"]) -> Float[Array, "*lead topic"]:
        """The objective of every topic, s; of those alone that have a batch."""
        count = min(self.topics, seconds.shape[-1])
        return jnp.stack([objective(seconds[..., t :: self.topics], self.p95_weight) for t in range(count)], axis=-1)


_soon = eqx.filter_jit(lambda aim, seconds: aim(seconds), compiler_options=SOONER)  # type: ignore[call-overload]
