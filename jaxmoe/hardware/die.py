"""One die (tile) of the machine: how fast it computes."""

import equinox as eqx
from jaxtyping import Array, Float

from jaxmoe.hardware.gemm import AbstractGemm


class Die(eqx.Module):
    """Compute of the nodes. Each number is per node, so nodes may differ.

    Without `gemm` every product runs at the full rate, whatever its shape.
    """

    flops: Float[Array, " node"]  # achievable FLOP/s
    gemm: AbstractGemm | None = None
