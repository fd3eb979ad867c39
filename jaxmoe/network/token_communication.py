"""Communication of a layer whose tokens live in groups: all-reduce, dispatch and combine of a token layout (moentwine).

What dispatch and combine send depends only on how many vectors every device gets of the tokens of each *home*: of a
group, on a mesh, whose members all have them; of one of its members, in turn, on a network of switches. So an exchange
works on counts [home, node], however many tokens there are. Combine is described; dispatch is its mirror. All traffic
is in hidden vectors.
"""

import abc
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.collectives import (
    ring_reduce_scatter,
    ring_ways,
    twice,
)
from jaxmoe.network.exchange import AbstractExchange
from jaxmoe.network.flows import Rounds
from jaxmoe.network.visits import Visits
from jaxmoe.placement.token_layout import TokenLayout
from jaxmoe.relax import OneOf, look_up

# How many vectors go where.


class Counts(NamedTuple):
    """Vectors of the tokens of each home that devices get, and that clusters of devices get; one copy each."""

    node: Float[Array, "*lead home node"]
    cluster: Float[Array, "*lead home cluster"]


def visit_counts(
    visited: Float[Array, "token node"],
    weight: Float[Array, " token"],
    home: Int[Array, " token"],
    homes: int,
    clusters: int = 1,
) -> Counts:
    """Counts of a batch whose token t visits a node where `visited` is 1 and lives at `home[t]`."""
    at_home = jax.nn.one_hot(home, homes, dtype=visited.dtype) * weight[:, None]
    of_cluster = visited.reshape(len(visited), clusters, -1).max(axis=2)
    return Counts(at_home.T @ visited, at_home.T @ of_cluster)


def token_homes(layout: TokenLayout, tokens: int) -> Int[np.ndarray, " token"]:
    """The home of successive tokens, dealt to the groups evenly; the members of a group on switches take turns."""
    token = np.arange(tokens)
    group = token * layout.num_groups // tokens
    return layout.ring[group, token % layout.tp] if layout.name == "successive" else group


def num_homes(layout: TokenLayout) -> int:
    """Homes of tokens that a layout has."""
    return layout.num_nodes if layout.name == "successive" else layout.num_groups


# What the exchanges send.


class AbstractTokenExchange(eqx.Module):
    """Turns counts into the traffic of combine."""

    @abc.abstractmethod
    def __call__(self, counts: Counts) -> Rounds:
        """Rounds of combine, in hidden vectors; dispatch is their mirror."""


class FetchExchange(AbstractTokenExchange):
    """Devices return results to the holders from which they fetched the tokens (moentwine IV-A).

    A holder stands for one group, or under HER for the groups of equal place on all wafers: `alike` is the class of a
    group, `holds` the class that a device holds. `fetches` is the part of the tokens of its class that a device
    (first axis) fetches from a holder (second). Relaxed, `holds` is a distribution, and `fetches` has any weights.
    """

    alike: Int[Array, " home"]
    holds: OneOf
    fetches: Float[Array, "node node2"]
    classes: int = eqx.field(static=True)

    def __call__(self, counts: Counts) -> Rounds:
        of_class = jax.ops.segment_sum(counts.node, self.alike, self.classes)
        return Rounds((look_up(self.holds, of_class).T * self.fetches)[None], jnp.ones(1, of_class.dtype))


class SlicedExchange(AbstractTokenExchange):
    """Experts sliced over neighbouring devices, which all need the tokens that visit any of them (moentwine VI-B5).

    Dispatch is an all-to-all, after which every such device has a part of the tokens, and an all-gather round their
    ring; combine the mirror, with a reduce-scatter. Both rounds together are the all-reduce of the paper. The devices
    of a full token domain have all tokens already, each those of its own group; others fetch equal parts. `portion` is
    what a device has of a home's tokens before the ring. Half of each part goes either way round.
    """

    fetching: FetchExchange
    portion: Float[Array, "home node"]
    rings: Int[Array, "slice place"]

    def __call__(self, counts: Counts) -> Rounds:
        return self.around(counts).then(self.fetched(counts))

    def fetched(self, counts: Counts) -> Rounds:
        """Rounds in which every device returns its `portion` of the results, in vectors, to the homes of the tokens."""
        return self.fetching(counts._replace(node=counts.node * self.portion))

    def around(self, counts: Counts) -> Rounds:
        """The reduce-scatter round the rings."""
        nodes, places = counts.node.shape[1], self.rings.shape[1]
        ways = ring_ways(self.rings, bidirectional=True)
        held = (counts.node * self.portion).sum(axis=0)[self.rings] / len(ways)  # [slice, place]

        def of_step(step: Int[Array, ""]) -> Float[Array, "node node2"]:
            traffic = jnp.zeros((nodes, nodes), held.dtype)
            # What a device passes on in the last step is its neighbour's own part.
            for (sender, receiver), shift in zip(ways, (step, -step - 1), strict=False):
                traffic = traffic.at[sender, receiver].add(jnp.roll(held, shift, axis=1))
            return traffic

        # A ring of one has no step, but one round in which it sends itself what it has.
        traffic = jax.vmap(of_step)(jnp.arange(1, max(places, 2)))
        return Rounds(traffic, jnp.ones(len(traffic), held.dtype))


