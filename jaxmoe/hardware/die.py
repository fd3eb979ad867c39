"""One die (tile) of the machine: how fast it computes."""

import equinox as eqx
from jaxtyping import Array, Float


class Die(eqx.Module):
    """Compute of the nodes. Each number is per node, so nodes may differ."""

    flops: Float[Array, " node"]  # achievable FLOP/s
