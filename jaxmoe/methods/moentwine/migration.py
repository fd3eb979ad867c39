"""Weights on their way to new slots: from where, over which links, and how long on links that are idle anyhow.

Invasive, inference waits until all weights are there. Non-invasive, weights take what regular traffic leaves idle of
every link, in as many iterations as that needs (moentwine V-A).
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine import LayerTime
from jaxmoe.hardware import AbstractTopology
from jaxmoe.placement.slots import EMPTY, repeated
from jaxmoe.relax import largest

Slots = Int[Array, "layer node slot"]
Source = Literal["copy", "edge"]
FAR = 10**4  # hops to a node that does not hold an expert
MOVES_AT_ONCE = 256


class ExpertTransfers(NamedTuple):
    """Expert weights that move between nodes, in experts: by source and destination, and by layer."""

    traffic: Float[Array, "node node2"]  # from source to destination, all layers together
    per_layer: Float[Array, " layer"]
    hops: Float[Array, " layer"]  # experts times hops


def moves_between(
    before: Slots, after: Slots, distance: Float[Array, "node node2"], entry: Int[Array, " node"] | None
) -> ExpertTransfers:
    """Transfers that turn slots `before` into `after`: each expert goes to every node that newly holds it.

    The source is the nearest node that holds the expert before, in hops, the lowest-numbered of equals. With `entry`
    it is the node through which the destination reaches the disks at the wafer's edge (III-C).
    """
    nodes = before.shape[1]
    ranked = distance.T.astype(jnp.int32) * nodes + jnp.arange(nodes)
    here = (before[:, :, None, :] == after[..., None]).any(axis=-1)
    new = (after != EMPTY) & ~here & ~jax.vmap(repeated)(after)
    # Mostly few experts move, so sources are looked for by so many of them at once, and not for every slot.
    rounds = -(-new.size // MOVES_AT_ONCE)
    order = jnp.flatnonzero(new, size=rounds * MOVES_AT_ONCE, fill_value=0).reshape(rounds, MOVES_AT_ONCE)
    count = new.sum()

    def some(at: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        turn, traffic, hops = at
        real = turn * MOVES_AT_ONCE + jnp.arange(MOVES_AT_ONCE) < count
        layer, node, slot = jnp.unravel_index(order[turn], new.shape)
        if entry is None:
            holds = (before[layer] == after[layer, node, slot][:, None, None]).any(axis=-1)
            # Hops and number in one: its least is found several times as fast as by argmin.
            source = jnp.where(holds, ranked[node], FAR * nodes).min(axis=-1) % nodes
        else:
            source = entry[node]
        far = hops.at[layer].add(real * distance[source, node])
        return turn + 1, traffic.at[source, node].add(real), far

    start = (jnp.asarray(0), jnp.zeros((nodes, nodes), distance.dtype), jnp.zeros(len(before), distance.dtype))
    _, traffic, hops = jax.lax.while_loop(lambda at: at[0] * MOVES_AT_ONCE < count, some, start)
    return ExpertTransfers(traffic, new.sum(axis=(1, 2)).astype(distance.dtype), hops)


def edge_entries(topology: AbstractTopology) -> Int[np.ndarray, " node"]:
    """The node of a mesh's edge that is nearest to each node, in hops; of another network the node itself."""
    if topology.grid is None:
        return np.arange(topology.num_nodes)
    x, y = np.indices(topology.grid).reshape(2, -1)
    edge = np.flatnonzero((x == 0) | (x == topology.grid[0] - 1) | (y == 0) | (y == topology.grid[1] - 1))
    return edge[topology.hop_counts()[edge].argmin(axis=0)]


class Windows(eqx.Module):
    """Links that weights may use in each phase: `attention` with its all-reduce, `experts` with the all-to-all.

    The paper's rule, `alternating`, uses links inside domains in the first and links between domains in the second.
    """

    attention: Bool[Array, " link"]
    experts: Bool[Array, " link"]

    @classmethod
    def alternating(cls, inside: Bool[np.ndarray, " link"]) -> "Windows":
        """Links `inside` domains in the first phase, all others in the second (V-A)."""
        return cls(jnp.asarray(inside), jnp.asarray(~inside))

    @classmethod
    def always(cls, num_links: int) -> "Windows":
        """All links in both phases, so that weights use all idle time."""
        return cls(jnp.ones(num_links, bool), jnp.ones(num_links, bool))

    def idle(self, times: LayerTime) -> Float[Array, " link"]:
        """Seconds that links are idle in the windows of an iteration; leaves of `times` are [layer, ...].

        A window lasts as long as its communication: the time by which attention or experts outlast it is not used.
        """
        experts = times.stages["dispatch"] + times.stages["combine"]
        both = times.busy["dispatch"]["link"] + times.busy["combine"]["link"]
        reduced = times.stages["all_reduce"][:, None] - times.busy["all_reduce"]["link"]
        exchanged = experts[:, None] - both
        return (jnp.maximum(reduced, 0) * self.attention + jnp.maximum(exchanged, 0) * self.experts).sum(axis=0)


def iterations_needed(needed: Float[Array, " link"], idle: Float[Array, " link"]) -> Float[Array, ""]:
    """Iterations until every link has carried what it needs to, if each leaves it `idle` so long."""
    never = jnp.where(needed > 0, jnp.inf, 0.0)
    return largest(jnp.where(idle > 0, needed / jnp.where(idle > 0, idle, 1), never))
