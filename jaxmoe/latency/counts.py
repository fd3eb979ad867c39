"""A layer priced from counts: how many tokens chose each expert, and which slots hold it; no tokens.

This is what runs over a thousand iterations. Copies of an expert serve equal parts of its tokens. Counts do not say
which choices are of one token, so every choice is a vector of its own on the network, and the network's times are those
of the congestion model. Attention and its all-reduce are the same in every iteration, given as seconds.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.latency.demand import LayerCosts, roofline
from jaxmoe.latency.schedule import AbstractSchedule, LayerTime
from jaxmoe.network import link_loads, path_sums
from jaxmoe.placement.slots import EMPTY
from jaxmoe.relax import AbstractReduction, HardMax

Slots = Int[Array, "node slot"]

# Where vectors travel: a node returns its results to the holders of their group, in equal parts (`TokenLayout.parts`);
# what it fetches from them comes over the same links reversed.


class Paths(eqx.Module):
    """Loads of links in combine for every vector that a node computes, if groups are alike; and delays, s."""

    loads: Float[Array, "node link"]
    dispatch_delay: Float[Array, ""]  # of the longest path
    combine_delay: Float[Array, ""]


def paths_of(topology: AbstractTopology, holders: Int[np.ndarray, "group part node"]) -> Paths:
    """The paths of a token layout on a network; derivatives with respect to latencies are those of the delays."""
    nodes = topology.num_nodes
    groups, parts, _ = holders.shape
    part = np.zeros((nodes, nodes), np.float32)  # of what a node computes, to which holder
    np.add.at(part, (np.arange(nodes), holders), 1 / (groups * parts))
    returned = jnp.asarray(part)
    used = (part > 0) & ~np.eye(nodes, dtype=bool)

    def loads(node: Int[Array, ""]) -> Float[Array, " link"]:
        return link_loads(topology, returned * (jnp.arange(nodes) == node)[:, None])

    def delay(network: AbstractTopology) -> Float[Array, ""]:
        return jnp.where(used, path_sums(network, network.link_latency) + network.endpoint_latency, 0).max()

    each = jax.lax.map(loads, jnp.arange(nodes))
    return Paths(each, delay(topology.reversed()), delay(topology))


class AttentionTime(eqx.Module):
    """What every layer takes before its experts, s: attention, the all-reduce, and how long links are busy with it."""

    attention: Float[Array, ""]
    all_reduce: Float[Array, ""]
    links: Float[Array, " link"]


class CountModel(eqx.Module):
    """The costs of a layer on a machine under a token layout. All numbers are arrays that can be swept.

    Micro-batches of a schedule have equal parts of every stage.
    """

    machine: Machine
    costs: LayerCosts
    holders: Int[Array, "group part node"]
    paths: Paths
    before: AttentionTime
    schedule: AbstractSchedule

    def __call__(
        self, slots: Slots, loads: Float[Array, "*group expert"], reduction: AbstractReduction | None = None
    ) -> LayerTime:
        """Time of one layer for `loads` in choices, all groups alike, or group by group."""
        reduction = HardMax() if reduction is None else reduction
        each = per_slot(slots, loads.reshape(-1, loads.shape[-1]))  # [group, node, slot]
        return self._timed(
            *self._link_seconds(each.sum(axis=-1)), self._node_seconds(slots, each.sum(axis=0)), reduction
        )

    def of_nodes(
        self, rows: Float[Array, " node"], read: Float[Array, " node"], reduction: AbstractReduction
    ) -> LayerTime:
        """Time of one layer whose nodes compute so many choices and read so many experts, of all groups alike."""
        return self._timed(*self.travelling(rows), self.computing(rows, read), reduction)

    def _timed(
        self,
        dispatch: Float[Array, " link"],
        combine: Float[Array, " link"],
        node: Float[Array, " node"],
        reduction: AbstractReduction,
    ) -> LayerTime:
        """From busy seconds of links and nodes."""
        stages = {
            "attention": self.before.attention,
            "all_reduce": self.before.all_reduce,
            "dispatch": reduction(dispatch) + self.paths.dispatch_delay,
            "compute": reduction(node),
            "combine": reduction(combine) + self.paths.combine_delay,
        }
        busy = {
            "all_reduce": {"link": self.before.links},
            "dispatch": {"link": dispatch},
            "compute": {"node": node},
            "combine": {"link": combine},
        }
        many = self.schedule.micro_batches
        parts = {name: jnp.broadcast_to(seconds / many, (many,)) for name, seconds in stages.items()}
        return LayerTime(stages, busy, self.schedule.total(parts, reduction))

    def _link_seconds(self, work: Float[Array, "group node"]) -> tuple[Float[Array, " link"], Float[Array, " link"]]:
        """Busy seconds of links in dispatch and combine, from the choices of each group that a node computes."""
        if work.shape[0] == 1:
            return self.travelling(work[0])
        topology = self.machine.topology
        parts, nodes = self.holders.shape[1], work.shape[1]
        sent = jnp.broadcast_to(work[:, None] / parts, self.holders.shape)
        returned = jnp.zeros((nodes, nodes), work.dtype).at[jnp.arange(nodes), self.holders].add(sent)
        return self._both_ways(link_loads(topology, returned))

    def travelling(self, rows: Float[Array, " node"]) -> tuple[Float[Array, " link"], Float[Array, " link"]]:
        """Busy seconds of links in dispatch and combine, from the choices that nodes compute, of all groups alike."""
        return self._both_ways(rows @ self.paths.loads)

    def _both_ways(self, loads: Float[Array, " link"]) -> tuple[Float[Array, " link"], Float[Array, " link"]]:
        topology, costs = self.machine.topology, self.costs
        rate = topology.link_rate
        return loads[topology.reverse_links] * costs.dispatch_bytes / rate, loads * costs.combine_bytes / rate

    def _node_seconds(self, slots: Slots, rows: Float[Array, "node slot"]) -> Float[Array, " node"]:
        used = ~repeated(slots)  # an expert that nobody chose is not read, nor one twice
        return expert_stage(self.machine, self.costs, rows.T, used.T)

    def computing(self, rows: Float[Array, " node"], read: Float[Array, " node"]) -> Float[Array, " node"]:
        """Seconds of nodes at the die's rate for so many choices and experts read."""
        return _computing(self.machine, self.costs, rows, read)


