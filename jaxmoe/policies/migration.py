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

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.latency import LayerTime
from jaxmoe.latency.counts import repeated
from jaxmoe.network import link_loads
from jaxmoe.placement.slots import EMPTY
from jaxmoe.relax import largest

Slots = Int[Array, "layer node slot"]
Source = Literal["copy", "edge"]
FAR = 10**4  # hops to a node that does not hold an expert


class Moves(NamedTuple):
    """What has to travel, in experts."""

    traffic: Float[Array, "node node2"]  # from source to destination, all layers together
    per_layer: Float[Array, " layer"]
    hops: Float[Array, " layer"]  # experts times hops


def moves_between(
    before: Slots, after: Slots, experts: int, distance: Float[Array, "node node2"], entry: Int[Array, " node"] | None
) -> Moves:
    """What travels when slots change: each expert to every node that holds it after and not before.

    It comes from the nearest node that holds it before, in hops, the lowest-numbered of equals; or with `entry` from
    the node through which a node reaches the disks at the wafer's edge (III-C).
    """
    nodes = before.shape[1]
    ranked = distance.T.astype(jnp.int32) * nodes + jnp.arange(nodes)

    def layer(before: Int[Array, "node slot"], after: Int[Array, "node slot"]) -> tuple[Array, Array, Array]:
        held = jnp.zeros((experts + 1, nodes), bool)
        held = held.at[jnp.where(before == EMPTY, experts, before), jnp.arange(nodes)[:, None]].set(True)
        here = jnp.where(after == EMPTY, True, held[after, jnp.arange(nodes)[:, None]])
        new = ~here & ~repeated(after)
        if entry is None:
            # Hops and number in one: its least is found several times as fast as by argmin.
            source = jnp.where(held[after], ranked[:, None], FAR * nodes).min(axis=-1) % nodes
        else:
            source = jnp.broadcast_to(entry[:, None], after.shape)
        return new, source, jnp.take_along_axis(distance.T, source, axis=1)

    new, source, hops = jax.vmap(layer)(before, after)
    there = jnp.broadcast_to(jnp.arange(nodes)[:, None], new.shape)
    traffic = jnp.zeros((nodes, nodes), distance.dtype).at[source, there].add(new)
    return Moves(traffic, new.sum(axis=(1, 2)).astype(distance.dtype), (new * hops).sum(axis=(1, 2)))


def edge_entries(topology: AbstractTopology) -> Int[np.ndarray, " node"]:
    """The node of a mesh's edge that is nearest to each node, in hops; of another network the node itself."""
    if not isinstance(topology, Mesh):
        return np.arange(topology.num_nodes)
    x, y = np.indices(topology.shape).reshape(2, -1)
    edge = np.flatnonzero((x == 0) | (x == topology.shape[0] - 1) | (y == 0) | (y == topology.shape[1] - 1))
    return edge[topology.hop_counts()[edge].argmin(axis=0)]


def link_seconds(topology: AbstractTopology, moves: Moves, expert_bytes: Float[Array, ""]) -> Float[Array, " link"]:
    """How long every link is busy with moves that have it to themselves, s."""
    return link_loads(topology, moves.traffic) * expert_bytes / (topology.link_bandwidth * topology.efficiency)


class Windows(eqx.Module):
    """When weights may use a link: during the all-reduce and attention, during the all-to-all and the experts.

    The paper's rule is links inside domains in the first, links between domains in the second: `alternating`.
    """

    attention: Bool[Array, " link"]
    experts: Bool[Array, " link"]

    @classmethod
    def alternating(cls, inside: Bool[np.ndarray, " link"]) -> "Windows":
        """Local moves in the one, global moves in the other (V-A)."""
        return cls(jnp.asarray(inside), jnp.asarray(~inside))

    @classmethod
    def always(cls, num_links: int) -> "Windows":
        """Whatever is idle."""
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
