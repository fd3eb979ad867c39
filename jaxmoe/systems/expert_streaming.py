"""expert_streaming: experts that stream through dies in micro-slices (FSE-DP), beside off-loaded expert parallelism."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.compiling import UNFUSED
from jaxmoe.des.streaming import Stream, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.engine import LayerTime
from jaxmoe.engine.streaming import PARTS, StreamCosts, asked_of, grouped, stream_time
from jaxmoe.policies.buffering import buffer_requests
from jaxmoe.policies.forecast import AbstractForecast, forecast_of
from jaxmoe.policies.streaming import (
    Rules,
    group_members,
    groups_in_order,
    groups_with_first,
    loading_dies,
    moved_tokens,
    prefetched_slices,
    redistributed,
    ring_of,
    tokens_on_dies,
    trajectories,
)
from jaxmoe.relax import AbstractReduction
from jaxmoe.systems.loaded_experts import CirculatingRun, OffloadedRun
from jaxmoe.systems.setting import AbstractRun, AbstractSystem, Rolled, Setting, UnsuitableSystemError
from jaxmoe.systems.settings.expert_streaming import ExpertStreamingSettings
from jaxmoe.systems.streamed_layer import StreamedLayer, over_layers, utilisation
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

    The nearest memory level is the buffer; `buffer_MB` of each die replaces its capacity. Naive slices are not cut, and
    have the room that they need. A run of `fse_buffered` defers requests, one a token of the batch, by `slack` where an
    expert has fewer than `least_tokens`; `spare_requests`, a part of the batch, take the places of those that wait.
    With `prefetch` dies load the first experts of an order that is forecast while attention leaves DDR idle.
    """

    def runs(self, setting: Setting) -> dict[str, AbstractRun]:
        """Expert parallelism and by popularity (Hydra), and slices that tokens go round (Fig. 3b), serial and with
        prefetch; simpler strategies; and itself.
        """
        layer = self._layer(setting)
        made: dict[str, AbstractRun] = {
            "ep": OffloadedRun(layer, prefetch=False, by_popularity=False),
            "hydra": OffloadedRun(layer, prefetch=False, by_popularity=True),
            "ep_prefetch": OffloadedRun(layer, prefetch=True, by_popularity=False),
            "hydra_prefetch": OffloadedRun(layer, prefetch=True, by_popularity=True),
            "fse_tokens": CirculatingRun(layer, prefetch=False),
            "fse_tokens_prefetch": CirculatingRun(layer, prefetch=True),
        }
        for name in [*STRATEGIES][: [*STRATEGIES].index(self.strategy)]:
            if name != "fse_rule5":
                made[name] = self._run(name, layer)
        return made | {"expert_streaming": self._run(self.strategy, layer)}

    def layer_times(self, setting: Setting, batches: Batch, reduction: AbstractReduction | None = None) -> LayerTime:
        """Of its strategy. Raises `UnsuitableSystemError` for `fse_buffered`, whose requests wait."""
        for key, stateful in (("strategy", "fse_buffered"), ("prefetch", self.prefetch)):
            if getattr(self, key) == stateful != "none":
                raise UnsuitableSystemError(
                    f"system.{key} is {stateful}, which goes on from step to step, so a layer alone has no time; use "
                    "fse_paired without prefetch"
                )
        return self._run(self.strategy, self._layer(setting)).layer_times(batches, reduction)

    def _layer(self, setting: Setting) -> "StreamedLayer":
        """Raises `UnsuitableSystemError` where dies that have no tokens yet would prefetch."""
        if self.prefetch != "none" and self.loaded_by != "all":
            raise UnsuitableSystemError(
                f"system.prefetch is {self.prefetch}, but system.loaded_by is {self.loaded_by}: which dies have tokens "
                "of an expert is known after the gate alone; use loaded_by: all, or prefetch: none"
            )
        numbers = (self.micro_slices, self.control_ns, self.scheduling_ns, self.buffer_MB, self.attention)
        return StreamedLayer.of(setting, *numbers)

    def _run(self, name: str, layer: "StreamedLayer") -> "StreamedRun":
        flags = {"in_turn": not self.ahead} | STRATEGIES[name]
        rules = Rules(
            jnp.asarray(1.0 if flags.get("uncut") else float(self.micro_slices)),
            everywhere=self.loaded_by == "all",
            redistributed=self.redistribute,
            prefetched=self.prefetch != "none" and not flags.get("uncut"),
            **flags,
        )
        forecast = None if self.prefetch == "none" else forecast_of(self.prefetch, layer.setting.history)
        if name != "fse_buffered":
            return StreamedRun(layer, rules, forecast=forecast)
        spare = math.ceil(self.spare_requests * layer.setting.batch_tokens)
        buffering = (self.least_tokens, self.slack, spare, self.arrive_together)
        return StreamedRun(layer, rules, buffering, forecast)


