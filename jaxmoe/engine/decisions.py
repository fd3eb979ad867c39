"""Decisions for one layer and step: data, and no times. Stages are lowered from them."""

import abc
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine.demand import Loads, Traffic
from jaxmoe.engine.gating import GateBias
from jaxmoe.engine.lowering import lower_tokens
from jaxmoe.engine.serving import AbstractServing
from jaxmoe.engine.stage import Charge, Stage, Stages, chained
from jaxmoe.network import (
    AbstractExchange,
    Flows,
    Phases,
    Visits,
    decided_visits,
    replicated_visits,
    sharded_visits,
)
from jaxmoe.placement.slots import share_of
from jaxmoe.relax import AbstractSupport
from jaxmoe.traces.batches import Batch

if TYPE_CHECKING:
    from jaxmoe.engine.layer import Layer


class AbstractDecisions(eqx.Module):
    """Data that was decided for a layer; `vmap` adds leading axes. Each kind knows its layer and its tokens."""

    def tokens(self, batch: Any, support: AbstractSupport) -> Any:
        """The batch with what was decided for its tokens."""
        return batch

    @abc.abstractmethod
    def lower(self, layer: Any, batch: Any, support: AbstractSupport) -> Stages:
        """Stages of a batch, or of a micro-batch."""

    def whole(self, layer: Any) -> Stages:
        """Stages that run once for a batch, not for each micro-batch, such as movements of weights."""
        return ()

    def check(self, layer: Any) -> None:
        """Raise `ValueError` where the layer cannot carry out what was decided."""


# Weights that travel.


class AbstractMovement(eqx.Module):
    """Weights that travel in a step. A `hidden` movement has the links to itself while the layer before runs: its time
    is a stage, but no part of the total."""

    @abc.abstractmethod
    def stage(self, layer: "Layer", stored: Float[Array, "expert node"], charge: Charge) -> Stage:
        """The stage of the movement; `stored` is the part of every expert that each node stores."""


class Movement(AbstractMovement):
    """A multicast of every expert from the nodes that store it.

    `destination` is 1 where a node gets a copy. Each host sends its own part along the tree of paths. Where at most so
    many experts move, `most` spares the flows of all others.
    """

    destination: Float[Array, "*lead expert node"]
    hidden: bool = eqx.field(static=True, default=False)
    most: int | None = eqx.field(static=True, default=None)

    def phases(self, resident: Float[Array, "expert node"]) -> Phases:
        """The mirror of the flows, in experts: from the destinations to the hosts, one for each expert and host."""
        destination, nodes = self.destination, resident.shape[1]
        if self.most is not None:
            _, moved = jax.lax.top_k(destination.max(axis=1), self.most)
            destination, resident = destination[moved], resident[moved]
        part = resident.ravel()
        receivers = jnp.repeat(destination, nodes, axis=0)
        hosts = jnp.tile(jnp.eye(nodes, dtype=part.dtype), (resident.shape[0], 1))
        return ((Flows(receivers, hosts, part, (part > 0).astype(part.dtype), route="tree"),),)

    def stage(self, layer: "Layer", stored: Float[Array, "expert node"], charge: Charge) -> Stage:
        demand = Traffic(self.phases(stored), layer.costs.expert_bytes, layer.time_model, mirrored=True)
        return Stage("movement", demand, split="whole", charge="hidden" if self.hidden else charge)


class Migration(AbstractMovement):
    """Experts that travel from node to node while inference waits: the busiest link counts.

    `carried` are the experts that every link carries for all layers, `part` the layer's part of them: layers share the
    wait.
    """

    carried: Float[Array, "*lead link"]
    part: Float[Array, "*lead"]

    def lower(self, expert_bytes: Float[Array, ""]) -> Stage:
        """The stage of the layer's part of the wait."""
        demand = Loads(self.carried * (self.part * expert_bytes), jnp.zeros(()))
        return Stage("migration", demand, split="whole", charge="movement")

    def stage(self, layer: "Layer", stored: Float[Array, "expert node"], charge: Charge) -> Stage:
        return self.lower(layer.costs.expert_bytes)


# Layers whose tokens go to where experts are placed.


