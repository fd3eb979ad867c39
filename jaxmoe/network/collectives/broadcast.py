"""The pre-broadcast of an expert in chunks, as hd_moe IV-D2 has it: Eq. 14 to 18."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float


def _number(value: Float[Array, ""] | float) -> Float[Array, ""]:
    return jnp.asarray(value, float)


class ChunkedBroadcast(eqx.Module):
    """An expert of hidden x intermediate elements, sent to all of D nodes in chunks of c elements.

    `alpha` is the latency of a chunk and hop, s; `beta` is s per element; a chunk takes alpha + beta c for a hop.
    Chunks follow each other over 2 sqrt(D) hops, the way across a square mesh: all in all 2 sqrt(D) +
    hidden intermediate / c such times. A pipeline over that many hops takes one less, and the mesh is but
    2 (sqrt(D) - 1) hops wide, so Eq. 16 is three times of a chunk above the exact one.

    `iterations` is k, how many experts are broadcast within the runtime window. It stands in Eq. 17 and 18 but not
    in Eq. 14 and 15. Both are the least value of Eq. 16 and its place if beta k stands for beta in Eq. 15, as if k
    broadcasts shared every link while their latencies overlapped; so it is taken here. (Experts in one stream, with
    k hidden intermediate in both equations, have the time of Eq. 17 too, but their best chunk is k times that of
    Eq. 18.) With k = 1 all agree as printed. The paper counts hidden x intermediate elements of an expert, where a
    gated one has three times as many.
    """

    alpha: Float[Array, ""] = eqx.field(converter=_number)
    beta: Float[Array, ""] = eqx.field(converter=_number)
    nodes: Float[Array, ""] = eqx.field(converter=_number)
    hidden: Float[Array, ""] = eqx.field(converter=_number)
    intermediate: Float[Array, ""] = eqx.field(converter=_number)
    iterations: Float[Array, ""] = eqx.field(default=1.0, converter=_number)

    def latency(self, chunk: Float[Array, "*chunks"]) -> Float[Array, "*chunks"]:
        """Eq. 14, s, of chunks of so many elements."""
        return self.alpha * (2 * jnp.sqrt(self.nodes) + self._elements() / chunk)

    def bandwidth(self, chunk: Float[Array, "*chunks"]) -> Float[Array, "*chunks"]:
        """Eq. 15 with k, s."""
        return self.beta * self.iterations * (self._elements() + 2 * chunk * jnp.sqrt(self.nodes))

    def time(self, chunk: Float[Array, "*chunks"]) -> Float[Array, "*chunks"]:
        """Eq. 16, s."""
        return self.latency(chunk) + self.bandwidth(chunk)

    def least_time(self) -> Float[Array, ""]:
        """Eq. 17, s."""
        root, slow = jnp.sqrt(self.nodes), self.beta * self.iterations
        shared = jnp.sqrt(2 * root * slow * self.alpha * self._elements())
        return self._elements() * slow + 2 * self.alpha * root + 2 * shared

    def best_chunk(self) -> Float[Array, ""]:
        """Eq. 18, elements."""
        return jnp.sqrt(self.alpha * self._elements() / (2 * self.beta * self.iterations * jnp.sqrt(self.nodes)))

    def _elements(self) -> Float[Array, ""]:
        return self.hidden * self.intermediate
