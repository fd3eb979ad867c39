"""Where the tokens of broadcast experts go: the communication-efficient dispatch of hd_moe IV-D3."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.network import PLACED, kept, sharded_visits
from jaxmoe.relax import HardSupport
from jaxmoe.traces.batches import Batch
from jaxmoe.traces.trace import MISSING


def serve(
    share: Float[Array, "expert node"],
    batch: Batch,
    broadcast: Bool[Array, " expert"],
    seconds_each: Float[Array, " node"],
) -> Int[Array, "token top_k"]:
    """Node that serves each choice of a broadcast expert; -1 for all others.

    A token is served at a host of any of its experts, so it visits no node that it does not visit without the
    policy. Of these nodes the one with the least to do takes it, in seconds, the lowest-numbered of equals. At first
    nodes have the work of all experts that are not broadcast; tokens then come in their order, and each token's
    choices in theirs. `seconds_each` is what a node takes for one choice. Shares are of sharded placements; a row of
    weight w counts as w tokens served together.
    """
    moved = broadcast[batch.experts] & (batch.experts != MISSING)
    placed = sharded_visits(share, kept(batch, ~moved), HardSupport())
    candidates = sharded_visits(share, batch, HardSupport()).visited > 0
    nodes = jnp.arange(share.shape[1])

    def token(work: Float[Array, " node"], given: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        candidates, moved, weight = given

        def choice(work: Float[Array, " node"], moved: Bool[Array, ""]) -> tuple[Array, Array]:
            node = jnp.argmin(jnp.where(candidates, work * seconds_each, jnp.inf))
            return work + weight * (moved & (nodes == node)), jnp.where(moved, node, PLACED)

        return jax.lax.scan(choice, work, moved, unroll=True)

    return jax.lax.scan(token, placed.work, (candidates, moved, batch.weight))[1]
