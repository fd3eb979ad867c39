"""Time of the expert FFNs of one layer on every node."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.machine import Machine


def expert_node_times(
    machine: Machine,
    work: Float[Array, " node"],
    flops_per_token_expert: Float[Array, ""],
    bytes_moved: Float[Array, " node"],
) -> Float[Array, " node"]:
    """Seconds each node needs: the larger of FLOPs over rate and bytes over memory bandwidth.

    `work` in token-expert products (hd_moe Eq. 1), `bytes_moved` in B between memory and compute.
    """
    compute = work * flops_per_token_expert / machine.die.flops
    for level in machine.memory:
        compute = jnp.maximum(compute, level.seconds(bytes_moved)[level.channel])
    return compute
