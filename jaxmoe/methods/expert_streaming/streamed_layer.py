"""The layer model of experts that are loaded in every step, from a deployment setting and the system's numbers."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxmoe.engine import EvenPart, LayerTime, SliceCosts, StreamLayer, rollout
from jaxmoe.engine.rollout import AbstractMethod
from jaxmoe.engine.times import ATTENTION
from jaxmoe.methods.expert_streaming.fse_dp import Experts
from jaxmoe.methods.system import AbstractRun, DeploymentSetting, UnsuitableSystemError
from jaxmoe.traces import Batch


def stream_layer(
    setting: DeploymentSetting,
    micro_slices: int,
    control_ns: float,
    scheduling_ns: float,
    buffer_MB: float | None,
    attention: bool,
) -> StreamLayer:
    """Builds the layer model of streamed experts from the system's settings.

    Raises `UnsuitableSystemError` for a machine without memory to stream from.
    """
    model, dies = setting.model, setting.model.machine.num_nodes
    if not model.machine.memory:
        raise UnsuitableSystemError(
            "system expert_streaming loads experts from memory, but the machine lists none; "
            "give hardware.memory a buffer and the level behind it"
        )
    buffer = model.machine.memory[0]
    if buffer_MB is not None:
        room = jnp.full(dies, buffer_MB * 1e6)
    elif buffer.capacity is not None:
        room = (buffer.capacity / jnp.maximum(buffer.sharers, 1))[buffer.channel]
    else:
        raise UnsuitableSystemError(
            f"system expert_streaming keeps micro-slices in {buffer.name}, whose capacity is not stated; "
            "write hardware.memory capacity_GB, or system.buffer_MB"
        )
    return StreamLayer(
        model.machine,
        SliceCosts(model.costs, jnp.asarray(float(micro_slices)), room, jnp.asarray(control_ns * 1e-9)),
        _attention(setting) if attention else None,
        jnp.asarray(scheduling_ns * 1e-9),
        model.time_model,
        setting.build_exchange("token_home"),
        model.schedule,
    )


def experts_of(setting: DeploymentSetting) -> Experts:
    """Experts of a layer; shared ones count by their size."""
    moe = setting.moe
    shared = moe.shared_experts
    return Experts(moe.num_experts, 0 if shared is None else round(shared.count * shared.size / moe.expert_size))


@dataclass(frozen=True)
class LoadedRun(AbstractRun):
    """A method on a layer whose experts are loaded anew in every step."""

    setting: DeploymentSetting
    layer: StreamLayer
    method: AbstractMethod

    @staticmethod
    @abstractmethod
    def keep(decisions: Any, time: LayerTime) -> tuple[LayerTime, Any]:
        """Times of a step, and the decisions that the event simulator replays."""

    def rolled(self, steps: Batch) -> tuple[LayerTime, Any, float]:
        """NumPy times, kept decisions, and the part of the time without attention in which the mean array computes."""
        _, time, kept = rollout(self.method, self.layer, steps, keep=self.keep)
        time = time.as_numpy()
        experts = time.total - sum(time.stages[name] for name in dict(time.blocks)[ATTENTION])
        return time, kept, float(time.node_time.mean(axis=-1).sum() / experts.sum())


def _attention(setting: DeploymentSetting) -> EvenPart:
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
