"""One MoE layer on one machine, batches of it, and what a model has beside its experts."""

from dataclasses import replace
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import Energy, Machine
from jaxmoe.hardware.energy import Joules, added
from jaxmoe.latency.around import AbstractStages, NodeWork, Steps
from jaxmoe.latency.demand import (
    Decisions,
    Demand,
    LayerCosts,
    Traffic,
    Work,
    expert_flops,
    expert_seconds,
    lower,
    lower_movement,
    moved_bytes,
    roofline,
)
from jaxmoe.latency.schedule import AbstractSchedule, LayerTime, Serial
from jaxmoe.network import (
    AbstractExchange,
    AbstractTimeModel,
    StageTime,
    Visits,
    decided_visits,
    replicated_visits,
    sharded_visits,
)
from jaxmoe.network.collectives import price_rounds
from jaxmoe.network.domains import scaled
from jaxmoe.relax import AbstractReduction, AbstractSupport, HardMax, HardSupport, largest
from jaxmoe.traces.batches import Batch, merge_tokens, micro_batches, over_batches

# One MoE layer on one machine: decisions are lowered to stages of demand, and these are priced.
#
# Every function here is for one placement of one layer and one batch. `vmap` lifts it to many of each, and to many
# machines: all numbers are arrays.


SHARING = 4  # rows per token up to which merged batches pay, where they share the work of their rows


class Merging(NamedTuple):
    """When tokens of the same experts are alike; see `jaxmoe.traces.merge_tokens`."""

    by_slot: bool = False
    turns: int = 1
    rows_per_token: int = 1


class Priced(NamedTuple):
    """A stage: its seconds, busy seconds of its resources by kind, and energy by resource, J."""

    seconds: Float[Array, ""]
    busy: dict[str, Float[Array, " resource"]]
    energy: Joules


