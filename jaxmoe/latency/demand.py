"""What is decided for a layer, lowered to stages of demand; and how long nodes compute."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.latency.around import NodeWork, Steps
from jaxmoe.latency.gating import GateBias
from jaxmoe.network import AbstractExchange, Flows, Phases, Visits
from jaxmoe.network.exchange import Rounds
from jaxmoe.relax import AbstractSupport
from jaxmoe.traces.batches import Batch

# How long nodes compute: FLOPs over rate, GEMM by GEMM where the die says how well it does them, and memory.


def roofline(
    machine: Machine,
    seconds: Float[Array, " node"],
    weights: Float[Array, " node"],
    vectors: Float[Array, " node"],
) -> Float[Array, " node"]:
    """The larger of the seconds of compute and those of memory, for every node (hd_moe Eq. 1 knows compute alone).

    `weights`, B, pass every memory level on their way to the die, `vectors`, B, the nearest alone. A node waits for all
    that its channel moves, for whichever node.
    """
    for level, moved in zip(machine.memory, moved_bytes(machine, weights, vectors), strict=True):
        seconds = jnp.maximum(seconds, level.seconds(moved)[level.channel])
    return seconds


def moved_bytes(
    machine: Machine, weights: Float[Array, " node"], vectors: Float[Array, " node"]
) -> list[Float[Array, " node"]]:
    """Bytes that every node moves to and from each level of memory; arguments as for `roofline`."""
    return [weights + vectors if depth == 0 else weights for depth, _ in enumerate(machine.memory)]


def expert_seconds(
    machine: Machine,
    visits: Visits,
    flops_per_token_expert: Float[Array, ""],
    columns: Float[Array, ""],
    gemms: Float[Array, ""],
    support: AbstractSupport,
) -> Float[Array, " node"]:
    """Seconds that every node multiplies matrices for the experts of a batch (hd_moe Eq. 1)."""
    flops = machine.die.flops
    if machine.die.gemm is None:
        return expert_flops(visits, flops_per_token_expert) / flops
    present = support.presence(support.amount(visits.part)) * jnp.minimum(visits.rows, 1)
    each = machine.die.gemm.seconds(visits.rows, visits.part, present, flops / flops_per_token_expert, columns, gemms)
    return each.sum(axis=0)


def expert_flops(visits: Visits, flops_per_token_expert: Float[Array, ""]) -> Float[Array, " node"]:
    """FLOPs of every node for the experts of a batch, without what tiles are filled up with."""
    return visits.work * flops_per_token_expert


# Decisions, and what they ask of the machine: the demand of every stage of a layer. No times yet.


class Movement(eqx.Module):
    """Weights that travel in a step: a multicast of every expert from the nodes that store it.

    `destination` is 1 where a node gets a copy. Each host sends its own part along the tree of paths. A `hidden`
    movement has the links to itself while the layer before runs: its time is a stage, but no part of the total. Where
    at most so many experts move, `most` spares the flows of all others.
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


class Decisions(eqx.Module):
    """What is decided for one layer and step: data, and no times. `vmap` adds leading axes.

    `share` says which node computes which part of every expert. `resident` says which node stores it, where that is
    another: the rest has to be moved. `served` names the node that computes a choice whole, -1 as the expert is shared.
    Without an `exchange` the model's own is used. `experts` are the choices of a gate that changes them, and `source`
    the nodes where tokens live, in place of the batch's own. A `gate` chooses anew from the logits of the batch.
    """

    share: Float[Array, "*lead expert node"]
    exchange: AbstractExchange | None = None
    served: Int[Array, "*lead token top_k"] | None = None
    resident: Float[Array, "*lead expert node"] | None = None
    movement: Movement | None = None
    experts: Int[Array, "*lead token top_k"] | None = None
    source: Int[Array, "*lead token"] | None = None
    gate: GateBias | None = None

    def tokens(self, batch: Batch) -> Batch:
        """The batch with what was decided for its tokens."""
        decided = {"experts": self.experts, "source": self.source}
        given = {name: value for name, value in decided.items() if value is not None}
        batch = replace(batch, **given) if given else batch
        return batch if self.gate is None else self.gate(batch)

    @property
    def stored(self) -> Float[Array, "*lead expert node"]:
        """The part of every expert that each node stores."""
        return self.share if self.resident is None else self.resident


class Traffic(eqx.Module):
    """Flows on the network, whose hidden vectors, or experts, are of `unit` bytes each.

    Mirrored, messages go from destination to source over the same links reversed (hd_moe IV-C1).
    """

    phases: Phases
    unit: Float[Array, ""]
    mirrored: bool = eqx.field(static=True, default=False)


class Work(eqx.Module):
    """What nodes compute, as visits, and the bytes that they move to and from memory for it."""

    visits: Visits
    weights: Float[Array, " node"]  # B
    vectors: Float[Array, " node"]  # B


Demand = Traffic | Work | NodeWork | Steps


class LayerCosts(eqx.Module):
    """What a token costs in a layer: bytes, FLOPs and shapes of products."""

    combine_bytes: Float[Array, ""]  # B: one hidden vector as combine sends it
    dispatch_bytes: Float[Array, ""]  # B: one as dispatch sends it, with its metadata
    expert_bytes: Float[Array, ""]  # B: weights of one expert
    flops_per_token_expert: Float[Array, ""]
    columns: Float[Array, ""]  # intermediate size of an expert
    gemms: Float[Array, ""]  # products that an expert's FFN takes


def lower(
    exchange: AbstractExchange, topology: AbstractTopology, visits: Visits, costs: LayerCosts
) -> dict[str, Demand]:
    """The demand of the stages that a batch passes: dispatch, compute and combine."""
    sent = exchange(topology, visits)
    copies = visits.weight @ visits.visited
    work = Work(
        visits,
        weights=visits.read * costs.expert_bytes,
        vectors=copies * (costs.dispatch_bytes + costs.combine_bytes),  # read in, written out
    )
    if isinstance(sent, Rounds):
        dispatch, combine = Steps(sent, costs.dispatch_bytes, mirrored=True), Steps(sent, costs.combine_bytes)
        return {"dispatch": dispatch, "compute": work, "combine": combine}
    return {
        "dispatch": Traffic(sent[::-1], costs.dispatch_bytes, mirrored=True),
        "compute": work,
        "combine": Traffic(sent, costs.combine_bytes),
    }


def lower_movement(movement: Movement, stored: Float[Array, "expert node"], costs: LayerCosts) -> Traffic:
    """The demand of weights that travel from the nodes that store them, once for the whole batch."""
    return Traffic(movement.phases(stored), costs.expert_bytes, mirrored=True)
