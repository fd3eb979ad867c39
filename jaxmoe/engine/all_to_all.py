"""A layer whose vectors travel by an all-to-all: counts of tokens, then vectors, then results (camoe 3.2, Eq. 9)."""

from dataclasses import replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine.decisions import Decisions
from jaxmoe.engine.demand import Matrix
from jaxmoe.engine.layer import AbstractLayer
from jaxmoe.engine.lowering import LayerCosts, expert_work
from jaxmoe.engine.price import price_parts
from jaxmoe.engine.schedule import AbstractSchedule
from jaxmoe.engine.stage import Stage, Stages, chained
from jaxmoe.engine.times import LayerTime
from jaxmoe.hardware import Machine
from jaxmoe.network import sharded_visits
from jaxmoe.network.pairwise import AllToAll
from jaxmoe.relax import AbstractReduction, AbstractSupport, HardMax, HardSupport
from jaxmoe.traces.batches import Batch

Copies = Literal["assignment", "node"]


# Where a pass sends vectors (Eq. 8 and 10).


def chosen_by_source(
    chosen: Float[Array, "token expert"], source: Int[Array, " token"], nodes: int
) -> Float[Array, "node expert"]:
    """How often tokens of every node chose every expert, S' A of Eq. 10; `chosen` is 1 where they did, or a part."""
    return jax.ops.segment_sum(chosen, source, nodes)


def assignment_copies(
    chosen: Float[Array, "token expert"], source: Int[Array, " token"], share: Float[Array, "expert node"]
) -> Float[Array, "node node2"]:
    """Copies from every source to every node: one for each expert chosen there (Eq. 8 and 10)."""
    return chosen_by_source(chosen, source, share.shape[1]) @ share


def node_copies(
    chosen: Float[Array, "token expert"], source: Int[Array, " token"], share: Float[Array, "expert node"]
) -> Float[Array, "node node2"]:
    """Copies where a node gets a token once, however many of its experts are there. `share` is one-hot."""
    visited = jnp.minimum(chosen @ share, 1)
    return jax.ops.segment_sum(visited, source, share.shape[1])


class AllToAllLayer(AbstractLayer):
    """A layer of whole experts, one node each, whose exchange is an all-to-all."""

    machine: Machine
    costs: LayerCosts
    exchange: AllToAll
    schedule: AbstractSchedule
    copies: Copies = eqx.field(static=True, default="assignment")

    def time(
        self,
        decisions: Decisions,
        tokens: Batch,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        hosts = HardSupport() if support is None else support
        count = assignment_copies if self.copies == "assignment" else node_copies
        share, times = decisions.share, self.exchange.models

        def lower(batch: Batch) -> Stages:
            chosen = batch.choices(len(share)) * batch.weight[:, None]
            traffic = self.exchange.traffic(count(chosen, batch.sources(self.machine.num_nodes), share))
            work = expert_work(sharded_visits(share, batch, hosts), self.costs, hosts)
            sent = {name: Stage(name, Matrix(traffic[name], times[name])) for name in traffic}
            return chained((sent["metadata"], sent["dispatch"], Stage("compute", work), sent["combine"]))

        batch = decisions.tokens(tokens, hosts)
        batch = replace(batch, source=batch.sources(self.machine.num_nodes))
        exact = HardMax() if reduction is None else reduction
        return price_parts(self.machine, self.schedule, lower, batch, (), exact)

    def blank(self, tokens: Batch) -> Decisions:
        return Decisions(jnp.zeros((tokens.experts.shape[0], 1, self.machine.num_nodes)))
