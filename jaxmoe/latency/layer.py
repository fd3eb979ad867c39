"""One MoE layer on one machine: dispatch, then compute, then combine.

Every function here is for one placement of one layer and one batch. `vmap` lifts it to many of each, and to
many machines: all numbers are arrays.
"""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import Machine
from jaxmoe.network import (
    AbstractExchange,
    AbstractTimeModel,
    StageTime,
    Visits,
    replicated_visits,
    sharded_visits,
)
from jaxmoe.relax import AbstractReduction, AbstractSupport, HardMax, HardSupport
from jaxmoe.roofline import expert_node_times
from jaxmoe.traces.batches import Batch


class LayerLatency(eqx.Module):
    """Seconds a layer takes, and per resource what it is kept busy. `vmap` adds leading axes."""

    compute: Float[Array, "*lead"]  # slowest node
    dispatch: Float[Array, "*lead"]
    combine: Float[Array, "*lead"]
    node_time: Float[Array, "*lead node"]
    dispatch_link_time: Float[Array, "*lead link"]
    combine_link_time: Float[Array, "*lead link"]

    @property
    def total(self) -> Float[Array, "*lead"]:
        """The stages one after the other: t = t_comp + 2 t_comm (hd_moe Eq. 12)."""
        return self.dispatch + self.compute + self.combine


class LayerModel(eqx.Module):
    """A machine and the costs of one MoE layer on it."""

    machine: Machine
    message_bytes: Float[Array, ""]  # B: one hidden vector
    expert_bytes: Float[Array, ""]  # B: weights of one expert
    flops_per_token_expert: Float[Array, ""]
    time_model: AbstractTimeModel  # of dispatch and combine
    exchange: AbstractExchange
    mode: Literal["sharded", "replicated"] = eqx.field(static=True)

    def __call__(
        self,
        share: Float[Array, "expert node"],
        batch: Batch,
        exchange: AbstractExchange | None = None,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerLatency:
        """Latency of `batch` under the placement `share`. Exact unless told otherwise.

        `exchange` defaults to the model's own, `reduction` to the hard maximum, `support` to share > 0.
        """
        support = HardSupport() if support is None else support
        visits = sharded_visits if self.mode == "sharded" else replicated_visits
        read = self.experts_read(share, batch, support)
        return self.of_visits(visits(share, batch, support), read, exchange, reduction)

    def of_visits(
        self,
        visits: Visits,
        experts_read: Float[Array, " node"],
        exchange: AbstractExchange | None = None,
        reduction: AbstractReduction | None = None,
    ) -> LayerLatency:
        """Latency where it is known which nodes tokens visit, and how many experts' weights every node reads."""
        exchange = self.exchange if exchange is None else exchange
        reduction = HardMax() if reduction is None else reduction
        node_time = self._node_times(visits, experts_read)
        dispatch, combine = self._stages(exchange, visits)
        return LayerLatency(
            compute=reduction(node_time),
            dispatch=dispatch.total(reduction),
            combine=combine.total(reduction),
            node_time=node_time,
            dispatch_link_time=dispatch.link_time,
            combine_link_time=combine.link_time,
        )

    def experts_read(
        self, share: Float[Array, "expert node"], batch: Batch, support: AbstractSupport
    ) -> Float[Array, " node"]:
        """Weights that every node reads from memory, in experts: what it holds of those that any token uses."""
        used = jnp.minimum((batch.weight[:, None] * batch.choices(share.shape[0])).sum(axis=0), 1)
        held = share if self.mode == "sharded" else support.presence(support.amount(share))
        return used @ held

    def _stages(self, exchange: AbstractExchange, visits: Visits) -> tuple[StageTime, StageTime]:
        topology, size = self.machine.topology, self.message_bytes
        flows = exchange(topology, visits)
        return self.time_model.of_mirrored(topology, flows, size), self.time_model.of_flows(topology, flows, size)

    def _node_times(self, visits: Visits, experts_read: Float[Array, " node"]) -> Float[Array, " node"]:
        copies = (visits.weight[:, None] * visits.visited).sum(axis=0)
        activations = 2 * copies * self.message_bytes  # read in, written out
        moved = experts_read * self.expert_bytes + activations
        return expert_node_times(self.machine, visits.work, self.flops_per_token_expert, moved)
