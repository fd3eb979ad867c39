"""Slices that stay on their dies while tokens go round: the other half of naive FSE-DP.

Source: expert_streaming_fse_dp section III, Fig. 3b. Every die loads its slice of an expert. The tokens of the expert
on each die are one sequence; in as many phases as there are dies it passes all of them along a ring, and takes its
partial results with it. After the last phase the results go home, one step further.
"""

from typing import TYPE_CHECKING, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.engine.decisions import AbstractDecisions
from jaxmoe.engine.demand import AbstractDemand, Usage
from jaxmoe.engine.slices import SliceCosts, send_latency, send_slowness
from jaxmoe.engine.stage import Stage, Stages, chained
from jaxmoe.hardware import Machine
from jaxmoe.relax import AbstractReduction, AbstractSupport

if TYPE_CHECKING:
    from jaxmoe.engine.stream_layer import StreamLayer, StreamTokens


class RingDecisions(AbstractDecisions):
    """Tokens of every expert on each die, and the order of dies in which they go round. Slices are one piece each."""

    on_dies: Float[Array, "*lead expert die"]
    ring: tuple[int, ...] = eqx.field(static=True)
    prefetch: bool = eqx.field(static=True)

    def lower(self, layer: "StreamLayer", batch: "StreamTokens", support: AbstractSupport) -> Stages:
        compute = Stage("compute", RingPipeline(layer.costs, self), split="whole")
        return chained((layer.attention_stage(batch.count), compute))


class RingPipeline(AbstractDemand):
    """Loads of slices, products, and sequences of tokens that go on along the ring.

    Experts go by number, those without tokens cost nothing. A die loads a slice when it is done with the one before, or
    with prefetch with the one before that. A sequence goes on when it is computed.
    """

    server = "machine"
    costs: SliceCosts
    decisions: RingDecisions

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        costs, memory, tokens = self.costs, machine.memory[-1], self.decisions.on_dies
        ring = np.array(self.decisions.ring)
        following, sizes, one = np.roll(ring, -1), costs.costs, jnp.ones(len(ring))
        seconds, compute = _rolled(machine, costs, self.decisions)
        loads, rounds = (tokens.sum(axis=1) > 0).sum(), (tokens > 0).sum()  # of experts, and of sequences
        size = sizes.expert_bytes / len(ring)  # of a slice
        # Every token passes every link of the ring; on its last way home it is a result alone.
        way = jnp.zeros((len(ring), len(ring))).at[ring, following].set(1.0)
        there = sizes.dispatch_bytes * (tokens.sum() - tokens.sum(axis=0))
        sent = way * (there + sizes.combine_bytes * tokens.sum())
        pace = send_latency(machine.topology) + costs.control
        return costs.usage(
            machine,
            seconds,
            compute=compute,
            load=loads * memory.sharers * (size / memory.bandwidth + costs.control),
            loaded=loads * size * one,
            read=rounds * size * one,
            choices=tokens.sum() / len(ring) * one,
            vectors=tokens.sum() * one,
            send=sent * send_slowness(machine.topology) + way * rounds * pace,
            sent=sent,
        )


class _State(NamedTuple):
    """When each is free, in the order of the ring; `older` is when the expert before the last was done."""

    channels: Float[Array, " channel"]
    arrays: Float[Array, " die"]
    senders: Float[Array, " die"]
    last: Float[Array, " die"]
    older: Float[Array, " die"]
    home: Float[Array, ""]  # when the last result is home


def _rolled(
    machine: Machine, costs: SliceCosts, decisions: RingDecisions
) -> tuple[Float[Array, ""], Float[Array, " die"]]:
    """Seconds until all results are home, and seconds that the arrays are busy, by die."""
    memory, dies, ring, prefetch = machine.memory[-1], costs.dies, np.array(decisions.ring), decisions.prefetch
    whole = jax.tree.map(jnp.asarray, costs.costs)
    load = whole.expert_bytes / dies / memory.bandwidth + costs.control
    channel = memory.channel[ring]
    turn = (channel[:, None] == channel[None]) & (jnp.arange(dies)[None] <= jnp.arange(dies)[:, None])
    following = np.roll(ring, -1)
    slowness, latency = (each(machine.topology)[ring, following] for each in (send_slowness, send_latency))
    back = jnp.argsort(ring)

    def products(sequences: Float[Array, " die"]) -> Float[Array, " die"]:
        """Of one slice and what is on each die in a phase, along the ring."""
        return costs.part(machine, sequences[back][None], jnp.asarray(1 / dies))[0][ring]

    def sent(at: Array, free: Array, sequences: Array, size: Array) -> Array:
        """When sequences are at the next die; those that have no tokens take no time."""
        seconds = sequences * size * slowness + latency + costs.control
        return jnp.where(sequences > 0, jnp.maximum(at, free) + seconds, at)

    def expert(state: _State, counts: Float[Array, " die"]) -> tuple[_State, Float[Array, " die"]]:
        ready = jnp.maximum(state.channels[channel], state.older if prefetch else state.last)
        loaded = ready + turn.sum(axis=1) * load[channel]
        channels = state.channels.at[channel].max(loaded)

        def phase(carry, number):
            arrays, senders, arrived, sequences, busy = carry
            seconds = products(sequences)
            done = jnp.where(sequences > 0, jnp.maximum(jnp.maximum(arrived, loaded), arrays) + seconds, arrived)
            size = jnp.where(number < dies - 1, whole.dispatch_bytes, 0) + whole.combine_bytes
            there = sent(done, senders, sequences, size)
            moved = jnp.where(sequences > 0, there, senders)
            arrays = jnp.where(sequences > 0, done, arrays)
            return (arrays, moved, jnp.roll(there, 1), jnp.roll(sequences, 1), busy + seconds), None

        start = (state.arrays, state.senders, jnp.zeros(dies), counts, jnp.zeros(dies))
        (arrays, senders, home, _, busy), _ = jax.lax.scan(phase, start, jnp.arange(dies))
        done = jnp.maximum(arrays, loaded)
        after = _State(channels, arrays, senders, done, state.last, jnp.maximum(state.home, home.max()))
        present = counts.sum() > 0
        return jax.tree.map(lambda new, old: jnp.where(present, new, old), after, state), jnp.where(present, busy, 0)

    idle = jnp.zeros(dies)
    state = _State(memory.latency, idle, idle, idle, idle, jnp.zeros(()))
    state, busy = jax.lax.scan(expert, state, decisions.on_dies[:, ring])
    return state.home, busy.sum(axis=0)[back]
