"""Time of a layer from token counts of experts and from the slots that hold them, without single tokens.

This is what runs over a thousand iterations. Copies of an expert serve equal parts of its tokens. Counts do not say
which choices are of one token, so every choice is a vector of its own on the network, and the network's times are those
of the congestion model. Attention and its all-reduce are the same in every iteration, and priced once.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine.decisions import SlotDecisions
from jaxmoe.engine.demand import Loads, Work
from jaxmoe.engine.layer import AbstractLayer
from jaxmoe.engine.lowering import LayerCosts
from jaxmoe.engine.price import price
from jaxmoe.engine.schedule import AbstractSchedule
from jaxmoe.engine.stage import Priced, Stage, Stages, chained
from jaxmoe.engine.times import LayerTime
from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.network import link_loads, path_sums
from jaxmoe.placement.slots import EMPTY, per_slot, repeated
from jaxmoe.relax import AbstractReduction, AbstractSupport, HardMax

# Where vectors travel: a node returns its results to the holders of their group, in equal parts (`TokenLayout.parts`);
# what it fetches from them comes over the same links reversed.


class LayoutPaths(eqx.Module):
    """Link loads and path delays of a token layout on a network.

    `loads[n, l]` is how often a vector that node n computes crosses link l in combine, on average over equal groups of
    tokens. Delays are in seconds.
    """

    loads: Float[Array, "node link"]
    dispatch_delay: Float[Array, ""]  # of the longest path
    combine_delay: Float[Array, ""]


def paths_of(topology: AbstractTopology, holders: Int[np.ndarray, "group part node"]) -> LayoutPaths:
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
    return LayoutPaths(each, delay(topology.reversed()), delay(topology))


class CountModel(AbstractLayer):
    """The costs of a layer on a machine under a token layout. All numbers are arrays that can be swept.

    Micro-batches of a schedule have equal parts of every stage. `before` are the stages before the experts.
    """

    machine: Machine
    costs: LayerCosts
    holders: Int[Array, "group part node"]
    paths: LayoutPaths
    before: tuple[Priced, ...]
    schedule: AbstractSchedule

    def __call__(
        self,
        slots: Int[Array, "node slot"],
        loads: Float[Array, "*group expert"],
        reduction: AbstractReduction | None = None,
    ) -> LayerTime:
        """Time of one layer for `loads` in choices, all groups alike, or group by group."""
        return self.time(SlotDecisions(slots, loads.shape[-1]), loads, reduction)

    def time(
        self,
        decisions: SlotDecisions,
        tokens: Float[Array, "*group expert"],
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        rows = per_slot(decisions.slots, tokens.reshape(-1, tokens.shape[-1]))  # [group, node, slot]
        used = ~repeated(decisions.slots)  # an expert that nobody chose is not read, nor one twice
        compute = copy_work(self.costs, rows.sum(axis=0).T, used.T)
        movements = decisions.movements(self.costs.expert_bytes)
        return self._priced(self.returned(rows.sum(axis=-1)), compute, reduction, movements)

    def blank(self, tokens: Float[Array, "layer *group expert"]) -> SlotDecisions:
        nothing = jnp.full((tokens.shape[0], self.machine.num_nodes, 1), EMPTY, jnp.int32)
        return SlotDecisions(nothing, tokens.shape[-1])

    def of_nodes(
        self, rows: Float[Array, " node"], read: Float[Array, " node"], reduction: AbstractReduction
    ) -> LayerTime:
        """Time of one layer whose nodes compute so many choices and read so many experts, of all groups alike."""
        return self._priced(rows @ self.paths.loads, self.costs.work(rows, read, rows), reduction)

    def _priced(
        self,
        returned: Float[Array, " link"],
        compute: Work,
        reduction: AbstractReduction | None,
        movements: Stages = (),
    ) -> LayerTime:
        """From the vectors that links carry in combine, and what nodes compute."""
        topology, costs = self.machine.topology, self.costs
        fetched = returned[topology.reverse_links] * costs.dispatch_bytes
        experts = chained(
            (
                Stage("dispatch", Loads(fetched, self.paths.dispatch_delay), split="even"),
                Stage("compute", compute, split="even"),
                Stage("combine", Loads(returned * costs.combine_bytes, self.paths.combine_delay), split="even"),
            )
        )
        return price(self.machine, self.schedule, (*self.before, *experts, *movements), reduction or HardMax())

    def returned(self, work: Float[Array, "group node"]) -> Float[Array, " link"]:
        """Vectors that links carry in combine, from the choices of each group that a node computes."""
        if work.shape[0] == 1:
            return work[0] @ self.paths.loads
        parts, nodes = self.holders.shape[1], work.shape[1]
        sent = jnp.broadcast_to(work[:, None] / parts, self.holders.shape)
        traffic = jnp.zeros((nodes, nodes), work.dtype).at[jnp.arange(nodes), self.holders].add(sent)
        return link_loads(self.machine.topology, traffic)


def copy_work(
    costs: LayerCosts, rows: Float[Array, "copy node"], used: Float[Array, "copy node"] | Bool[Array, "copy node"]
) -> Work:
    """Work of nodes that have so many choices of every copy; those that are not `used` need not be read."""
    read = jnp.minimum(rows, 1) * used
    products = costs.products(rows, jnp.ones_like(rows), jnp.minimum(rows, 1))
    choices = rows.sum(axis=0)
    return costs.work(choices, read.sum(axis=0), choices, products)
