"""How long dies take that fetch their own experts from memory, one after the other: expert parallelism off-loaded.

Source: the baselines of expert_streaming_fse_dp VI-A. Every expert has one die, which loads it whole and computes all
its tokens; serially, or with `prefetch` into a second buffer while it computes the expert before.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine.streaming import StreamCosts


def turns_of(host: Float[Array, "expert die"]) -> Int[Array, " expert"]:
    """Experts in the order in which dies begin to load them: each die by number, the dies side by side."""
    rank = (jnp.cumsum(host, axis=0) * host).sum(axis=1)
    return jnp.lexsort((jnp.argmax(host, axis=1), rank))


def offloaded_seconds(
    costs: StreamCosts, tokens: Float[Array, " expert"], host: Float[Array, "expert die"], prefetch: bool
) -> tuple[Float[Array, ""], Float[Array, " die"]]:
    """Seconds until every die has computed its experts, and seconds that the arrays are busy.

    `tokens` are those of each expert on all dies, `host` is 1 at the die of each; experts without tokens cost nothing.
    """
    memory, dies = costs.machine.memory[-1], costs.dies
    each = costs.whole(tokens[:, None] * host)
    load = costs.costs.expert_bytes / memory.bandwidth + costs.control

    def step(state, expert):
        channels, last, older = state
        die = jnp.argmax(host[expert])
        channel = memory.channel[die]
        begin = jnp.maximum(channels[channel], (older if prefetch else last)[die])
        loaded = begin + load[channel]
        done = jnp.maximum(loaded, last[die]) + each[expert, die]
        present = tokens[expert] > 0
        after = (channels.at[channel].set(loaded), last.at[die].set(done), older.at[die].set(last[die]))
        return jax.tree.map(lambda new, old: jnp.where(present, new, old), after, state), None

    idle = (memory.latency, jnp.zeros(dies), jnp.zeros(dies))
    (_, last, _), _ = jax.lax.scan(step, idle, turns_of(host))
    return last.max(), each.sum(axis=0)
