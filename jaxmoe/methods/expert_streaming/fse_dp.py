"""Methods that load experts from memory in every step: FSE-DP and the baselines of expert_streaming_fse_dp."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine import (
    AbstractMethod,
    HostDecisions,
    LoadRules,
    RingDecisions,
    StreamDecisions,
    StreamLayer,
    StreamTokens,
)
from jaxmoe.hardware import Machine
from jaxmoe.methods.expert_streaming.buffering import Buffering
from jaxmoe.methods.expert_streaming.trajectories import prefetched_slices, ring_of, streams, tokens_on_dies
from jaxmoe.methods.forecast import AbstractForecast
from jaxmoe.models import MoEModel
from jaxmoe.traces import Batch


class Experts(eqx.Module):
    """Experts of a layer: `routed` ones, that a gate chooses, and `shared` ones after them, that every token passes."""

    routed: int = eqx.field(static=True)
    shared: int = eqx.field(static=True)

    @classmethod
    def of(cls, moe: MoEModel) -> "Experts":
        """Those of a model; shared ones count by their size."""
        shared = moe.shared_experts
        return cls(moe.num_experts, 0 if shared is None else round(shared.count * shared.size / moe.expert_size))

    @property
    def count(self) -> int:
        return self.routed + self.shared

    @eqx.filter_jit
    def joined(self, batch: Batch) -> Batch:
        """Adds all shared experts to the choices of every token. Leaves may be of NumPy."""
        if not self.shared:
            return batch
        number = jnp.arange(self.routed, self.count, dtype=jnp.int32)
        number = jnp.broadcast_to(number, (*batch.experts.shape[:-1], self.shared))
        experts = jnp.concatenate([batch.experts, number], axis=-1)
        draw = jnp.concatenate([batch.draw, jnp.zeros(number.shape, batch.draw.dtype)], axis=-1)
        return replace(batch, experts=experts, draw=draw)

    @eqx.filter_jit
    def on_dies(self, steps: Batch, dies: int) -> StreamTokens:
        """Tokens of every expert on each die, of steps with two leading axes."""
        joined = self.joined(steps)
        counted = jax.vmap(jax.vmap(lambda batch: tokens_on_dies(batch, self.count, dies)))(joined)
        return StreamTokens(counted, joined.weight.sum(axis=-1))


class LoadingMethod(AbstractMethod):
    """A method on a layer whose experts are loaded anew in every step."""

    memoryless = True
    experts: Experts

    def init(self, machine: Machine) -> tuple[()]:
        return ()


class FSEDP(LoadingMethod):
    """Experts that stream through dies in micro-slices (sections III to V); settings as in `streams`.

    With `buffering` requests wait (Algorithm 2). Dies prefetch the first experts of the order that is `forecast`, while
    attention leaves memory idle (IV-A).
    """

    rules: LoadRules
    paired: bool = eqx.field(static=True, default=True)
    everywhere: bool = eqx.field(static=True, default=True)
    redistribute: bool = eqx.field(static=True, default=False)
    buffering: Buffering | None = None
    forecast: AbstractForecast | None = None

    def prepare(self, layer: Any, steps: Batch) -> tuple["FSEDP", StreamTokens]:
        dies = layer.machine.num_nodes
        if self.buffering is not None:
            steps = self.buffering(steps, self.experts.routed, dies)
        tokens = self.experts.on_dies(steps, dies)
        return self, tokens if self.forecast is None else self._ahead(self.forecast, layer, tokens)

    def step(
        self, machine: Machine, state: tuple[()], tokens: StreamTokens, last: Any
    ) -> tuple[tuple[()], StreamDecisions]:
        rules = (self.rules, self.paired, self.everywhere, self.redistribute)
        return state, jax.vmap(lambda each: streams(machine.topology, each, *rules))(tokens)

    @eqx.filter_jit
    def _ahead(self, forecast: AbstractForecast, layer: StreamLayer, tokens: StreamTokens) -> StreamTokens:
        """Returns the tokens with the micro-slices that dies load before the gate decides."""
        routed = self.experts.routed
        counts = tokens.on_dies.sum(axis=-1)  # [layer, step, expert]
        loads = jnp.swapaxes(counts[..., :routed], 0, 1)
        _, told = jax.lax.scan(lambda state, load: forecast.step(state, load), forecast.init(), loads)
        told = jnp.concatenate([jnp.swapaxes(told, 0, 1), counts[..., routed:]], axis=-1)

        def one(told: Float[Array, " expert"], count: Float[Array, ""]) -> Float[Array, "expert die"]:
            return prefetched_slices(told, layer.ahead(count), layer.costs.micro_slices, self.paired)

        return replace(tokens, ahead=jax.vmap(jax.vmap(one))(told, tokens.count))


class OffloadedExperts(LoadingMethod):
    """Expert parallelism whose dies load their own experts, each the experts for which `hosts` has 1."""

    hosts: Float[Array, "layer expert die"]
    prefetch: bool = eqx.field(static=True)

    def prepare(self, layer: Any, steps: Batch) -> tuple["OffloadedExperts", Batch]:
        return self, self.experts.joined(steps)

    def step(self, machine: Machine, state: tuple[()], tokens: Batch, last: Any) -> tuple[tuple[()], HostDecisions]:
        return state, HostDecisions(self.hosts, self.prefetch)


class CirculatingTokens(LoadingMethod):
    """Slices stay on the dies that load them, and the tokens of an expert circulate (Fig. 3b)."""

    prefetch: bool = eqx.field(static=True)

    def prepare(self, layer: Any, steps: Batch) -> tuple["CirculatingTokens", StreamTokens]:
        return self, self.experts.on_dies(steps, layer.machine.num_nodes)

    def step(
        self, machine: Machine, state: tuple[()], tokens: StreamTokens, last: Any
    ) -> tuple[tuple[()], RingDecisions]:
        return state, RingDecisions(tokens.on_dies, tuple(ring_of(machine.topology).tolist()), self.prefetch)
