"""Dies that fetch their own experts from memory, one after the other: expert parallelism off-loaded.

Source: the baselines of expert_streaming_fse_dp VI-A. Every expert has one die, which loads it whole and computes all
its tokens; serially, or with `prefetch` into a second buffer while it computes the expert before.
"""

from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine.decisions import AbstractDecisions
from jaxmoe.engine.demand import AbstractDemand, Usage
from jaxmoe.engine.lowering import lower_tokens
from jaxmoe.engine.slices import SliceCosts
from jaxmoe.engine.stage import Stage, Stages, chained
from jaxmoe.hardware import Machine
from jaxmoe.network import replicated_visits
from jaxmoe.relax import AbstractReduction, AbstractSupport
from jaxmoe.traces.batches import Batch

if TYPE_CHECKING:
    from jaxmoe.engine.stream_layer import StreamLayer


class HostDecisions(AbstractDecisions):
    """The die that loads and computes each expert, 1 there."""

    host: Float[Array, "*lead expert die"]
    prefetch: bool = eqx.field(static=True)

    def lower(self, layer: "StreamLayer", batch: Batch, support: AbstractSupport) -> Stages:
        visits = replicated_visits(self.host, batch, support)
        costs, topology = layer.costs, layer.machine.topology
        dispatch, _, combine = lower_tokens(layer.exchange, topology, visits, costs.costs, layer.time_model, support)
        counts = batch.weight @ batch.choices(self.host.shape[0])
        # A part of the tokens would load every expert again.
        compute = Stage("compute", OffloadPipeline(costs, counts, self.host, self.prefetch), split="whole")
        return chained((layer.attention_stage(batch.weight.sum()), dispatch, compute, combine))


class OffloadPipeline(AbstractDemand):
    """Loads and products of dies that have `tokens` of each expert on all dies; experts without any cost nothing."""

    server = "nodes"
    costs: SliceCosts
    tokens: Float[Array, " expert"]
    host: Float[Array, "expert die"]
    prefetch: bool = eqx.field(static=True)

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        costs, memory = self.costs, machine.memory[-1]
        on_host = self.tokens[:, None] * self.host
        each, here = costs.part(machine, on_host, jnp.ones(())), on_host.sum(axis=0)
        load = costs.costs.expert_bytes / memory.bandwidth + costs.control
        loads = (self.tokens > 0) @ self.host  # of each die
        read = loads * costs.costs.expert_bytes
        return costs.usage(
            machine,
            reduction(self._last(machine, each, load)),
            compute=each.sum(axis=0),
            load=jax.ops.segment_sum(loads, memory.channel, load.shape[0]) * load,
            loaded=read,
            read=read,
            choices=here,
            vectors=here,
        )

    def _last(
        self, machine: Machine, each: Float[Array, "expert die"], load: Float[Array, " channel"]
    ) -> Float[Array, " die"]:
        """When every die has computed its experts, whose products take `each`, s."""
        memory, dies = machine.memory[-1], machine.num_nodes

        def step(state, expert):
            channels, last, older = state
            die = jnp.argmax(self.host[expert])
            channel = memory.channel[die]
            begin = jnp.maximum(channels[channel], (older if self.prefetch else last)[die])
            loaded = begin + load[channel]
            done = jnp.maximum(loaded, last[die]) + each[expert, die]
            present = self.tokens[expert] > 0
            after = (channels.at[channel].set(loaded), last.at[die].set(done), older.at[die].set(last[die]))
            return jax.tree.map(lambda new, old: jnp.where(present, new, old), after, state), None

        idle = (memory.latency, jnp.zeros(dies), jnp.zeros(dies))
        (_, last, _), _ = jax.lax.scan(step, idle, turns_of(self.host))
        return last


def turns_of(host: Float[Array, "expert die"]) -> Int[Array, " expert"]:
    """Experts in the order in which dies begin to load them: each die by number, the dies side by side."""
    rank = (jnp.cumsum(host, axis=0) * host).sum(axis=1)
    return jnp.lexsort((jnp.argmax(host, axis=1), rank))