@dataclass(frozen=True)
class StreamedRun(AbstractRun):
    """Experts that stream by rules; `buffering`, (theta_min, slack, spare, together), is Algorithm 2.

    `forecast` tells the loads by which rules that say so prefetch.
    """

    layer: StreamedLayer
    rules: Rules
    buffering: tuple[float, float, int, bool] | None = None
    forecast: AbstractForecast | None = None

    @property
    def costs(self) -> StreamCosts:
        """With micro-slices of the rules, and for slices that are not cut a slot for each die."""
        costs = replace(self.layer.costs, micro_slices=self.rules.micro_slices)
        if not self.rules.uncut:
            return costs
        return replace(costs, buffer_bytes=jnp.maximum(costs.buffer_bytes, costs.dies * costs.slice_bytes))

    @property
    def slicing(self) -> Slicing:
        """The same for the simulator."""
        rules, costs = self.rules, self.costs
        flags = (rules.matched, rules.balanced, rules.in_turn)
        return Slicing(round(float(rules.micro_slices)), float(costs.buffer_bytes.min()), float(costs.control), *flags)

    def rollout(self, steps: Batch) -> Rolled:
        """Raises `BufferError` where a micro-slice is larger than a buffer."""
        self.slicing.slots(float(self.costs.slice_bytes))
        finished = None
        if self.buffering is not None:
            steps, finished = self._deferred(steps)
        ring = tuple(ring_of(self.costs.machine.topology).tolist())
        whole = self.layer.with_shared(steps)
        early = jax.jit(self._early)(whole) if self.rules.prefetched else None
        held = _tokens_of_steps(whole, self.layer.experts, self.costs.dies)
        seconds, busy, kept, moved = _streamed_steps(ring, (held, early), self.costs, self.rules)
        tokens = np.asarray(steps.weight).sum(axis=-1).T
        time = self.layer.time(jax.jit(jax.vmap(jax.vmap(self._stages)))(seconds, tokens, moved), busy)
        figures = {"utilisation": utilisation(time)}
        if finished is not None:
            figures["finished_passes"] = float(finished.sum())
        if self.rules.prefetched:
            used = (np.asarray(kept[0]) > 0).any(axis=-1).sum()
            loaded = self.costs.dies * float(self.costs.micro_slices) * used
            figures["prefetched"] = float(np.asarray(kept[4]).sum() / loaded)
        return Rolled(time, jax.tree.map(np.asarray, kept), figures, modelled=time.stages["stream"])

    def _early(self, steps: Batch) -> "Early":
        """What is forecast in every step, and the micro-slices that dies have time and room for, [layer, step]."""
        forecast = self.forecast
        assert forecast is not None
        counts = jax.vmap(jax.vmap(lambda batch: batch.weight @ batch.choices(self.layer.experts)))(steps)
        routed = self.layer.setting.moe.num_experts
        loads = jnp.swapaxes(counts[..., :routed], 0, 1)  # [step, layer, expert]
        _, told = jax.lax.scan(lambda state, load: forecast.step(state, load), forecast.init(), loads)
        told = jnp.concatenate([jnp.swapaxes(told, 0, 1), counts[..., routed:]], axis=-1)
        idle = jax.vmap(jax.vmap(self.layer.idle_seconds))(jnp.asarray(steps.weight).sum(axis=-1))
        costs, sharers = self.costs, self.costs.machine.memory[-1].sharers
        channel = costs.machine.memory[-1].channel
        time = idle / (sharers * costs.load)[channel]
        # Slots that a trajectory needs stay free.
        return Early(told, jnp.floor(jnp.clip(time, 0, jnp.maximum(jnp.floor(costs.slots) - costs.dies, 0))))

    def layer_times(self, batches: Batch, reduction: AbstractReduction | None) -> LayerTime:
        """Times of single layers, [layer, batch]."""
        ring = ring_of(self.costs.machine.topology)

        def one(batch: Batch) -> LayerTime:
            tokens = tokens_on_dies(batch, self.layer.experts, self.costs.dies)
            seconds, busy, _, moved = _streamed(ring, tokens, self.costs, self.rules, reduction)
            stages = self._stages(seconds, batch.weight.sum(), moved)
            return LayerTime(stages, {"compute": {"node": busy}}, sum(stages.values(), start=jnp.zeros(())))

        return jax.vmap(jax.vmap(one))(self.layer.with_shared(batches))

    def _stages(
        self, seconds: Float[Array, ""], tokens: Float[Array, ""], moved: Float[Array, "die die2"]
    ) -> dict[str, Float[Array, ""]]:
        """Of one layer. Tokens that are spread evenly go to their dies, all experts together, and results come back."""
        stages = {"attention": self.layer.attention_seconds(tokens), "stream": seconds + self.layer.scheduling}
        if self.rules.redistributed:
            costs = self.costs.costs
            ways = (moved * costs.dispatch_bytes, moved.T * costs.combine_bytes)
            stages["redistribution"] = self.layer.moving_seconds(ways[0]) + self.layer.moving_seconds(ways[1])
        return stages

    def _deferred(self, steps: Batch) -> tuple[Batch, np.ndarray]:
        """What passes the layers when requests wait, and the forward passes that are finished."""
        assert self.buffering is not None
        least, slack, spare, together = self.buffering
        experts = jnp.asarray(steps.experts)
        numbers = (self.layer.setting.moe.num_experts, jnp.asarray(float(least)), jnp.asarray(float(slack)))
        made = jax.jit(buffer_requests, static_argnums=(1, 4, 5))(experts, *numbers, spare, together)
        served, began, place = (np.moveaxis(np.asarray(each), 1, 0) for each in made[:3])  # [layer, step, request]
        at = (np.arange(len(served))[:, None, None], began, place)
        passing = (
            np.asarray(experts)[at],
            np.zeros(served.shape, np.float32),
            np.zeros((*served.shape, experts.shape[-1]), np.float32),
            served.astype(np.float32),
            np.asarray(steps.sources(self.costs.dies))[at],  # activations stay where the pass began
        )
        return Batch(*jax.device_put(passing)), np.asarray(made.finished)

    def replay(self, rolled: Rolled, batch: Batch, step: int, row: int) -> float:
        return self.simulated(rolled, step, row).seconds + self.layer.scheduling

    def simulated(self, rolled: Rolled, step: int, row: int, record: bool = False) -> Stream:
        """The event simulator's run of one layer and step. Raises `BufferError` where buffers are too small."""
        tokens, groups, following, loading, held = (each[step, row] for each in rolled.kept)
        layer = self.layer.setting.describe("replicated", "token_home")
        return stream(flow_of(layer, self.slicing, tokens, groups, following, loading, held), record)


