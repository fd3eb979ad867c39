"""Judging a placement on many batches: mean, tail and bottleneck of every layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.latency.layer import LayerLatency, LayerModel
from jaxmoe.network import AbstractExchange
from jaxmoe.traces.batches import Batch


class Judgement(eqx.Module):
    """Seconds of every layer and batch, and how busy nodes and links are on average."""

    compute: Float[Array, "layer batch"]
    dispatch: Float[Array, "layer batch"]
    combine: Float[Array, "layer batch"]
    total: Float[Array, "layer batch"]
    node_time: Float[Array, "layer node"]  # mean over batches
    dispatch_link_time: Float[Array, "layer link"]
    combine_link_time: Float[Array, "layer link"]

    @property
    def p95_total(self) -> Float[Array, " layer"]:
        """95th percentile over batches of the layer's time, s."""
        return jnp.quantile(self.total, 0.95, axis=1)


@eqx.filter_jit
def judge(
    model: LayerModel,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange | None = None,
) -> Judgement:
    """Score a placement exactly, on batches whose leaves are [layer, batch, ...]."""

    def layer(share: Float[Array, "expert node"], batches: Batch) -> LayerLatency:
        return jax.vmap(lambda batch: model(share, batch, exchange))(batches)

    latency = jax.lax.map(lambda both: layer(*both), (share, batches))
    return Judgement(
        compute=latency.compute,
        dispatch=latency.dispatch,
        combine=latency.combine,
        total=latency.total,
        node_time=latency.node_time.mean(axis=1),
        dispatch_link_time=latency.dispatch_link_time.mean(axis=1),
        combine_link_time=latency.combine_link_time.mean(axis=1),
    )


def is_tensor_parallel(share: np.ndarray) -> bool:
    """Whether every expert is spread evenly over the whole mesh, so that a ring can reduce (hd_moe Eq. 4)."""
    return bool(np.allclose(share, 1 / share.shape[-1], rtol=1e-4))
