"""What a tuner is asked: which machine, which tokens, and what a plan must respect."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.latency import LayerModel
from jaxmoe.placement import PlanError
from jaxmoe.traces import Batch, GatingTrace, sample_batches


@dataclass(frozen=True)
class PlacementProblem:
    """Place the experts of every layer of `trace` on the machine of `model`.

    Time of a layer is the mean over batches of `batch_tokens` tokens drawn from the trace, mixed with the
    95th percentile by `p95_weight`. A node's memory is divided evenly among the layers. Where `batches` are given,
    leaves [layer, batch, ...], these alone count, in place of the drawn ones.
    """

    model: LayerModel
    trace: GatingTrace
    batch_tokens: int
    consecutive: bool = False
    p95_weight: float = 0.0
    batches: Batch | None = None

    def __post_init__(self) -> None:
        room, needed = self.room.sum(), self.trace.num_experts
        if room < needed * (1 - 1e-6):  # capacities are float32
            raise PlanError(
                f"the experts of a layer need {needed} times an expert's memory, all nodes together have room for "
                f"{room:.4g}; raise the memory capacity, or use more nodes or fewer layers"
            )

    @property
    def num_nodes(self) -> int:
        return self.model.machine.topology.num_nodes

    @cached_property
    def room(self) -> np.ndarray:
        """Experts of one layer that fit each node, float [node]; infinite without a memory limit."""
        capacity = self.model.machine.capacity
        if capacity is None:
            return np.full(self.num_nodes, np.inf)
        return np.asarray(capacity, float) / float(self.model.expert_bytes) / len(self.trace.layer_ids)

    @cached_property
    def frequency(self) -> np.ndarray:
        """How much of a layer's work each expert is, float [layer, expert]; rows sum to 1.

        Experts that the trace never chose count as chosen a tenth of a time: they need a place too.
        """
        experts = self.trace.num_experts
        chosen = np.moveaxis(self.trace.experts, 1, 0) if self.batches is None else np.asarray(self.batches.experts)
        count = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in chosen])
        smoothed = np.maximum(count, 0.1)
        return smoothed / smoothed.sum(axis=1, keepdims=True)

    def draw(self, batches: int, seed: int) -> Batch:
        """So many fresh batches, leaves [layer, batch, ...]; given ones come round and round."""
        if self.batches is not None:
            order = np.arange(batches) % self.batches.weight.shape[1]
            return jax.tree.map(lambda leaf: leaf[:, order], self.batches)
        return sample_batches(self.trace, self.batch_tokens, batches, seed, self.consecutive)


def objective(seconds: Float[Array, "*lead batch"], p95_weight: Float[Array, ""] | float) -> Float[Array, "*lead"]:
    """What is minimised, s: the mean over batches, mixed with their 95th percentile by its weight."""
    mean = jnp.mean(seconds, axis=-1)
    return mean + p95_weight * (jnp.quantile(seconds, 0.95, axis=-1) - mean)
