"""Which experts to broadcast ahead of a layer: hd_moe IV-D1."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def choose_experts(
    share: Float[Array, "expert node"],
    forecast: Float[Array, " expert"],
    seconds_each: Float[Array, " node"],
    allowed: Int[Array, ""],
    limit: int,
) -> Bool[Array, " expert"]:
    """Mark experts, one after the other: on the most congested node, the one with the highest priority (Eq. 13).

    `forecast` is in tokens, `seconds_each` what a node takes for one of them, so that 2 h IS / comp of the paper is
    one number per node. At most `allowed` experts are marked, and at most `limit`, which is static. Nodes and
    experts of lower numbers come first among equals. No expert is marked that is not expected to do any work.

    A broadcast expert is taken to add the same seconds to every node: dispatch sends its tokens where there is least
    to do, and at best makes all nodes end together. So the most congested node is that of the most work still placed.
    """
    priority = share * forecast[:, None] * seconds_each

    def mark(broadcast: Bool[Array, " expert"], turn: Int[Array, ""]) -> tuple[Bool[Array, " expert"], None]:
        placed = jnp.where(broadcast[:, None], 0, priority)
        on_busiest = placed[:, jnp.argmax(placed.sum(axis=0))]
        best = jnp.argmax(on_busiest)
        useful = (turn < allowed) & (on_busiest[best] > 0)
        return broadcast | (useful & (jnp.arange(forecast.size) == best)), None

    return jax.lax.scan(mark, jnp.zeros(forecast.shape, bool), jnp.arange(limit))[0]
