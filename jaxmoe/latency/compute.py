"""How long nodes compute: FLOPs over rate, GEMM by GEMM where the die says how well it does them, and memory."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import Machine
from jaxmoe.network import Visits
from jaxmoe.relax import AbstractSupport


def roofline(
    machine: Machine,
    seconds: Float[Array, " node"],
    weights: Float[Array, " node"],
    vectors: Float[Array, " node"],
) -> Float[Array, " node"]:
    """The larger of the seconds of compute and those of memory, for every node (hd_moe Eq. 1 knows compute alone).

    `weights`, B, pass every memory level on their way to the die, `vectors`, B, the nearest alone. A node waits for all
    that its channel moves, for whichever node.
    """
    for depth, level in enumerate(machine.memory):
        moved = weights + vectors if depth == 0 else weights
        seconds = jnp.maximum(seconds, level.seconds(moved)[level.channel])
    return seconds


def expert_seconds(
    machine: Machine,
    visits: Visits,
    flops_per_token_expert: Float[Array, ""],
    columns: Float[Array, ""],
    gemms: Float[Array, ""],
    support: AbstractSupport,
) -> Float[Array, " node"]:
    """Seconds that every node multiplies matrices for the experts of a batch (hd_moe Eq. 1)."""
    flops = machine.die.flops
    if machine.die.gemm is None:
        return visits.work * flops_per_token_expert / flops
    present = support.presence(support.amount(visits.part)) * jnp.minimum(visits.rows, 1)
    each = machine.die.gemm.seconds(visits.rows, visits.part, present, flops / flops_per_token_expert, columns, gemms)
    return each.sum(axis=0)
