"""expert_streaming: experts that stream through dies in micro-slices (FSE-DP), beside off-loaded expert parallelism."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.des import layer_seconds
from jaxmoe.des.offloading import offloaded
from jaxmoe.des.streaming import Stream, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.latency import Decisions, EvenPart, LayerTime
from jaxmoe.latency.offloading import offloaded_seconds
from jaxmoe.latency.streaming import PARTS, StreamCosts, asked_of, grouped, stream_time
from jaxmoe.placement import expert_parallel_balanced
from jaxmoe.policies.buffering import buffer_requests
from jaxmoe.policies.streaming import (
    Rules,
    group_members,
    groups_in_order,
    loading_dies,
    redistributed,
    ring_of,
    tokens_on_dies,
    trajectories,
)
from jaxmoe.relax import HardMax
from jaxmoe.systems.setting import AbstractRun, AbstractSystem, Rolled, Setting, UnsuitableSystemError
from jaxmoe.traces import Batch, load_counts

Strategy = Literal["fse_naive", "fse", "fse_paired", "fse_rule5", "fse_buffered"]
# A1 to A5 of VI-C. What A5 adds, token buffering, goes by `slack`.
STRATEGIES: dict[str, dict[str, bool]] = {
    "fse_naive": {"paired": False, "matched": False, "in_turn": True, "uncut": True},
    "fse": {"paired": False, "matched": False},
    "fse_paired": {},
    "fse_rule5": {"balanced": True},
    "fse_buffered": {},
}


@dataclass(frozen=True)
class ExpertStreaming(AbstractSystem):
    """One of the strategies, with the other ones and expert parallelism to compare with.

    The nearest memory level is the buffer; `buffer_MB` of each die replaces its capacity. Naive slices are not cut, and
    have the room that they need. A run of `fse_buffered` defers requests, one a token of the batch, by `slack` where an
    expert has fewer than `least_tokens`; `spare_requests`, a part of the batch, take the places of those that wait.
    """

    strategy: Strategy = "fse_paired"
    micro_slices: int = 8
    control_ns: float = 200.0
    scheduling_ns: float = 500.0
    buffer_MB: float | None = None  # noqa: N815
    redistribute: bool = False
    loaded_by: Literal["all", "trajectory"] = "all"
    ahead: bool = True
    attention: bool = True
    slack: float = 0.2
    least_tokens: float = 2.0
    spare_requests: float = 1.0
    arrive_together: bool = False

    def runs(self, setting: Setting) -> dict[str, AbstractRun]:
        """Expert parallelism and by popularity (Hydra), serial and with prefetch; simpler strategies; and itself."""
        layer = StreamedLayer.of(self, setting)
        made: dict[str, AbstractRun] = {
            "ep": OffloadedRun(layer, prefetch=False, by_popularity=False),
            "hydra": OffloadedRun(layer, prefetch=False, by_popularity=True),
            "ep_prefetch": OffloadedRun(layer, prefetch=True, by_popularity=False),
            "hydra_prefetch": OffloadedRun(layer, prefetch=True, by_popularity=True),
        }
        for name in [*STRATEGIES][: [*STRATEGIES].index(self.strategy)]:
            if name != "fse_rule5":
                made[name] = self._run(name, layer)
        return made | {"expert_streaming": self._run(self.strategy, layer)}

    def _run(self, name: str, layer: "StreamedLayer") -> "StreamedRun":
        flags = {"in_turn": not self.ahead} | STRATEGIES[name]
        rules = Rules(
            jnp.asarray(1.0 if flags.get("uncut") else float(self.micro_slices)),
            everywhere=self.loaded_by == "all",
            redistributed=self.redistribute,
            **flags,
        )
        if name != "fse_buffered":
            return StreamedRun(layer, rules)
        spare = math.ceil(self.spare_requests * layer.setting.batch_tokens)
        return StreamedRun(layer, rules, (self.least_tokens, self.slack, spare, self.arrive_together))


@dataclass(frozen=True)
class StreamedLayer:
    """What all runs share: the setting, and what streaming takes on its machine."""

    setting: Setting
    costs: StreamCosts
    attention: EvenPart | None  # of one layer
    scheduling: float

    @staticmethod
    def of(system: ExpertStreaming, setting: Setting) -> "StreamedLayer":
        """Raises `UnsuitableSystemError` for a machine without memory to stream from."""
        machine, dies = setting.model.machine, setting.model.machine.num_nodes
        if not machine.memory:
            raise UnsuitableSystemError(
                "system expert_streaming loads experts from memory, but the machine lists none; "
                "give hardware.memory a buffer and the level behind it"
            )
        buffer = machine.memory[0]
        if system.buffer_MB is not None:
            room = jnp.full(dies, system.buffer_MB * 1e6)
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
            jnp.asarray(float(system.micro_slices)),
            room,
            jnp.asarray(system.control_ns * 1e-9),
        )
        return StreamedLayer(
            setting, costs, _attention(setting) if system.attention else None, system.scheduling_ns * 1e-9
        )

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
        if not self.shared:
            return batch
        number = jnp.arange(self.setting.moe.num_experts, self.experts, dtype=jnp.int32)
        lead = batch.experts.shape[:-1]
        experts = jnp.concatenate([jnp.asarray(batch.experts), jnp.broadcast_to(number, (*lead, self.shared))], axis=-1)
        draw = jnp.concatenate([jnp.asarray(batch.draw), jnp.zeros((*lead, self.shared))], axis=-1)
        # Leaves may be of NumPy, which the constructor's types refuse.
        return eqx.tree_at(lambda batch: (batch.experts, batch.draw), batch, (experts, draw))

    def attention_seconds(self, tokens: Float[Array, ""]) -> Float[Array, ""]:
        """By heads over all dies: every die has all tokens for its heads, and partial results go back (VI-C)."""
        if self.attention is None:
            return jnp.zeros(())
        machine, dies = self.costs.machine, self.costs.dies
        each = tokens / dies * self.costs.costs.dispatch_bytes * (1 - jnp.eye(dies))
        moved = self.setting.model.time_model(machine.topology, each).total(HardMax())
        return self.attention.seconds(machine, tokens) + 2 * moved

    def time(self, stages: dict[str, Any], busy: Any) -> LayerTime:
        """As NumPy, [step, layer]; stages come one after the other."""
        times = LayerTime(stages, {"compute": {"node": busy}}, sum(stages.values()))
        return jax.tree.map(lambda leaf: np.asarray(leaf, float), times)


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


@dataclass(frozen=True)
class OffloadedRun(AbstractRun):
    """Expert parallelism whose dies load their own experts: dispatch, load and compute, combine."""

    layer: StreamedLayer
    prefetch: bool
    by_popularity: bool

    def hosts(self) -> Float[np.ndarray, "layer expert die"]:
        """Experts by number in equal runs, or by popularity before the run; shared experts go from die to die."""
        setting, dies = self.layer.setting, self.layer.costs.dies
        layers = len(setting.history.layer_ids)
        if self.by_popularity:
            share = expert_parallel_balanced(load_counts(setting.history).counts[0].astype(float), dies)
        else:
            experts = setting.moe.num_experts
            number = np.broadcast_to(np.arange(experts) * dies // experts, (layers, experts))
            share = np.eye(dies, dtype=np.float32)[number]
        shared = np.eye(dies, dtype=np.float32)[np.arange(self.layer.shared) % dies]
        return np.concatenate([share, np.broadcast_to(shared, (layers, *shared.shape))], axis=1)

    def rollout(self, steps: Batch) -> Rolled:
        layer, setting = self.layer, self.layer.setting
        model = replace(setting.model, mode="replicated", exchange=setting.build_exchange("token_home"))

        @eqx.filter_jit
        def one(batch: Batch, host: Array, costs: StreamCosts) -> tuple[dict[str, Array], Array]:
            counts = (batch.choices(layer.experts) * batch.weight[:, None]).sum(axis=0)
            around = model.decided(Decisions(host), batch)
            seconds, busy = offloaded_seconds(costs, counts, host, self.prefetch)
            stages = {"dispatch": around.dispatch, "compute": seconds, "combine": around.combine}
            return {"attention": layer.attention_seconds(batch.weight.sum())} | stages, busy

        hosts = self.hosts()
        stages, busy = _over(
            lambda batch, row: one(batch, row, layer.costs), layer.with_shared(steps), jnp.asarray(hosts)
        )
        time = layer.time(stages, busy)
        used = float((1 + self.prefetch) * layer.costs.dies * layer.costs.costs.expert_bytes)
        figures = {"package_memory_B": used, "utilisation": _utilisation(time)}
        return Rolled(time, hosts, figures, modelled=time.total - time.stages["attention"])

    def replay(self, rolled: Rolled, batch: Batch, step: int, row: int) -> float:
        layer, setting = self.layer, self.layer.setting
        batch = jax.tree.map(np.asarray, layer.with_shared(batch))
        described = setting.describe("replicated", "token_home")
        host = rolled.kept[row]
        counts = np.bincount(batch.experts.ravel(), minlength=layer.experts)
        alone = replace(described, flops=np.full(layer.costs.dies, np.inf), memory=(), gemm=None)
        inside = offloaded(described, counts, host.argmax(axis=1), self.prefetch, float(layer.costs.control))
        return layer_seconds(alone, host, batch) + inside


@dataclass(frozen=True)
class StreamedRun(AbstractRun):
    """Experts that stream by rules; `buffering`, (theta_min, slack, spare, together), is Algorithm 2."""

    layer: StreamedLayer
    rules: Rules
    buffering: tuple[float, float, int, bool] | None = None

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
        seconds, busy, kept = _streamed_steps(
            self.layer.experts, ring, self.layer.with_shared(steps), self.costs, self.rules
        )
        attention = jnp.vectorize(self.layer.attention_seconds)(jnp.asarray(steps.weight).sum(axis=-1).T)
        time = self.layer.time({"attention": attention, "stream": seconds + self.layer.scheduling}, busy)
        figures = {"utilisation": _utilisation(time)}
        if finished is not None:
            figures["finished_passes"] = float(finished.sum())
        return Rolled(time, jax.tree.map(np.asarray, kept), figures, modelled=time.stages["stream"])

    def _deferred(self, steps: Batch) -> tuple[Batch, np.ndarray]:
        """What passes the layers when requests wait, and the forward passes that are finished."""
        assert self.buffering is not None
        least, slack, spare, together = self.buffering
        experts = jnp.asarray(steps.experts)
        numbers = (self.layer.setting.moe.num_experts, jnp.asarray(float(least)), jnp.asarray(float(slack)))
        made = jax.jit(buffer_requests, static_argnums=(1, 4, 5))(experts, *numbers, spare, together)
        served, began, place = (jnp.moveaxis(each, 1, 0) for each in made[:3])  # [layer, step, request]
        pick = jax.vmap(lambda leaf, began, place: leaf[began, place])
        passing = Batch(
            experts=pick(experts, began, place),
            token_draw=jnp.zeros(served.shape),
            draw=jnp.zeros((*served.shape, experts.shape[-1])),
            weight=served.astype(jnp.float32),
            source=pick(steps.sources(self.costs.dies), began, place),  # activations stay where the pass began
        )
        return passing, np.asarray(made.finished)

    def replay(self, rolled: Rolled, batch: Batch, step: int, row: int) -> float:
        return self.simulated(rolled, step, row).seconds + self.layer.scheduling

    def simulated(self, rolled: Rolled, step: int, row: int, record: bool = False) -> Stream:
        """The event simulator's run of one layer and step. Raises `BufferError` where buffers are too small."""
        tokens, groups, following, loading = (each[step, row] for each in rolled.kept)
        layer = self.layer.setting.describe("replicated", "token_home")
        return stream(flow_of(layer, self.slicing, tokens, groups, following, loading), record)