class Decisions(AbstractDecisions):
    """A placement and what a method changes about it.

    `share` says which node computes which part of every expert. `resident` says which node stores it, where that is
    another: the rest has to be moved. `served` names the node that computes a choice whole, -1 as the expert is shared.
    Without an `exchange` the model's own is used. `experts` are the choices of a gate that changes them, and `source`
    the nodes where tokens live, in place of the batch's own. A `gate` chooses anew from the logits of the batch. With
    a rule of `serving`, `share` is of copies of experts, and each choice is served by the copy that the rule names.
    `movements` are weights that travel. `facts` are figures of the method's own, by name.
    """

    share: Float[Array, "*lead expert node"]
    exchange: AbstractExchange | None = None
    served: Int[Array, "*lead token top_k"] | None = None
    resident: Float[Array, "*lead expert node"] | None = None
    movements: tuple[AbstractMovement, ...] = ()
    experts: Int[Array, "*lead token top_k"] | None = None
    source: Int[Array, "*lead token"] | None = None
    gate: GateBias | None = None
    facts: Mapping[str, Any] = eqx.field(default_factory=dict)
    serving: AbstractServing | None = None

    def tokens(self, batch: Batch, support: AbstractSupport) -> Batch:
        batch = self.choices(batch)
        return batch if self.serving is None else self.serving(self.share, batch, support)

    def choices(self, batch: Batch) -> Batch:
        """The batch with what was decided for its tokens, choices naming experts."""
        decided = {"experts": self.experts, "source": self.source}
        given = {name: value for name, value in decided.items() if value is not None}
        batch = replace(batch, **given) if given else batch
        return batch if self.gate is None else self.gate(batch)

    @property
    def stored(self) -> Float[Array, "*lead expert node"]:
        """The part of every expert that each node stores."""
        return self.share if self.resident is None else self.resident

    def check(self, layer: "Layer") -> None:
        if self.serving is not None and (layer.mode == "replicated" or self.served is not None):
            raise ValueError("copies are sharded, and their rule says which serves; give a sharded layer, no `served`")
        if self.served is None:
            return
        if layer.schedule.micro_batches > 1:
            raise ValueError("choices decided at run time are of whole batches; use a schedule without micro-batches")
        if layer.mode == "replicated":
            raise ValueError("choices decided at run time are of sharded placements; give one, or no `served`")

    def visits(self, layer: "Layer", batch: Batch, support: AbstractSupport) -> Visits:
        """Who computes what of a batch."""
        if self.served is not None:
            return decided_visits(self.share, batch, self.served, support)
        visits = sharded_visits if layer.mode == "sharded" else replicated_visits
        return visits(self.share, batch, support)

    def lower(self, layer: "Layer", batch: Batch, support: AbstractSupport) -> Stages:
        exchange = layer.exchange if self.exchange is None else self.exchange
        visits = self.visits(layer, batch, support)
        topology, times = layer.machine.topology, layer.time_model
        experts = lower_tokens(exchange, topology, visits, layer.costs, times, support, self.serving)
        extras = [each.lower(topology, batch.weight.sum(), times) for each in layer.extras]
        before, after = ([stage for each in extras for stage in each[side]] for side in (0, 1))
        return chained((*before, *experts, *after))

    def whole(self, layer: "Layer") -> Stages:
        charge: Charge = "background" if layer.schedule.in_background else "movement"
        stages = [movement.stage(layer, self.stored, charge) for movement in self.movements]
        return tuple(
            stage
            if (count := sum(each.name == stage.name for each in stages[:at])) == 0
            else replace(stage, name=f"{stage.name}_{count + 1}")
            for at, stage in enumerate(stages)
        )


class SlotDecisions(AbstractDecisions):
    """Slots of nodes that hold experts; all copies of an expert serve alike.

    `source` are the homes of tokens, in place of the batch's own. `facts` are figures of the method's own, by name.
    """

    slots: Int[Array, "*lead node slot"]
    experts: int = eqx.field(static=True)  # of a layer
    source: Int[Array, "*lead token"] | None = None
    movement: Migration | None = None
    facts: Mapping[str, Any] = eqx.field(default_factory=dict)

    def tokens(self, batch: Batch, support: AbstractSupport) -> Batch:
        return batch if self.source is None else replace(batch, source=self.source)

    def lower(self, layer: "Layer", batch: Batch, support: AbstractSupport) -> Stages:
        return Decisions(share_of(self.slots, self.experts)).lower(layer, batch, support)

    def whole(self, layer: "Layer") -> Stages:
        return self.movements(layer.costs.expert_bytes)

    def movements(self, expert_bytes: Float[Array, ""]) -> Stages:
        """The stage of weights that inference waits for, where any may move."""
        return () if self.movement is None else (self.movement.lower(expert_bytes),)
