"""How long experts take whose slices stay on their dies while tokens go round: the other half of naive FSE-DP.

Source: expert_streaming_fse_dp section III, Fig. 3b. Every die loads its slice of an expert. The tokens of the expert
on each die are one sequence; in as many phases as there are dies it passes all of them along a ring, and takes its
partial results with it. After the last phase the results go home, one step further.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.engine.streaming import StreamCosts, send_latency, send_slowness


class _State(NamedTuple):
    """When each is free, in the order of the ring; `older` is when the expert before the last was done."""

    channels: Float[Array, " channel"]
    arrays: Float[Array, " die"]
    senders: Float[Array, " die"]
    last: Float[Array, " die"]
    older: Float[Array, " die"]
    home: Float[Array, ""]  # when the last result is home


def circulating_seconds(
    costs: StreamCosts, tokens: Float[Array, "expert die"], ring: Int[np.ndarray, " die"], prefetch: bool
) -> tuple[Float[Array, ""], Float[Array, " die"]]:
    """Seconds until all results are home, and seconds that the arrays are busy, by die; slices are never cut further.

    Experts go by number, those without tokens cost nothing. A die loads a slice when it is done with the one before,
    or with `prefetch` with the one before that. A sequence goes on when it is computed.
    """
    memory, dies, phases = costs.machine.memory[-1], costs.dies, len(ring)
    whole = jax.tree.map(jnp.asarray, costs.costs)
    load = whole.expert_bytes / dies / memory.bandwidth + costs.control
    channel = memory.channel[ring]
    turn = (channel[:, None] == channel[None]) & (jnp.arange(dies)[None] <= jnp.arange(dies)[:, None])
    following = np.roll(ring, -1)
    topology = costs.machine.topology
    slowness, latency = (each(topology)[ring, following] for each in (send_slowness, send_latency))
    back = jnp.argsort(ring)

    def products(sequences: Float[Array, " die"]) -> Float[Array, " die"]:
        """Of one slice and what is on each die in a phase, along the ring."""
        return costs.part(sequences[back][None], jnp.asarray(1 / dies))[0][ring]

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
            size = jnp.where(number < phases - 1, whole.dispatch_bytes, 0) + whole.combine_bytes
            there = sent(done, senders, sequences, size)
            moved = jnp.where(sequences > 0, there, senders)
            arrays = jnp.where(sequences > 0, done, arrays)
            return (arrays, moved, jnp.roll(there, 1), jnp.roll(sequences, 1), busy + seconds), None

        start = (state.arrays, state.senders, jnp.zeros(dies), counts, jnp.zeros(dies))
        (arrays, senders, home, _, busy), _ = jax.lax.scan(phase, start, jnp.arange(phases))
        done = jnp.maximum(arrays, loaded)
        after = _State(channels, arrays, senders, done, state.last, jnp.maximum(state.home, home.max()))
        present = counts.sum() > 0
        return jax.tree.map(lambda new, old: jnp.where(present, new, old), after, state), jnp.where(present, busy, 0)

    idle = jnp.zeros(dies)
    state = _State(memory.latency, idle, idle, idle, idle, jnp.zeros(()))
    state, busy = jax.lax.scan(expert, state, tokens[:, ring])
    return state.home, busy.sum(axis=0)[back]