@eqx.filter_jit
def _streamed_steps(
    experts: int, ring: tuple[int, ...], steps: Batch, costs: StreamCosts, rules: Rules
) -> tuple[Array, Array, tuple[Array, ...]]:
    """`_streamed` of all steps and layers. Compiled once for a shape of steps and a set of rules."""
    rows = jnp.zeros(steps.experts.shape[0])
    return _over(lambda batch, _: _streamed(experts, np.array(ring), batch, costs, rules), steps, rows)


def _streamed(
    experts: int, ring: Int[np.ndarray, " die"], batch: Batch, costs: StreamCosts, rules: Rules
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Seconds of one layer and step, those that arrays are busy, and what the simulator needs."""
    tokens = tokens_on_dies(batch, experts, costs.dies)
    if rules.redistributed:
        tokens = redistributed(tokens)
    needed, following = trajectories(tokens, ring)
    groups = groups_in_order(tokens, rules.paired)
    loaders = loading_dies(needed, rules.everywhere)
    asked = grouped(asked_of(costs, tokens, needed, following, loaders, rules.balanced), group_members(groups, experts))
    parts = 1 if rules.uncut else PARTS
    time = stream_time(costs, asked, rules.matched, rules.in_turn, rules.balanced, parts)
    kept = (tokens.astype(jnp.int32), groups, following.argmax(axis=-1), loaders > 0)
    return time.seconds, time.compute, kept


def _over(function: Any, steps: Batch, rows: Array) -> Any:
    """A function of one batch and a layer's row over all, [step, layer]; layers one after the other."""
    leaves = jax.tree.map(jnp.asarray, steps)
    found = jax.lax.map(lambda given: jax.vmap(lambda batch: function(batch, given[1]))(given[0]), (leaves, rows))
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), found)


def _utilisation(time: LayerTime) -> float:
    """The part of the time without attention in which the mean array computes, tile floor included."""
    experts = time.total - time.stages["attention"]
    return float(time.busy["compute"]["node"].mean(axis=-1).sum() / experts.sum())