class ClusterExchange(AbstractTokenExchange):
    """The hierarchical all-to-all of clusters of devices behind switches, such as nodes of eight GPUs.

    A token's home sends one copy to the device of its own rank in every other cluster that the token visits, and this
    hands it on. Results return the same way, added up. The members of a group have its tokens already.
    """

    group: Int[Array, " node"]
    relay: Int[Array, "home cluster"]
    cluster: Int[Array, " node"]

    def __call__(self, counts: Counts) -> Rounds:
        nodes = len(self.group)
        home, node = jnp.arange(nodes), jnp.arange(nodes)
        away = self.group[:, None] != self.group
        relay = self.relay[:, self.cluster]  # [home, node]
        inside = jnp.zeros((nodes, nodes), counts.node.dtype)
        inside = inside.at[jnp.broadcast_to(node, relay.shape), relay].add(counts.node * away)
        between = jnp.zeros_like(inside)
        between = between.at[self.relay, jnp.broadcast_to(home[:, None], self.relay.shape)].add(counts.cluster)
        return Rounds(jnp.stack([inside, between]), jnp.ones(2, inside.dtype))


def token_exchange(layout: TokenLayout, topology: AbstractTopology) -> AbstractTokenExchange:
    """The exchange of a layout on its network."""
    group = jnp.asarray(layout.group, jnp.int32)
    if topology.grid is None:
        clusters, size = layout.shape
        node = np.arange(layout.num_nodes)
        relay = np.arange(clusters) * size + (node % size)[:, None]
        return ClusterExchange(group, jnp.asarray(relay, jnp.int32), jnp.asarray(node // size, jnp.int32))
    if layout.sliced:
        rings = layout.slice_rings
        has = (layout.group == np.arange(layout.num_groups)[:, None]).astype(np.float32)
        portion = has if layout.name == "esp" else np.full_like(has, 1 / rings.shape[1])
        return SlicedExchange(_fetch_exchange(layout), jnp.asarray(portion), jnp.asarray(rings, jnp.int32))
    return _fetch_exchange(layout)


def _fetch_exchange(layout: TokenLayout) -> FetchExchange:
    # Groups whose parts have the same holders are alike.
    parts = layout.parts
    holders, alike = np.unique(parts.reshape(len(parts), -1), axis=0, return_inverse=True)
    holders = holders.reshape(-1, *parts.shape[1:])
    nodes = layout.num_nodes
    holds, fetches = np.zeros(nodes, np.int32), np.zeros((nodes, nodes))
    for index, part in enumerate(holders):
        holds[part] = index
        np.add.at(fetches, (np.broadcast_to(np.arange(nodes), part.shape), part), 1 / len(part))
    return FetchExchange(
        jnp.asarray(alike.ravel(), jnp.int32),
        jnp.asarray(holds),
        jnp.asarray(fetches, jnp.float32),
        classes=len(holders),
    )


# What groups reduce, before the experts and after them.
#
# The rings of a layout are entwined where its groups are (moentwine IV-B, Fig. 8d): a step leads from domain to domain,
# two hops at a time where domains are 2x2. All groups do so at once and their paths overlap, but the paper has it
# "time-staggered, so there is no link conflict": if all messages move one hop a round, none ever meets another on a
# link, and "two-hop doubles the all-reduce latency". Here a member sends its parts straight to the next one, however
# many hops that is. As many parts meet on a link as a step has hops, so under congestion it takes as long as in such
# rounds. Halves of every part go round both ways ("packages are sent bi-directionally").


def all_reduce_rounds(layout: TokenLayout, both_ways: bool = True) -> Rounds:
    """Rounds after attention, of one byte of partial sums in every device.

    A reduce-scatter, and if the layout gathers, an all-gather; under HER the all-gather across wafers comes in between,
    after which the groups of a wafer gather those of all wafers.
    """
    once, across, every = _rings(layout, both_ways)
    if not layout.on_every_wafer:
        return twice(once) if layout.gathered else once
    rounds = once.then(across)
    return rounds.then(every) if layout.gathered else rounds


def closing_rounds(layout: TokenLayout, both_ways: bool = True) -> Rounds:
    """Rounds after combine that leave every member of a group with the sums of all its tokens, of one byte of them.

    Where several devices hold a token, each has sums of the experts that fetched it there: they are all-reduced. Where
    one does, members gather. Under HER sums are scattered across wafers, and then gathered on the group's own.
    """
    once, across, every = _rings(layout, both_ways)
    if not layout.on_every_wafer:
        return twice(once) if layout.gathered else once
    rounds = across.then(once)
    return every.then(rounds) if layout.gathered else rounds


def _rings(layout: TokenLayout, both_ways: bool) -> tuple[Rounds, Rounds, Rounds]:
    """Once round the groups, once across wafers with a member's part, and round the groups for all wafers' tokens."""
    wafers = layout.wafer_rings.shape[1]
    sizes = ((layout.ring, 1.0), (layout.wafer_rings, wafers / layout.tp), (layout.ring, float(wafers)))
    once, across, every = (ring_reduce_scatter(ring, size, layout.num_nodes, both_ways) for ring, size in sizes)
    return once, across, every


def scaled(rounds: Rounds, unit: Float[Array, ""] | float) -> Rounds:
    """Rounds whose traffic is so many times as large."""
    return Rounds(rounds.traffic * unit, rounds.repeats)


# The exchange of a token layout, as any layer can have it: its tokens live in the layout's homes.


class LayoutExchange(AbstractExchange):
    """Nodes fetch tokens from holders of their homes, and return results there (moentwine IV-A).

    The `source` of a token is the number of its home, as `token_homes` deals them.
    """

    exchange: AbstractTokenExchange
    homes: int = eqx.field(static=True)
    clusters: int = eqx.field(static=True, default=1)

    @property
    def returns_home(self) -> bool:
        return True

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return "nothing"

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Rounds:
        return self.exchange(visit_counts(visits.visited, visits.weight, visits.source, self.homes, self.clusters))


def layout_exchange(layout: TokenLayout, topology: AbstractTopology) -> LayoutExchange:
    """The exchange of a layout on its network."""
    clusters = layout.shape[0] if topology.grid is None else 1
    return LayoutExchange(token_exchange(layout, topology), num_homes(layout), clusters)
