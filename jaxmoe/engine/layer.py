"""One MoE layer on one machine, and placements timed on many batches of it.

Every function here is for one placement of one layer and one batch. `vmap` lifts it to many of each, and to many
machines: all numbers are arrays.
"""

import abc
from dataclasses import replace
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxmoe.compiling import LIGHT, SHORT
from jaxmoe.engine.attention import AbstractStages
from jaxmoe.engine.decisions import AbstractDecisions, Decisions
from jaxmoe.engine.lowering import LayerCosts
from jaxmoe.engine.price import price_parts
from jaxmoe.engine.schedule import AbstractSchedule, Serial
from jaxmoe.engine.serving import AbstractServing
from jaxmoe.engine.times import LayerTime
from jaxmoe.hardware import Machine
from jaxmoe.network import (
    AbstractExchange,
    AbstractTimeModel,
)
from jaxmoe.relax import AbstractReduction, AbstractSupport, HardMax, HardSupport
from jaxmoe.traces.batches import Batch, merge_tokens, over_batches

MOST_VISITS = 2**27  # [layer, token, choice, node] that are timed side by side: several arrays of 512 MiB
MANY_NODES = 64  # above this compiling takes longer than most plans take
SHARING = 4  # rows per token up to which merged batches pay, where they share the work of their rows


class Merging(NamedTuple):
    """When tokens of the same experts are alike; see `jaxmoe.traces.merge_tokens`."""

    by_slot: bool = False
    turns: int = 1
    rows_per_token: int = 1


class AbstractLayer(eqx.Module):
    """A layer on a machine, timed for what was decided; its tokens are of any kind that its decisions understand."""

    machine: eqx.AbstractVar[Machine]

    def under(self, exchange: AbstractExchange) -> "AbstractLayer":
        """The layer with another exchange. Raises `ValueError` where it has none to choose."""
        raise ValueError(f"a {type(self).__name__} has no exchange to choose")

    @abc.abstractmethod
    def time(
        self,
        decisions: PyTree,
        tokens: PyTree,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        """Time of a layer for `tokens` under `decisions`, such as a placement; exact without a relaxed `reduction`."""

    def in_turn(self, tokens: PyTree) -> bool:
        """Whether layers with such tokens, [layer, ...], are timed one after the other, which takes less memory."""
        return False

    @abc.abstractmethod
    def blank(self, tokens: PyTree) -> PyTree:
        """Neutral decisions, leaves [layer, ...]; times priced with them have the shapes of the first step's times."""


class Layer(AbstractLayer):
    """A machine and the costs of one MoE layer on it."""

    machine: Machine
    costs: LayerCosts
    time_model: AbstractTimeModel  # of all communication
    exchange: AbstractExchange
    mode: Literal["sharded", "replicated"] = eqx.field(static=True)
    schedule: AbstractSchedule = Serial()
    extras: tuple[AbstractStages, ...] = ()  # stages beside those of experts, such as attention

    def __call__(
        self,
        share: Float[Array, "expert node"],
        batch: Batch,
        exchange: AbstractExchange | None = None,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        """Time of `batch` under the placement `share`, the part of every expert on every node.

        `exchange` defaults to the layer's own, `reduction` to the hard maximum, and `support`, which nodes host an
        expert, to share > 0. With these defaults the time is exact, else it is a smooth approximation.
        """
        return self.time(Decisions(share, exchange), batch, reduction, support)

    def time(
        self,
        decisions: AbstractDecisions,
        tokens: Batch,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        reduction = HardMax() if reduction is None else reduction
        hosts = HardSupport() if support is None else support
        decisions.check(self)
        batch = decisions.tokens(tokens, hosts)
        if self.schedule.micro_batches > 1:  # where a token lives does not depend on how its batch is cut
            batch = replace(batch, source=batch.sources(self.machine.num_nodes))
        return price_parts(
            self.machine,
            self.schedule,
            lambda part: decisions.lower(self, part, hosts),
            batch,
            decisions.whole(self),
            reduction,
        )

    def under(self, exchange: AbstractExchange) -> "Layer":
        return replace(self, exchange=exchange)

    def in_turn(self, tokens: Batch) -> bool:
        return tokens.experts.size * self.machine.num_nodes > MOST_VISITS

    def blank(self, tokens: Batch) -> Decisions:
        return Decisions(jnp.zeros((tokens.experts.shape[0], 1, self.machine.num_nodes)))

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


# Placements timed on many batches: seconds of every layer and batch, and how busy resources are on average.


@eqx.filter_jit
def evaluate(
    model: Layer,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange | None = None,
    served: Int[Array, "layer batch token top_k"] | None = None,
    reduction: AbstractReduction | None = None,
    support: AbstractSupport | None = None,
    serving: AbstractServing | None = None,
) -> LayerTime:
    """Times of a placement, on drawn batches, leaves [layer, batch, ...], or merged ones.

    Exact unless a `reduction` and a `support` are given.

    Stages and totals are [layer, batch], busy times [layer, resource], means over batches. `served` is as in
    `Decisions`, for drawn batches. With `serving`, leaves [layer, ...], the share is of copies.
    """
    if serving is not None and batches.experts.ndim == batches.weight.ndim:
        raise ValueError("which copy serves a choice depends on more than its expert; give batches that are not merged")

    def layer(
        share: Float[Array, "expert node"], batches: Batch, served: Array | None, serving: AbstractServing | None
    ) -> LayerTime:
        def one(batch: Batch, served: Array | None) -> LayerTime:
            return model.time(Decisions(share, exchange, served, serving=serving), batch, reduction, support)

        if served is None:
            return over_batches(lambda batch: one(batch, None), batches, share.shape[1]).mean_busy()
        return jax.vmap(one)(batches, served).mean_busy()

    return jax.lax.map(lambda given: layer(*given), (share, batches, served, serving))


@eqx.filter_jit(compiler_options=LIGHT)  # type: ignore[call-overload]  # an option of JAX
def _evaluate_soon(
    model: Layer,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange,
    serving: AbstractServing | None,
) -> LayerTime:
    return evaluate(model, share, batches, exchange, serving=serving)


def evaluate_soon(
    model: Layer,
    share: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange,
    serving: AbstractServing | None = None,
) -> LayerTime:
    """`evaluate` for plans that are not many: where they have few batches, it is compiled sooner and runs slower."""
    short = batches.weight.size * share.shape[2] <= SHORT
    timed = _evaluate_soon if short else evaluate
    return timed(model, share, batches, exchange, serving=serving)


def at_once(nodes: int) -> int:
    """How many batches to evaluate at once, so that one program serves any number of them.

    With many nodes compiling takes longer than running, so that few at once are better.
    """
    return 64 if nodes <= MANY_NODES else 2


def is_tensor_parallel(share: np.ndarray) -> bool:
    """Whether every expert is split evenly over all nodes, so that a ring can reduce the results (hd_moe Eq. 4)."""
    return bool(np.allclose(share, 1 / share.shape[-1], rtol=1e-4))
