"""A step of the whole model: its MoE layers as they were timed, and what every token passes beside them."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import build_even_parts
from jaxmoe.engine import LayerTime
from jaxmoe.engine.times import ATTENTION
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.models import ModelError


@dataclass(frozen=True)
class Step:
    """One forward pass of all tokens of a batch. In decoding, `seconds` is the time between two tokens of a request."""

    seconds: float
    tokens: int
    devices: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_s_device(self) -> float:
        return self.tokens_per_s / self.devices


@dataclass(frozen=True)
class WholeModel:
    """The rest of a model, beside the MoE layers that a run times.

    `parts` are seconds of a step in attention, dense FFNs and shared experts, divided evenly among all devices; empty
    where the model does not give what is needed, and `missing` says what.
    """

    tokens: int
    context: int
    devices: int
    layers: int  # MoE layers of the model
    timed: int  # of them, by this run
    dense_layers: int
    parts: dict[str, float]
    missing: str = ""

    @classmethod
    def of(cls, inputs: Inputs) -> "WholeModel":
        moe, workload = inputs.moe, inputs.scenario.workload
        layers = len(moe.moe_layer_ids), len(inputs.layer_ids), moe.num_dense_layers
        sizes = (workload.batch_tokens, workload.context_tokens, inputs.num_nodes, *layers)
        try:
            parts = build_even_parts(inputs.scenario)(jnp.asarray(float(workload.batch_tokens)))
        except ModelError as error:
            return cls(*sizes, {}, str(error))
        return cls(*sizes, {name: float(seconds) for name, seconds in parts._asdict().items()})

    def step(self, layer_seconds: float, with_attention: bool = False, with_shared: bool = False) -> Step:
        """A step whose MoE layers take `layer_seconds` on average, maybe with their attention or shared experts."""
        beside = sum(self.parts.values()) - with_shared * self.parts.get("shared", 0.0)
        moe_part = self.layers / (self.layers + self.dense_layers)
        beside -= with_attention * moe_part * self.parts.get("attention", 0.0)
        return Step(self.layers * layer_seconds + beside, self.tokens, self.devices)

    @property
    def counted(self) -> str:
        """The contents of a step, for people."""
        layers = f"{self.layers} MoE layers"
        if self.timed < self.layers:
            layers += f" (as the mean of {self.timed} that are timed)"
        return counted(layers, self.context, self.missing)

    def report(self) -> dict[str, Any]:
        """Times beside the timed layers, for `summary.json`."""
        if self.missing:
            return {"missing": self.missing}
        return {
            "batch_tokens": self.tokens,
            "context_tokens": self.context,
            "moe_layers": self.layers,
            "moe_layers_timed": self.timed,
            **{f"{name}_s": seconds for name, seconds in self.parts.items()},
        }


def counted(layers: str, context: int, missing: str = "") -> str:
    """The contents of a step of these layers, for people; `missing` says why there is nothing else."""
    if missing:
        return f"counted: {layers} alone; not counted: all else ({missing})"
    beside = f"attention over {context} tokens of context, dense FFNs, shared experts, divided evenly among all devices"
    return f"counted: {layers}, {beside}; not counted: traffic of those, norms, vocabulary, sampling"


def step_report(step: Step) -> dict[str, float]:
    """A step for `summary.json`."""
    return {
        "step_s": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "tokens_per_s_device": step.tokens_per_s_device,
    }


def step_of_run(model: WholeModel, time: LayerTime, with_shared: bool = False) -> Step:
    """The mean step of a system whose times are [step, layer]; it may time the attention of these layers itself, and
    their shared experts.
    """
    attention = sum(float(np.mean(time.stages[name])) for name in dict(time.blocks).get(ATTENTION, ()))
    return model.step(float(np.mean(time.total)), attention > 0, with_shared)
