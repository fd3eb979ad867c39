"""Experts that stream through dies: the decisions about them, and the demand for channels, arrays and links.

Source: expert_streaming_fse_dp section IV. Model and simulator are given the same decisions; what can only be decided
while it runs, such as the next group of experts for an idle die, is a rule that each carries out.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine.decisions import AbstractDecisions
from jaxmoe.engine.demand import AbstractDemand, Fixed, InTurn, Usage
from jaxmoe.engine.slices import SliceCosts
from jaxmoe.engine.stage import Stage, Stages, chained
from jaxmoe.engine.streaming_time import LoadRules, SliceDemand, grouped, stream_seconds
from jaxmoe.hardware import Machine
from jaxmoe.network.loads import link_loads
from jaxmoe.relax import AbstractReduction, AbstractSupport

if TYPE_CHECKING:
    from jaxmoe.engine.stream_layer import StreamLayer, StreamTokens

NONE = -1  # in place of an expert: a group has fewer


class StreamDecisions(AbstractDecisions):
    """Which dies the micro-slices of every expert visit, who loads them, and in which order. Shares may be relaxed.

    `on_dies` are tokens. `needed` is 1 at the dies that hold any of the expert, `following` at the die that comes after
    a die, or where the slices of a die without tokens begin. `loaders` are the parts of an expert that dies load; so
    many micro-slices are `held` from the start. `groups` of experts are loaded in turns, in their order. `moved` are
    tokens that dies send each other first. `facts` are figures of the method's own, by name.
    """

    on_dies: Float[Array, "*lead expert die"]
    needed: Float[Array, "*lead expert die"]
    following: Float[Array, "*lead expert die die2"]
    loaders: Float[Array, "*lead expert die"]
    held: Float[Array, "*lead expert die"]
    groups: Int[Array, "*lead group member"]
    rules: LoadRules
    moved: Float[Array, "*lead die die2"] | None = None
    facts: Mapping[str, Any] = eqx.field(default_factory=dict)

    def lower(self, layer: "StreamLayer", batch: "StreamTokens", support: AbstractSupport) -> Stages:
        stages = [layer.attention_stage(batch.count)]
        if self.moved is not None:  # all experts together; results come back
            sizes = layer.costs.costs
            ways = (self.moved * sizes.dispatch_bytes, self.moved.T * sizes.combine_bytes)
            stages.append(Stage("redistribution", InTurn(tuple(map(layer.exchanged, ways)))))
        stream = InTurn((Fixed(layer.scheduling), StreamPipeline(layer.costs, self)))
        # A part of the tokens would load every expert again.
        return chained((*stages, Stage("stream", stream, split="whole")))


class StreamPipeline(AbstractDemand):
    """Micro-slices that are loaded and go round the dies that need them."""

    server = "machine"
    costs: SliceCosts
    decisions: StreamDecisions

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        costs, streams = self.costs, self.decisions
        members = group_members(streams.groups, streams.on_dies.shape[0])
        trips, here = trips_of(machine, costs, streams), streams.on_dies.sum(axis=0)
        groups, sent = grouped(slice_demand(machine, costs, streams, trips), members), trips.sent.sum(axis=0)
        return costs.usage(
            machine,
            stream_seconds(machine, costs, groups, streams.rules, reduction),
            compute=groups.compute.sum(axis=0),
            load=groups.load.sum(axis=0),
            loaded=(trips.slices[:, None] * streams.loaders - streams.held).sum(axis=0) * costs.slice_bytes,
            read=streams.needed.sum(axis=0) * costs.costs.expert_bytes,
            choices=here,
            vectors=here,
            send=sent * trips.send,
            sent=sent * costs.slice_bytes,
        )


def group_members(groups: Int[Array, "group member"], experts: int) -> Float[Array, "group expert"]:
    """1 where an expert belongs to a group."""
    return jax.nn.one_hot(groups, experts, dtype=jnp.float32).sum(axis=1)


class Trips(NamedTuple):
    """Micro-slices of every expert: in all, those that dies without its tokens load, as a part, and sent ones.

    `send` are seconds of one from die to die.
    """

    slices: Float[Array, " expert"]
    outside: Float[Array, "expert die"]
    sent: Float[Array, "expert die die2"]
    send: Float[Array, "die die2"]


def trips_of(machine: Machine, costs: SliceCosts, streams: StreamDecisions) -> Trips:
    """Where micro-slices go, along the trajectories of their experts."""
    needed, following = streams.needed, streams.following
    stops = needed.sum(axis=1)
    slices = (stops > 0).astype(needed.dtype) * costs.dies * costs.micro_slices
    # By rule 5 loads go to dies with tokens in equal parts, whichever channel they come from.
    parts = needed / jnp.maximum(stops, 1)[:, None] if streams.rules.balanced else streams.loaders
    outside = parts * (1 - needed)
    # Micro-slices that begin at a die: its own, and those that dies without tokens have loaded.
    entering = slices[:, None] * (parts * needed + jnp.einsum("ed,edf->ef", outside, following))
    ends = jnp.einsum("edf,ef->ed", following, entering)  # those that end at the die before
    sent = needed * (slices[:, None] - ends) + slices[:, None] * outside
    return Trips(slices, outside, sent[:, :, None] * following, costs.send(machine))


def slice_demand(machine: Machine, costs: SliceCosts, streams: StreamDecisions, trips: Trips) -> SliceDemand:
    """Demand of every expert for memory channels, arrays and links, on its trajectory from die to die."""
    needed, loaders, memory = streams.needed, streams.loaders, machine.memory[-1]
    slices, outside, sent, each = trips
    stops = needed.sum(axis=1)
    active = (stops > 0).astype(needed.dtype)
    load, one = costs.load(machine), costs.compute(machine, streams.on_dies)
    busy = sent * each
    links = jax.vmap(lambda moved: link_loads(machine.topology, moved))(busy)
    onto = jax.nn.one_hot(memory.channel, load.shape[0], dtype=loaders.dtype)
    # The last micro-slice goes round: at every stop it is sent on while it is computed.
    hop = jnp.einsum("edf,df->ed", streams.following, each)
    around = (needed * hop).sum(axis=1) * (1 - 1 / jnp.maximum(stops, 1))
    return SliceDemand(
        slices=slices,
        load=((slices[:, None] * loaders - streams.held) @ onto) * load,
        into=(slices[:, None] * loaders) @ onto if streams.rules.apart else slices[:, None],
        compute=slices[:, None] * one,
        move=jnp.concatenate([busy.sum(axis=2), busy.sum(axis=1), links], axis=1),
        stops=active * stops + jnp.minimum(outside.sum(axis=1) * 1e6, 1),
        first=active * load.max(),
        hold=active * (load.max() + (needed * (jnp.maximum(one, hop) + hop)).sum(axis=1)),
        round=around,
        one=needed * one,
        covers=needed,
        held=streams.held.sum(axis=1),
    )
