"""A layer whose experts are loaded from memory in every step, while its tokens stay on dies or go to them."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxmoe.engine.attention import EvenPart
from jaxmoe.engine.decisions import AbstractDecisions
from jaxmoe.engine.demand import Fixed, InTurn, Matrix
from jaxmoe.engine.layer import AbstractLayer
from jaxmoe.engine.price import price
from jaxmoe.engine.schedule import AbstractSchedule, Serial
from jaxmoe.engine.slices import SliceCosts
from jaxmoe.engine.stage import Stage
from jaxmoe.engine.streaming import NONE, StreamDecisions
from jaxmoe.engine.streaming_time import LoadRules
from jaxmoe.engine.times import ATTENTION, LayerTime
from jaxmoe.hardware import Machine
from jaxmoe.network import AbstractExchange, AbstractTimeModel
from jaxmoe.relax import AbstractReduction, AbstractSupport, HardMax, HardSupport


class StreamTokens(eqx.Module):
    """Tokens of every expert on each die, and how many tokens pass the layer; whatever the size of the batch.

    So many micro-slices may be loaded `ahead`, before the gate decides.
    """

    on_dies: Float[Array, "*lead expert die"]
    count: Float[Array, "*lead"]
    ahead: Float[Array, "*lead expert die"] | None = None


class StreamLayer(AbstractLayer):
    """A machine whose dies load experts, and the costs of one layer on it.

    `attention` is that of the layer, `scheduling` what a scheduler takes before the first expert, s. Tokens that go to
    experts take the `exchange`.
    """

    machine: Machine
    costs: SliceCosts
    attention: EvenPart | None
    scheduling: Float[Array, ""]
    time_model: AbstractTimeModel
    exchange: AbstractExchange
    schedule: AbstractSchedule = Serial()

    def time(
        self,
        decisions: AbstractDecisions,
        tokens: PyTree,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        """Time of one layer; `tokens` are `StreamTokens`, or a batch for experts that tokens go to."""
        stages = decisions.lower(self, tokens, HardSupport() if support is None else support)
        return price(self.machine, self.schedule, stages, HardMax() if reduction is None else reduction)

    def under(self, exchange: AbstractExchange) -> "StreamLayer":
        return replace(self, exchange=exchange)

    def blank(self, tokens: StreamTokens) -> StreamDecisions:
        nothing, dies = jnp.zeros_like(tokens.on_dies), self.machine.num_nodes
        following = jnp.zeros((*nothing.shape, dies))
        groups = jnp.full((*nothing.shape[:-1], 1), NONE, jnp.int32)
        return StreamDecisions(nothing, nothing, following, nothing, nothing, groups, LoadRules())

    def attention_stage(self, tokens: Float[Array, ""]) -> Stage:
        """By heads over all dies: every die has all tokens for its heads, and partial results go back (VI-C)."""
        if self.attention is None:
            return Stage("attention", Fixed(jnp.zeros(())), block=ATTENTION)
        dies = self.machine.num_nodes
        way = self.exchanged(tokens / dies * self.costs.costs.dispatch_bytes * (1 - jnp.eye(dies)))
        return Stage("attention", InTurn((self.attention.work(dies, tokens), way, way)), block=ATTENTION)

    def exchanged(self, each: Float[Array, "die die2"]) -> Matrix:
        """The demand of dies that send each other so many bytes."""
        return Matrix(each, self.time_model)

    @eqx.filter_jit
    def ahead(self, tokens: Float[Array, ""]) -> Float[Array, " die"]:
        """Micro-slices for which each die has time and slots during the attention of so many tokens."""
        memory, costs = self.machine.memory[-1], self.costs
        time = self.idle_seconds(tokens) / (memory.sharers * costs.load(self.machine))[memory.channel]
        # Slots that a trajectory needs stay free.
        return jnp.floor(jnp.clip(time, 0, jnp.maximum(jnp.floor(costs.slots) - costs.dies, 0)))

    @eqx.filter_jit
    def idle_seconds(self, tokens: Float[Array, ""]) -> Float[Array, " die"]:
        """Seconds of a layer's attention in which a die's DDR channel is idle: those beside attention's own loads."""
        memory = self.machine.memory[-1]
        usage = self.attention_stage(tokens).priced(self.machine, HardMax()).usage
        moved = usage.amount.get(memory.name, jnp.zeros(self.machine.num_nodes))
        channel = jax.ops.segment_sum(moved, memory.channel, memory.bandwidth.shape[0])
        return jnp.maximum(usage.seconds - channel / memory.bandwidth, 0)[memory.channel]