def expert_stage(
    machine: Machine,
    costs: LayerCosts,
    rows: Float[Array, "copy node"],
    used: Float[Array, "copy node"] | Bool[Array, "copy node"],
) -> Float[Array, " node"]:
    """Seconds of nodes that have so many choices of every copy; those that are not `used` need not be read."""
    read = jnp.minimum(rows, 1) * used
    products = None
    if machine.die.gemm is not None:
        rate = machine.die.flops / costs.flops_per_token_expert
        given = (rows, jnp.ones_like(rows), jnp.minimum(rows, 1))
        products = machine.die.gemm.seconds(*given, rate, costs.columns, costs.gemms).sum(axis=0)
    return _computing(machine, costs, rows.sum(axis=0), read.sum(axis=0), products)


def _computing(
    machine: Machine,
    costs: LayerCosts,
    rows: Float[Array, " node"],
    read: Float[Array, " node"],
    products: Float[Array, " node"] | None = None,
) -> Float[Array, " node"]:
    """Seconds of nodes; `products` are at the die's rate unless given, s."""
    if products is None:
        products = rows * costs.flops_per_token_expert / machine.die.flops
    vectors = rows * (costs.dispatch_bytes + costs.combine_bytes)
    return roofline(machine, products, read * costs.expert_bytes, vectors)


# What slots do.


def copies_of(slots: Slots, experts: int) -> Int[Array, " expert"]:
    """Slots that hold each expert."""
    return jnp.zeros(experts + 1, jnp.int32).at[jnp.where(slots == EMPTY, experts, slots)].add(1)[:experts]


def per_slot(slots: Slots, loads: Float[Array, "*group expert"]) -> Float[Array, "*group node slot"]:
    """The load of every slot under equal split."""
    each = loads / jnp.maximum(copies_of(slots, loads.shape[-1]), 1)
    return jnp.where(slots == EMPTY, 0, each[..., slots])


def node_loads(slots: Slots, loads: Float[Array, " expert"]) -> Float[Array, " node"]:
    """The load of every node under equal split: its heat, moentwine Algorithm 1."""
    return per_slot(slots, loads).sum(axis=-1)


def repeated(slots: Slots) -> Bool[Array, "node slot"]:
    """Slots whose expert another slot of the same node holds, before it."""
    count = slots.shape[-1]
    return ((slots[..., :, None] == slots[..., None, :]) & np.tri(count, k=-1, dtype=bool)).any(axis=-1)


def excess_over_mean(loads: Float[Array, "*lead node"]) -> Float[Array, "*lead"]:
    """(max - mean) / mean, moentwine Eq. 2; 0 where nobody has any load."""
    mean = loads.mean(axis=-1)
    return jnp.where(mean > 0, loads.max(axis=-1) / jnp.where(mean > 0, mean, 1) - 1, 0)
