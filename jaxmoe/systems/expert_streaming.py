"""expert_streaming: experts that stream through dies in micro-slices (FSE-DP), beside off-loaded expert parallelism."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.des.streaming import Stream, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.latency.streaming import PARTS, StreamCosts, asked_of, grouped, stream_time
from jaxmoe.policies.buffering import buffer_requests
from jaxmoe.policies.streaming import (
    Rules,
    group_members,
    groups_in_order,
    loading_dies,
    moved_tokens,
    redistributed,
    ring_of,
    tokens_on_dies,
    trajectories,
)
from jaxmoe.systems.loaded_experts import CirculatingRun, OffloadedRun
from jaxmoe.systems.setting import AbstractRun, AbstractSystem, Rolled, Setting
from jaxmoe.systems.streamed_layer import StreamedLayer, over_layers, utilisation
from jaxmoe.traces import Batch

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
        """Expert parallelism and by popularity (Hydra), and slices that tokens go round (Fig. 3b), serial and with
        prefetch; simpler strategies; and itself.
        """
        numbers = (self.micro_slices, self.control_ns, self.scheduling_ns, self.buffer_MB, self.attention)
        layer = StreamedLayer.of(setting, *numbers)
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
        seconds, busy, kept, moved = _streamed_steps(
            self.layer.experts, ring, self.layer.with_shared(steps), self.costs, self.rules
        )
        attention = jnp.vectorize(self.layer.attention_seconds)(jnp.asarray(steps.weight).sum(axis=-1).T)
        stages = {"attention": attention, "stream": seconds + self.layer.scheduling}
        if self.rules.redistributed:
            stages["redistribution"] = self._redistribution(moved)
        time = self.layer.time(stages, busy)
        figures = {"utilisation": utilisation(time)}
        if finished is not None:
            figures["finished_passes"] = float(finished.sum())
        return Rolled(time, jax.tree.map(np.asarray, kept), figures, modelled=time.stages["stream"])

    def _redistribution(self, moved: Float[Array, "step layer die die2"]) -> Float[Array, "step layer"]:
        """Vectors go to the dies that compute them, all experts together, and results come back."""
        costs = self.costs.costs

        def seconds(tokens: Float[Array, "die die2"]) -> Float[Array, ""]:
            ways = (tokens * costs.dispatch_bytes, tokens.T * costs.combine_bytes)
            return sum((self.layer.moving_seconds(way) for way in ways), start=jnp.zeros(()))

        return jax.jit(jax.vmap(jax.vmap(seconds)))(moved)

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
) -> tuple[Array, Array, tuple[Array, ...], Array]:
    """`_streamed` of all steps and layers. Compiled once for a shape of steps and a set of rules."""
    rows = jnp.zeros(steps.experts.shape[0])
    return over_layers(lambda batch, _: _streamed(experts, np.array(ring), batch, costs, rules), steps, rows)


def _streamed(
    experts: int, ring: Int[np.ndarray, " die"], batch: Batch, costs: StreamCosts, rules: Rules
) -> tuple[Array, Array, tuple[Array, ...], Array]:
    """Seconds of one layer and step, those that arrays are busy, what the simulator needs, and tokens that move."""
    tokens = before = tokens_on_dies(batch, experts, costs.dies)
    if rules.redistributed:
        tokens = redistributed(tokens)
    needed, following = trajectories(tokens, ring)
    groups = groups_in_order(tokens, rules.paired)
    loaders = loading_dies(needed, rules.everywhere)
    asked = grouped(asked_of(costs, tokens, needed, following, loaders, rules.balanced), group_members(groups, experts))
    parts = 1 if rules.uncut else PARTS
    time = stream_time(costs, asked, rules.matched, rules.in_turn, rules.balanced, parts)
    kept = (tokens.astype(jnp.int32), groups, following.argmax(axis=-1), loaders > 0)
    return time.seconds, time.compute, kept, moved_tokens(before, tokens)
