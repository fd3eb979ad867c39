"""One die (tile) of the machine: how fast it computes, how fast and how much it remembers."""

import equinox as eqx
from jaxtyping import Array, Float


class Die(eqx.Module):
    """Compute and memory of the nodes. Each number is per node, so nodes may differ.

    A limit that the platform does not have is `None`: the code that would use it is then left out.
    """

    flops: Float[Array, " node"]  # achievable FLOP/s
    memory_bandwidth: Float[Array, " node"] | None = None  # B/s
    memory_capacity: Float[Array, " node"] | None = None  # B
