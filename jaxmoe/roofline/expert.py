"""Time of the expert FFNs of one layer on every node."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.die import Die


def expert_node_times(
    die: Die,
    work: Float[Array, " node"],
    flops_per_token_expert: Float[Array, ""],
    bytes_moved: Float[Array, " node"],
) -> Float[Array, " node"]:
    """Seconds each node needs: the larger of FLOPs over rate and bytes over memory bandwidth.

    `work` in token-expert products (hd_moe Eq. 1), `bytes_moved` in B between memory and compute.
    """
    compute = work * flops_per_token_expert / die.flops
    if die.memory_bandwidth is None:
        return compute
    return jnp.maximum(compute, bytes_moved / die.memory_bandwidth)
