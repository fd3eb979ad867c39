"""Whether a share counts as present, exactly or smoothly, and how presences unite.

Both supports turn shares into *amounts* that add up, and sums of amounts into the presence of at least
one. Hard: amount = 1 where share > 0, presence = min(sum, 1). Soft: amount = share / width, presence =
1 - exp(-sum). As the width goes to 0 the soft presence goes to the hard one.
"""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.relax.number import as_number


class AbstractSupport(eqx.Module):
    """How shares become presence in [0, 1]."""

    @abc.abstractmethod
    def amount(self, share: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Additive amount of presence of each share."""

    @abc.abstractmethod
    def presence(self, amount: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Presence in [0, 1] of a sum of amounts."""


class HardSupport(AbstractSupport):
    """Present where the share is above zero."""

    def amount(self, share: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return (share > 0).astype(share.dtype)

    def presence(self, amount: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return jnp.minimum(amount, 1)


class SoftSupport(AbstractSupport):
    """Present to the degree 1 - exp(-share / width); the width broadcasts against the shares."""

    width: Float[Array, "..."] = eqx.field(converter=as_number)

    def amount(self, share: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return share / self.width

    def presence(self, amount: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return -jnp.expm1(-amount)