class LayerModel(eqx.Module):
    """A machine and the costs of one MoE layer on it."""

    machine: Machine
    costs: LayerCosts
    time_model: AbstractTimeModel  # of all communication
    exchange: AbstractExchange
    mode: Literal["sharded", "replicated"] = eqx.field(static=True)
    schedule: AbstractSchedule = Serial()
    around: tuple[AbstractStages, ...] = ()  # stages beside those of experts, such as attention

    def __call__(
        self,
        share: Float[Array, "expert node"],
        batch: Batch,
        exchange: AbstractExchange | None = None,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        """Time of `batch` under the placement `share`. Exact unless told otherwise.

        `exchange` defaults to the model's own, `reduction` to the hard maximum, `support` to share > 0.
        """
        return self.decided(Decisions(share, exchange), batch, reduction, support)

    def decided(
        self,
        decisions: Decisions,
        batch: Batch,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        """Time of `batch` under all that was decided for it."""
        reduction = HardMax() if reduction is None else reduction
        support = HardSupport() if support is None else support
        batch = decisions.tokens(batch)
        times = self._scheduled(self._parts(decisions, batch, reduction, support), reduction)
        if decisions.movement is None:
            return self._with_idle(times)
        traffic = lower_movement(decisions.movement, decisions.stored, self.costs)
        seconds, busy, energy = self._price(traffic, reduction, support)
        total = times.total if decisions.movement.hidden else self._charged(times, seconds, busy, reduction)
        stages, resources = times.stages | {"movement": seconds}, times.busy | {"movement": busy}
        return self._with_idle(LayerTime(stages, resources, total, added([times.energy, energy])))

    def merged(self, batches: Batch, num_experts: int, exchange: AbstractExchange | None = None) -> Batch:
        """Drawn batches with equal tokens merged, where placement and exchange treat equal tokens alike.

        `exchange` defaults to the model's own.
        """
        merging = None if batches.logits is not None else self.merging(exchange, batches.weight.shape[1])
        return batches if merging is None else merge_tokens(batches, num_experts, *merging)

    def merging(self, exchange: AbstractExchange | None, count: int) -> Merging | None:
        """How tokens of so many batches may be merged under an exchange, `None` where they have to stay apart."""
        if self.mode != "sharded" or self.schedule.micro_batches > 1:
            return None
        alike = (self.exchange if exchange is None else exchange).alike(self.machine.topology)
        if alike is None:
            return None
        return Merging(alike.by_slot, alike.turns, min(SHARING, count) if alike.weights_last else 1)

    def _parts(
        self, decisions: Decisions, batch: Batch, reduction: AbstractReduction, support: AbstractSupport
    ) -> LayerTime:
        """Stages of every micro-batch, the leading axis."""
        parts = self.schedule.micro_batches
        if parts == 1:
            return jax.tree.map(lambda leaf: leaf[None], self._priced(decisions, batch, reduction, support))
        if decisions.served is not None:
            raise ValueError("choices decided at run time are of whole batches; use a schedule without micro-batches")
        # Where a token lives does not depend on how its batch is cut.
        batch = replace(batch, source=batch.sources(self.machine.num_nodes))
        return jax.vmap(lambda part: self._priced(decisions, part, reduction, support))(micro_batches(batch, parts))

    def visits(self, decisions: Decisions, batch: Batch, support: AbstractSupport) -> Visits:
        """Who computes what of a batch."""
        if decisions.served is not None:
            if self.mode == "replicated":
                raise ValueError("choices decided at run time are of sharded placements; give one, or no `served`")
            return decided_visits(decisions.share, batch, decisions.served, support)
        visits = sharded_visits if self.mode == "sharded" else replicated_visits
        return visits(decisions.share, batch, support)

    def _priced(
        self, decisions: Decisions, batch: Batch, reduction: AbstractReduction, support: AbstractSupport
    ) -> LayerTime:
        """Stages and busy times of a batch or a part of one; the total is not known yet."""
        exchange = self.exchange if decisions.exchange is None else decisions.exchange
        visits = self.visits(decisions, batch, support)
        stages: dict[str, Demand] = {**lower(exchange, self.machine.topology, visits, self.costs)}
        for others in self.around:
            stages |= others.lower(self.machine.topology, batch.weight.sum())
        priced = {name: self._price(demand, reduction, support) for name, demand in stages.items()}
        seconds = {name: stage.seconds for name, stage in priced.items()}
        busy = {name: stage.busy for name, stage in priced.items()}
        energy = added(stage.energy for stage in priced.values())
        return LayerTime(seconds, busy, jnp.zeros_like(seconds["compute"]), energy)

    def _price(self, demand: Demand, reduction: AbstractReduction, support: AbstractSupport) -> Priced:
        """What a stage takes. Energy counts the very bytes and FLOPs that the time does."""
        machine, known = self.machine, self.machine.energy or Energy()
        match demand:
            case Steps(rounds=rounds, unit=unit, mirrored=mirrored):
                steps = price_rounds(self.time_model, machine.topology, scaled(rounds, unit), reduction, mirrored)
                busy = {"link": steps.link_time, "port": steps.port_time}
                return Priced(steps.seconds, busy, known.of_links(steps.link_bytes))
            case NodeWork(flops=flops, weights=weights, vectors=vectors):
                return self._of_nodes(flops / machine.die.flops, flops, weights, vectors, reduction)
            case Traffic():
                phases = self._phase_times(demand)
                busy = {
                    "link": _added([phase.link_time for phase in phases]),
                    "port": _added([phase.port_time for phase in phases]),
                }
                carried = _added([phase.link_bytes for phase in phases])
                return Priced(_added([phase.total(reduction) for phase in phases]), busy, known.of_links(carried))
            case Work(visits=visits, weights=weights, vectors=vectors):
                flops = expert_flops(visits, self.costs.flops_per_token_expert)
                return self._of_nodes(self._expert_seconds(visits, support), flops, weights, vectors, reduction)

    def _of_nodes(
        self,
        seconds: Float[Array, " node"],
        flops: Float[Array, " node"],
        weights: Float[Array, " node"],
        vectors: Float[Array, " node"],
        reduction: AbstractReduction,
    ) -> Priced:
        """What nodes compute for so many seconds, while memory moves bytes for it."""
        machine, known = self.machine, self.machine.energy or Energy()
        node = roofline(machine, seconds, weights, vectors)
        moved = zip(machine.memory, moved_bytes(machine, weights, vectors), strict=True)
        energy = known.of_nodes(flops, [(level.name, each) for level, each in moved])
        return Priced(reduction(node), {"node": node}, energy)

    def _expert_seconds(self, visits: Visits, support: AbstractSupport) -> Float[Array, " node"]:
        costs = self.costs
        return expert_seconds(self.machine, visits, costs.flops_per_token_expert, costs.columns, costs.gemms, support)

    def _phase_times(self, traffic: Traffic) -> list[StageTime]:
        """Every phase of a stage: flows that run at once add up."""
        price = self.time_model.of_mirrored if traffic.mirrored else self.time_model.of_flows
        phases = []
        for flows in traffic.phases:
            first, *others = (price(self.machine.topology, each, traffic.unit) for each in flows)
            for other in others:
                first = first.beside(other)
            phases.append(first)
        return phases

    def _scheduled(self, parts: LayerTime, reduction: AbstractReduction) -> LayerTime:
        """Micro-batches, the leading axis, as one layer: stages and busy times add up, the schedule has the total."""
        total = self.schedule.total(parts.stages, reduction)
        summed = jax.tree.map(lambda leaf: leaf.sum(axis=0), parts)
        return LayerTime(summed.stages, summed.busy, total, summed.energy)

    def _with_idle(self, times: LayerTime) -> LayerTime:
        """The times with the energy that nodes take all the time, for which the total has to be known."""
        if self.machine.energy is None:
            return times
        idle = self.machine.energy.of_time(times.total, self.machine.num_nodes)
        return replace(times, energy=times.energy | idle)

    def _charged(
        self,
        times: LayerTime,
        seconds: Float[Array, ""],
        busy: dict[str, Float[Array, " resource"]],
        reduction: AbstractReduction,
    ) -> Float[Array, ""]:
        """The total with weights that travel before the stages, or beside them on links and ports that are idle."""
        if not self.schedule.in_background:
            return times.total + seconds
        stages = [each for each in (*times.busy.values(), busy) if "link" in each]
        served = jnp.concatenate([_added([each[kind] for each in stages]) for kind in ("link", "port")])
        return jnp.maximum(jnp.maximum(times.total, reduction(served)), seconds)


def _added(seconds: list[Float[Array, "*resource"]]) -> Float[Array, "*resource"]:
    return jnp.stack(seconds).sum(axis=0)


# Judging placements on many batches: seconds of every layer and batch, and how busy resources are on average.


@eqx.filter_jit
def evaluate(
    model: LayerModel,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange | None = None,
    served: Int[Array, "layer batch token top_k"] | None = None,
    reduction: AbstractReduction | None = None,
) -> LayerTime:
    """Times of a placement, on drawn batches, leaves [layer, batch, ...], or merged ones. Exact without a `reduction`.

    Stages and totals are [layer, batch], busy times [layer, resource], means over batches. `served` is as in
    `Decisions`, for drawn batches.
    """

    def layer(share: Float[Array, "expert node"], batches: Batch, served: Array | None) -> LayerTime:
        def one(batch: Batch, served: Array | None) -> LayerTime:
            return model.decided(Decisions(share, exchange, served), batch, reduction)

        if served is None:
            times = over_batches(lambda batch: one(batch, None), batches, share.shape[1])
        else:
            times = jax.vmap(one)(batches, served)
        return eqx.tree_at(lambda t: t.busy, times, jax.tree.map(lambda leaf: leaf.mean(axis=0), times.busy))

    return jax.lax.map(lambda given: layer(*given), (share, batches, served))


def is_tensor_parallel(share: np.ndarray) -> bool:
    """Whether every expert is spread evenly over the whole machine, so that a ring can reduce (hd_moe Eq. 4)."""
    return bool(np.allclose(share, 1 / share.shape[-1], rtol=1e-4))


# The time between two tokens: the MoE layers, and what every token passes beside the routed experts.
#
# hd_moe reports whole-model times and does not say how attention is mapped, how long its context is, or how fast a
# node's memory is. Assumed here: attention, dense FFNs and shared experts are divided evenly among all nodes (tensor
# parallelism), a step decodes one token of every request, and what the nodes would have to send each other meanwhile
# is left out, for the published whole-model times do not depend on the links but through the MoE layers.


class EvenPart(eqx.Module):
    """A part of the model that all nodes share evenly, all its layers together."""

    flops_per_token: Float[Array, ""]
    weight_bytes: Float[Array, ""]  # read once a step
    bytes_per_token: Float[Array, ""]  # read for every token: the context's keys and values

    def seconds(self, machine: Machine, tokens: Float[Array, ""]) -> Float[Array, ""]:
        """Time of one step of `tokens` tokens: that of the slowest node, s."""
        nodes = machine.num_nodes
        moved = (self.weight_bytes + self.bytes_per_token * tokens) / nodes
        even = jnp.broadcast_to(tokens / nodes, (nodes,))
        seconds = even * self.flops_per_token / machine.die.flops
        return largest(roofline(machine, seconds, jnp.broadcast_to(moved, (nodes,)), jnp.zeros(nodes)))


class BesideExperts(NamedTuple):
    """Seconds of one step beside the routed experts."""

    attention: Float[Array, ""]
    dense: Float[Array, ""]  # FFNs of dense layers
    shared: Float[Array, ""]  # shared experts

    @property
    def total(self) -> Float[Array, ""]:
        return self.attention + self.dense + self.shared


class EvenParts(eqx.Module):
    """Attention, dense FFNs and shared experts of a model on a machine."""

    machine: Machine
    attention: EvenPart
    dense: EvenPart
    shared: EvenPart

    @eqx.filter_jit
    def __call__(self, tokens: Float[Array, ""]) -> BesideExperts:
        """Time of one step of `tokens` tokens, s. TBT is its total plus the times of the MoE layers."""
        parts = (self.attention, self.dense, self.shared)
        return BesideExperts(*(part.seconds(self.machine, tokens) for part in parts))
