"""Latency of what a policy decided, by the model that judges placements."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.latency import LayerLatency, LayerModel
from jaxmoe.network import Visits, sharded_visits
from jaxmoe.policies.dispatch import PLACED, keep
from jaxmoe.relax import HardSupport
from jaxmoe.traces.batches import Batch


def decided_visits(share: Float[Array, "expert node"], batch: Batch, served: Int[Array, "token top_k"]) -> Visits:
    """Visits of a sharded placement where some choices are served whole at one node.

    A token whose gather slot is served so has that node for its home.
    """
    placed = sharded_visits(share, keep(batch, served == PLACED), HardSupport())
    at = jax.nn.one_hot(served, share.shape[1], dtype=share.dtype)  # [token, top_k, node]
    gather = jnp.take_along_axis(at, batch.gather_slot[:, None, None], axis=1)[:, 0]
    return Visits(
        visited=jnp.maximum(placed.visited, at.max(axis=1)),
        named=jnp.concatenate([placed.named, gather], axis=1),
        home=jnp.concatenate([placed.home, jnp.eye(share.shape[1], dtype=share.dtype)]),
        work=placed.work + (batch.weight[:, None] * at.sum(axis=1)).sum(axis=0),
        weight=batch.weight,
    )


def decided_latency(
    model: LayerModel, share: Float[Array, "expert node"], batch: Batch, served: Int[Array, "token top_k"]
) -> LayerLatency:
    """Latency of one layer and batch, exact. A node reads a broadcast expert whole if it serves any token of it."""
    placed = model.experts_read(share, keep(batch, served == PLACED), HardSupport())
    # Choices as placed have no cell, and so are dropped.
    node = jnp.where(served == PLACED, share.shape[1], served)
    tokens = jnp.zeros_like(share).at[batch.experts, node].add(batch.weight[:, None], mode="drop")
    whole = jnp.minimum(tokens, 1).sum(axis=0)
    return model.of_visits(decided_visits(share, batch, served), placed + whole)


@eqx.filter_jit
def decided_latencies(
    model: LayerModel,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    served: Int[Array, "layer batch token top_k"],
) -> LayerLatency:
    """Latencies [layer, batch] of what `replay` decided for batches whose leaves are [layer, batch, ...]."""

    def layer(share: Float[Array, "expert node"], batches: Batch, served: Int[Array, "batch token k"]) -> LayerLatency:
        return jax.vmap(lambda batch, served: decided_latency(model, share, batch, served))(batches, served)

    return jax.lax.map(lambda given: layer(*given), (share, batches, served))