class Early(NamedTuple):
    """What is known before the gate decides: loads that are forecast, and micro-slices that dies may load."""

    forecast: Float[Array, "*lead expert"]
    room: Float[Array, "*lead die"]


@eqx.filter_jit(compiler_options=UNFUSED)  # type: ignore[call-overload]  # an option of JAX
def _streamed_steps(
    ring: tuple[int, ...],
    steps: tuple[Float[Array, "layer step expert die"], Early | None],
    costs: StreamCosts,
    rules: Rules,
) -> tuple[Array, Array, tuple[Array, ...], Array]:
    """`_streamed` of all steps and layers. Compiled once for a set of rules, whatever the size of the batch."""
    rows = jnp.zeros(steps[0].shape[0])
    return over_layers(lambda given, _: _streamed(np.array(ring), given[0], costs, rules, None, given[1]), steps, rows)


@partial(jax.jit, static_argnums=(1, 2))
def _tokens_of_steps(steps: Batch, experts: int, dies: int) -> Float[Array, "layer step expert die"]:
    """Tokens of every expert on each die."""
    return jax.vmap(jax.vmap(lambda batch: tokens_on_dies(batch, experts, dies)))(steps)


def _streamed(
    ring: Int[np.ndarray, " die"],
    tokens: Float[Array, "expert die"],
    costs: StreamCosts,
    rules: Rules,
    reduction: AbstractReduction | None = None,
    early: Early | None = None,
) -> tuple[Array, Array, tuple[Array, ...], Array]:
    """Seconds of one layer and step, those that arrays are busy, what the simulator needs, and tokens that move."""
    before = tokens
    if rules.redistributed:
        tokens = redistributed(tokens)
    needed, following = trajectories(tokens, ring)
    groups, held = groups_in_order(tokens, rules.paired), jnp.zeros_like(tokens)
    if early is not None:
        loaded = prefetched_slices(early.forecast, early.room, costs.micro_slices, rules.paired)
        held = loaded * (tokens > 0).any(axis=1, keepdims=True)  # others make room at the gate
        groups = groups_with_first(tokens, held.any(axis=1), rules.paired)
    loaders = loading_dies(needed, rules.everywhere)
    asked = asked_of(costs, tokens, needed, following, loaders, rules.balanced, held)
    parts = 1 if rules.uncut else PARTS
    members = grouped(asked, group_members(groups, len(tokens)))
    time = stream_time(costs, members, rules.matched, rules.in_turn, rules.balanced, parts, reduction)
    kept = (tokens.astype(jnp.int32), groups, following.argmax(axis=-1), loaders > 0, held.astype(jnp.int32))
    return time.seconds, time.compute, kept, moved_tokens(before, tokens)
