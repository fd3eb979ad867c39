"""A kernel of a GPU as few numbers: seconds of its launches by what they move, the tiles they fill and their waves.

A base time with numbers of a meaning,

    launch + ((sum of moved bytes / achieved bandwidth)^p + (least over tile candidates of tiles + waves)^p)^(1/p),

and, where it pays on shapes that were left out, a learned residual over the logarithms of the same terms. The residual
is monotone: no term that grows with tokens can make a kernel faster, so more tokens of one distribution are never
cheaper.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KEPT = 0.25  # of the base's logarithm, beside the residual, which may thus fall as the base rises
LEAST = 1e-9  # s, below which a term tells nothing
SHARPNESS = (1.0, 8.0)  # of the overlap of memory and compute: one after the other, and the longer of both


class Terms(NamedTuple):
    """Launches of a kernel at the rates of a data sheet. All but `shape` grow with tokens, or stay.

    `memory`: seconds of each kind of bytes; `tiles`, `waves`: for each tile that a library may choose, seconds of
    whole tiles at the peak rate, and rounds of tiles over the processors; `sizes`: logarithms of counts; `shape`:
    logarithms of what stays as tokens grow.
    """

    memory: Any  # [row, byte]: arrays of JAX, or of NumPy where rows are kept
    tiles: Any  # [row, tile]
    waves: Any  # [row, tile]
    sizes: Any  # [row, size]
    shape: Any  # [row, shape]

    @property
    def roofline(self) -> Float[Array, "*row"]:
        """Seconds at the data sheet's rates: the longer of all bytes and of the fewest tiles."""
        return jnp.maximum(self.memory.sum(-1), self.tiles.min(-1))


class Base(eqx.Module):
    """The numbers with a meaning, as logarithms.

    `launch` and `wave` are seconds, `moved` and `filled` how many times as long as on the data sheet bytes and tiles
    take, and `overlap` turns from adding memory and compute up to the longer of both.
    """

    launch: Float[Array, ""]
    moved: Float[Array, " byte"]
    filled: Float[Array, " tile"]
    wave: Float[Array, " tile"]
    overlap: Float[Array, ""]

    def seconds(self, terms: Terms) -> Float[Array, "*row"]:
        memory = (jnp.exp(self.moved) * terms.memory).sum(-1)
        compute = (jnp.exp(self.filled) * terms.tiles + jnp.exp(self.wave) * terms.waves).min(-1)
        power = SHARPNESS[0] + (SHARPNESS[1] - SHARPNESS[0]) * jax.nn.sigmoid(self.overlap)
        longer, shorter = jnp.maximum(memory, compute), jnp.minimum(memory, compute)
        return jnp.exp(self.launch) + longer * (1 + (shorter / longer) ** power) ** (1 / power)


class Residual(eqx.Module):
    """The rest of a kernel's logarithm of time: two layers whose weights on rising inputs are not negative.

    Inputs are `rising` and `shape`; `direct` passes the rising ones to the output as well.
    """

    rising: Float[Array, "first rising"]  # squared: weights
    shape: Float[Array, "first shape"]
    first: Float[Array, " first"]
    joined: Float[Array, "second first"]  # squared
    again: Float[Array, "second shape"]
    second: Float[Array, " second"]
    out: Float[Array, " second"]  # squared
    direct: Float[Array, " rising"]  # squared
    linear: Float[Array, " shape"]
    bias: Float[Array, ""]

    def __call__(self, rising: Float[Array, "*row rising"], shape: Float[Array, "*#row shape"]) -> Float[Array, "*row"]:
        first = jnp.tanh(rising @ (self.rising**2).T + shape @ self.shape.T + self.first)
        second = jnp.tanh(first @ (self.joined**2).T + shape @ self.again.T + self.second)
        return second @ self.out**2 + rising @ self.direct**2 + shape @ self.linear + self.bias


class Reach(eqx.Module):
    """How far a residual went from the base on the rows it was fitted to, as logarithms: never further elsewhere."""

    low: Float[Array, ""]
    high: Float[Array, ""]


class FittedKernel(eqx.Module):
    """Seconds of a kernel: its base and, unless it is `None`, its residual, within its reach."""

    base: Base
    residual: Residual | None = None
    reach: Reach | None = None

    def seconds(self, terms: Terms) -> Float[Array, "*row"]:
        """Seconds of each launch; `terms` have any leading axes."""
        base = self.base.seconds(terms)
        if self.residual is None:
            return base
        log = jnp.log(base)
        whole = KEPT * log + self.residual(rising_inputs(terms, log), terms.shape)
        if self.reach is not None:
            whole = jnp.clip(whole, log + self.reach.low, log + self.reach.high)
        return jnp.exp(whole)


def rising_inputs(terms: Terms, log: Float[Array, "*row"]) -> Float[Array, "*row rising"]:
    """The inputs of the residual from terms that grow with tokens, beside the logarithm of the base."""
    logs = (jnp.log(terms.memory + LEAST), jnp.log(terms.tiles + LEAST), jnp.log(terms.waves + 0.1), terms.sizes)
    return jnp.concatenate([log[..., None], *logs], axis=-1)
