"""Batches of tokens drawn from a trace, as arrays for the model and the event simulator alike."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.traces.trace import GatingTrace, TraceError


class Batch(eqx.Module):
    """The gating of one layer for one batch, with every random choice already drawn.

    `weight` counts how often a row occurs, so equal tokens may be merged. Leading axes (layers, batches)
    are added by stacking and removed by `vmap`.
    """

    experts: Int[Array, "*lead token top_k"]  # -1: no expert
    gather_slot: Int[Array, "*lead token"]  # which of the token's experts names its gather node
    draw: Float[Array, "*lead token top_k"]  # in [0, 1): picks a replica
    weight: Float[Array, "*lead token"]

    @property
    def gather_expert(self) -> Int[Array, "*lead token"]:
        return jnp.take_along_axis(self.experts, self.gather_slot[..., None], axis=-1)[..., 0]

    def choices(self, num_experts: int) -> Float[Array, "*lead token expert"]:
        """How often each token chose each expert: 0 or 1."""
        return jax.nn.one_hot(self.experts, num_experts, dtype=self.weight.dtype).sum(axis=-2)


def sample_batches(trace: GatingTrace, tokens: int, batches: int, seed: int, consecutive: bool = False) -> Batch:
    """Draw batches from the whole trace: every leaf is [layer, batch, token, ...].

    A batch is `tokens` different tokens in random order, or a run of consecutive ones. All layers of a batch
    have the same tokens; gather slots and replica draws are independent. The same seed gives the same batches.
    """
    if tokens > trace.num_tokens:
        raise TraceError(
            f"a batch of {tokens} tokens cannot be drawn from a trace of {trace.num_tokens}; use a smaller batch"
        )
    rng = np.random.default_rng(seed)
    if consecutive:
        starts = rng.integers(trace.num_tokens - tokens + 1, size=batches)
        picked = starts[:, None] + np.arange(tokens)
    else:
        picked = np.stack([rng.choice(trace.num_tokens, tokens, replace=False) for _ in range(batches)])
    experts = np.moveaxis(trace.experts[picked], 2, 0).astype(np.int32)  # [layer, batch, token, top_k]
    return Batch(
        experts=jnp.asarray(experts),
        gather_slot=jnp.asarray(rng.integers(trace.top_k, size=experts.shape[:3]), jnp.int32),
        draw=jnp.asarray(rng.random(experts.shape, dtype=np.float32)),
        weight=jnp.ones(experts.shape[:3], jnp.float32),
    )
