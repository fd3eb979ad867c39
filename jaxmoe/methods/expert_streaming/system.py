"""expert_streaming: experts that stream through dies in micro-slices (FSE-DP), beside off-loaded expert parallelism."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.des.streaming import Stream, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.engine import LayerTime, LoadRules, SliceCosts, StreamDecisions, StreamLayer
from jaxmoe.methods.expert_streaming.buffering import Buffering
from jaxmoe.methods.expert_streaming.fse_dp import FSEDP, Experts
from jaxmoe.methods.expert_streaming.loaded_experts import CirculatingRun, LoadedRun, OffloadedRun
from jaxmoe.methods.forecast import forecast_of
from jaxmoe.methods.settings.expert_streaming import ExpertStreamingSettings
from jaxmoe.methods.system import (
    AbstractRun,
    AbstractSystem,
    DeploymentSetting,
    RolloutResult,
    UnsuitableSystemError,
    attention_part,
)
from jaxmoe.relax import AbstractReduction
from jaxmoe.traces import Batch

# A1 to A5 of VI-C. What A5 adds, token buffering, goes by `slack`.
STRATEGIES: dict[str, dict[str, bool]] = {
    "fse_naive": {"paired": False, "matched": False, "in_turn": True, "uncut": True},
    "fse": {"paired": False, "matched": False},
    "fse_paired": {},
    "fse_rule5": {"balanced": True},
    "fse_buffered": {},
}


@dataclass(frozen=True)
class ExpertStreaming(ExpertStreamingSettings, AbstractSystem):
    """One of the strategies, with the other ones and expert parallelism to compare with.

    The nearest memory level is the buffer. Naive slices are not cut, and have the room that they need. Requests of
    `fse_buffered` are one a token of the batch.
    """

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        """Runs by name: baselines, simpler strategies, and last the system itself.

        Baselines are expert parallelism, experts placed by popularity (Hydra) and tokens that circulate among slices
        (Fig. 3b), each without and with prefetch.
        """
        layer = self._layer(setting)
        prefetches = {"": False, "_prefetch": True}
        made: dict[str, AbstractRun] = {
            f"{name}{after}": OffloadedRun.of(setting, layer, prefetch, by_popularity=name == "hydra")
            for after, prefetch in prefetches.items()
            for name in ("ep", "hydra")
        }
        for after, prefetch in prefetches.items():
            made[f"fse_tokens{after}"] = CirculatingRun.of(setting, layer, prefetch)
        for name in [*STRATEGIES][: [*STRATEGIES].index(self.strategy)]:
            if name != "fse_rule5":
                made[name] = self._run(name, setting, layer)
        return made | {"expert_streaming": self._run(self.strategy, setting, layer)}

    def layer_times(
        self, setting: DeploymentSetting, batches: Batch, reduction: AbstractReduction | None = None
    ) -> LayerTime:
        """Times of single layers, [layer, batch], under the system's strategy.

        Raises `UnsuitableSystemError` for `fse_buffered`, whose requests wait, and with `prefetch`.
        """
        for key, stateful in (("strategy", "fse_buffered"), ("prefetch", self.prefetch)):
            if getattr(self, key) == stateful != "none":
                raise UnsuitableSystemError(
                    f"system.{key} is {stateful}, which goes on from step to step, so a layer alone has no time; use "
                    "fse_paired without prefetch"
                )
        return self._run(self.strategy, setting, self._layer(setting)).layer_times(batches, reduction)

    def _layer(self, setting: DeploymentSetting) -> StreamLayer:
        """The layer model. Raises `UnsuitableSystemError` where memory lacks, or dies without tokens would prefetch."""
        model, memory = setting.model, setting.model.machine.memory
        if self.prefetch != "none" and self.loaded_by != "all":
            raise UnsuitableSystemError(
                f"system.prefetch is {self.prefetch}, but system.loaded_by is {self.loaded_by}: which dies have tokens "
                "of an expert is known after the gate alone; use loaded_by: all, or prefetch: none"
            )
        if not memory:
            raise UnsuitableSystemError(
                "system expert_streaming loads experts from memory, but the machine lists none; "
                "give hardware.memory a buffer and the level behind it"
            )
        if self.buffer_MB is not None:
            room = jnp.full(model.machine.num_nodes, self.buffer_MB * 1e6)
        elif memory[0].capacity is not None:
            room = (memory[0].capacity / jnp.maximum(memory[0].sharers, 1))[memory[0].channel]
        else:
            raise UnsuitableSystemError(
                f"system expert_streaming keeps micro-slices in {memory[0].name}, whose capacity is not stated; "
                "write hardware.memory capacity_GB, or system.buffer_MB"
            )
        slices = jnp.asarray(float(self.micro_slices))
        return StreamLayer(
            model.machine,
            SliceCosts(model.costs, slices, room, jnp.asarray(self.control_ns * 1e-9)),
            attention_part(setting, "system expert_streaming times attention", "set attention: false")
            if self.attention
            else None,
            jnp.asarray(self.scheduling_ns * 1e-9),
            model.time_model,
            setting.build_exchange("token_home"),
            model.schedule,
        )

    def _run(self, name: str, setting: DeploymentSetting, layer: StreamLayer) -> "StreamedRun":
        flags = {"in_turn": not self.ahead} | STRATEGIES[name]
        paired = flags.pop("paired", True)
        rules, buffering, forecast = LoadRules(**flags), None, None
        if self.prefetch != "none" and not rules.uncut:
            forecast = forecast_of(self.prefetch, setting.history)
        if name == "fse_buffered":
            spare = math.ceil(self.spare_requests * setting.batch_tokens)
            least, slack = jnp.asarray(float(self.least_tokens)), jnp.asarray(float(self.slack))
            buffering = Buffering(least, slack, spare, self.arrive_together)
        everywhere = self.loaded_by == "all"
        method = FSEDP(Experts.of(setting.moe), rules, paired, everywhere, self.redistribute, buffering, forecast)
        if rules.uncut:
            layer = replace(layer, costs=layer.costs.uncut())
        return StreamedRun(setting, layer, method)


@dataclass(frozen=True)
class StreamedRun(LoadedRun):
    """A run of experts that stream through dies by the method's rules."""

    method: FSEDP

    @property
    def costs(self) -> SliceCosts:
        return self.layer.costs

    @property
    def slicing(self) -> Slicing:
        """Rules and slice sizes for the event simulator."""
        rules, costs = self.method.rules, self.costs
        flags = (rules.matched, rules.balanced, rules.in_turn)
        return Slicing(round(float(costs.micro_slices)), float(costs.buffer_bytes.min()), float(costs.control), *flags)

    @staticmethod
    def keep(decisions: StreamDecisions, time: LayerTime) -> tuple[LayerTime, Any]:
        whole = {name: getattr(decisions, name).astype(jnp.int32) for name in ("on_dies", "held")}
        routes = (decisions.groups, decisions.following.argmax(axis=-1), decisions.loaders > 0)
        return time, ((whole["on_dies"], *routes, whole["held"]), decisions.facts["passing"])

    def rollout(self, steps: Batch) -> RolloutResult:
        """Times of all steps. Raises `BufferError` where a micro-slice is larger than a buffer."""
        self.slicing.slots(float(self.costs.slice_bytes))
        time, found, utilisation = self.rolled(steps)
        kept, passing = jax.tree.map(np.asarray, found)
        figures = {"utilisation": utilisation}
        if self.method.buffering is not None:  # a pass is finished when it passes the last layer
            figures["finished_passes"] = float(passing[:, -1].sum())
        if self.method.forecast is not None:
            used = (kept[0] > 0).any(axis=-1).sum()
            figures["prefetched"] = float(kept[4].sum() / (self.costs.dies * float(self.costs.micro_slices) * used))
        return RolloutResult(time, kept, figures, modelled=time.stages["stream"])

    def layer_times(self, batches: Batch, reduction: AbstractReduction | None) -> LayerTime:
        """Times of single layers, [layer, batch]."""

        def step(tokens: Any) -> LayerTime:
            _, decisions = self.method.step(self.layer.machine, (), tokens, None)
            return jax.vmap(lambda decided, each: self.layer.time(decided, each, reduction))(decisions, tokens)

        return jax.vmap(step, in_axes=1, out_axes=1)(self.method.prepare(self.layer, batches)[1])

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        return self.simulated(rolled, step, row).seconds + float(self.layer.scheduling)

    def simulated(self, rolled: RolloutResult, step: int, row: int, record: bool = False) -> Stream:
        """The event simulator's run of one layer and step. Raises `BufferError` where buffers are too small."""
        described = self.setting.describe("replicated", "token_home")
        return stream(flow_of(described, self.slicing, *(each[step, row] for each in rolled.kept)), record)
