"""What a layer is made of whose experts are loaded anew in every iteration: its costs, its attention, its batches."""

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.engine import EvenPart, LayerTime
from jaxmoe.engine.streaming import StreamCosts
from jaxmoe.relax import HardMax
from jaxmoe.systems.setting import Setting, UnsuitableSystemError
from jaxmoe.traces import Batch


@dataclass(frozen=True)
class StreamedLayer:
    """What all runs share: the setting, and what streaming takes on its machine."""

    setting: Setting
    costs: StreamCosts
    attention: EvenPart | None  # of one layer
    scheduling: float

    @staticmethod
    def of(
        setting: Setting,
        micro_slices: int,
        control_ns: float,
        scheduling_ns: float,
        buffer_MB: float | None,
        attention: bool,
    ) -> "StreamedLayer":
        """Of the system's settings. Raises `UnsuitableSystemError` for a machine without memory to stream from."""
        machine, dies = setting.model.machine, setting.model.machine.num_nodes
        if not machine.memory:
            raise UnsuitableSystemError(
                "system expert_streaming loads experts from memory, but the machine lists none; "
                "give hardware.memory a buffer and the level behind it"
            )
        buffer = machine.memory[0]
        if buffer_MB is not None:
            room = jnp.full(dies, buffer_MB * 1e6)
        elif buffer.capacity is not None:
            room = (buffer.capacity / jnp.maximum(buffer.sharers, 1))[buffer.channel]
        else:
            raise UnsuitableSystemError(
                f"system expert_streaming keeps micro-slices in {buffer.name}, whose capacity is not stated; "
                "write hardware.memory capacity_GB, or system.buffer_MB"
            )
        costs = StreamCosts(
            machine,
            setting.model.costs,
            jnp.asarray(float(micro_slices)),
            room,
            jnp.asarray(control_ns * 1e-9),
        )
        return StreamedLayer(setting, costs, _attention(setting) if attention else None, scheduling_ns * 1e-9)

    @property
    def shared(self) -> int:
        """Experts of a layer that every token passes."""
        moe = self.setting.moe
        if moe.shared_experts is None:
            return 0
        return round(moe.shared_experts.count * moe.shared_experts.size / moe.expert_size)

    @property
    def experts(self) -> int:
        return self.setting.moe.num_experts + self.shared

    def with_shared(self, batch: Batch) -> Batch:
        """The choices of every token, with the shared experts, which come after the others, among them."""
        return _joined(batch, range(self.setting.moe.num_experts, self.experts)) if self.shared else batch

    def attention_seconds(self, tokens: Float[Array, ""]) -> Float[Array, ""]:
        """By heads over all dies: every die has all tokens for its heads, and partial results go back (VI-C)."""
        if self.attention is None:
            return jnp.zeros(())
        dies = self.costs.dies
        each = tokens / dies * self.costs.costs.dispatch_bytes * (1 - jnp.eye(dies))
        return self.attention.seconds(self.costs.machine, tokens) + 2 * self.moving_seconds(each)

    def idle_seconds(self, tokens: Float[Array, ""]) -> Float[Array, " die"]:
        """Seconds of a layer's attention in which a die's DDR channel is idle: those beside attention's own loads."""
        memory, dies = self.costs.machine.memory[-1], self.costs.dies
        if self.attention is None:
            return jnp.zeros(dies)
        read = (self.attention.weight_bytes + self.attention.bytes_per_token * tokens) / dies
        busy = read * memory.sharers / memory.bandwidth
        return jnp.maximum(self.attention_seconds(tokens) - busy, 0)[memory.channel]

    def moving_seconds(self, each: Float[Array, "die die2"]) -> Float[Array, ""]:
        """Seconds in which dies send each other so many bytes."""
        return self.setting.model.time_model(self.costs.machine.topology, each).total(HardMax())

    def time(self, stages: dict[str, Any], busy: Any) -> LayerTime:
        """As NumPy, [step, layer]; stages come one after the other."""
        times = LayerTime(stages, {"compute": {"node": busy}}, sum(stages.values()))
        return jax.tree.map(lambda leaf: np.asarray(leaf, float), times)


@eqx.filter_jit
def _joined(batch: Batch, shared: range) -> Batch:
    """The choices of every token, and all shared experts. Leaves may be of NumPy."""
    lead = batch.experts.shape[:-1]
    number = jnp.broadcast_to(jnp.arange(shared.start, shared.stop, dtype=jnp.int32), (*lead, len(shared)))
    experts = jnp.concatenate([batch.experts, number], axis=-1)
    draw = jnp.concatenate([batch.draw, jnp.zeros(number.shape, batch.draw.dtype)], axis=-1)
    return replace(batch, experts=experts, draw=draw)


def _attention(setting: Setting) -> EvenPart:
    """Attention of one layer: its FLOPs, its weights and the keys and values of its context."""
    moe = setting.moe
    kind = moe.attention
    if kind is None:
        raise UnsuitableSystemError(
            "system expert_streaming times attention, which the model does not give; set attention: false"
        )
    numbers = (
        2.0 * (moe.attention_parameters + setting.context_tokens * kind.context_products),
        moe.attention_parameters * setting.weight_bytes_per_element,
        setting.context_tokens * kind.cache_elements * setting.bytes_per_element,
    )
    return EvenPart(*(jnp.asarray(float(number)) for number in numbers))


def over_layers(function: Any, steps: Any, rows: Array) -> Any:
    """A function of what a step has, [layer, step], and of a layer's row over all, [step, layer]; layer after layer."""
    leaves = jax.tree.map(jnp.asarray, steps)
    found = jax.lax.map(lambda given: jax.vmap(lambda batch: function(batch, given[1]))(given[0]), (leaves, rows))
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), found)


def utilisation(time: LayerTime) -> float:
    """The part of the time without attention in which the mean array computes, tile floor included."""
    experts = time.total - time.stages["attention"]
    return float(time.busy["compute"]["node"].mean(axis=-1).sum() / experts.sum())
