"""Judging placements on many batches: seconds of every layer and batch, and how busy resources are on average."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.latency.demand import Decisions
from jaxmoe.latency.layer import LayerModel
from jaxmoe.latency.time import LayerTime
from jaxmoe.network import AbstractExchange
from jaxmoe.traces.batches import Batch


@eqx.filter_jit
def evaluate(
    model: LayerModel,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange | None = None,
    served: Int[Array, "layer batch token top_k"] | None = None,
) -> LayerTime:
    """Exact times of a placement, on batches whose leaves are [layer, batch, ...]; `served` is as in `Decisions`.

    Stages and totals are [layer, batch], busy times [layer, resource], means over batches.
    """

    def layer(share: Float[Array, "expert node"], batches: Batch, served: Array | None) -> LayerTime:
        def one(batch: Batch, served: Array | None) -> LayerTime:
            return model.decided(Decisions(share, exchange, served), batch)

        times = jax.vmap(one)(batches, served)
        return eqx.tree_at(lambda t: t.busy, times, jax.tree.map(lambda leaf: leaf.mean(axis=0), times.busy))

    return jax.lax.map(lambda given: layer(*given), (share, batches, served))


def is_tensor_parallel(share: np.ndarray) -> bool:
    """Whether every expert is spread evenly over the whole machine, so that a ring can reduce (hd_moe Eq. 4)."""
    return bool(np.allclose(share, 1 / share.shape[-1], rtol=1e-4))
