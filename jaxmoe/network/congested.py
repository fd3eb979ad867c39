"""Least congested exchanges: tokens choose where their results meet, and along which tree, by prices of links.

Choices are successive: each changes the loads, and so the prices, that the next one sees. Two things keep a choice
cheap. What a tree takes towards *every* node follows from running sums of prices, with no loop over nodes or paths; and
which links the paths of a token may use at all does not depend on prices, and is worked out for all tokens at once.

Gradients see what was chosen as given. Prices are whole numbers, so that equal costs are equal on any machine, as long
as they add up to less than 2**24.
"""

import abc
import itertools
from collections.abc import Sequence
from functools import singledispatch
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.network.exchange import BOTH_TREES, AbstractExchange
from jaxmoe.network.flows import Flows, Phases
from jaxmoe.network.loads import crossed, flow_loads, path_sums
from jaxmoe.network.visits import Visits
from jaxmoe.placement.exchange import LEVELS, ROUNDING, LeastCongested, exchange_of
from jaxmoe.relax import least_at


class Choices(NamedTuple):
    """Where every part of a token's vector meets, its route (0 the machine's own, 1 across), and what links carry."""

    home: Int[Array, "part token"]
    route: Int[Array, "part token"]
    carried: Float[Array, "part route link"]  # parts of vectors


class LeastCongestedExchange(AbstractExchange):
    """Every visited node brings one vector to where the token's prices are least, alone or along a tree."""

    description: LeastCongested = eqx.field(static=True, default=LeastCongested())

    @classmethod
    def build(cls, name: str, topology: AbstractTopology) -> "LeastCongestedExchange":
        described = exchange_of(name)
        assert isinstance(described, LeastCongested)
        return cls(described)

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def unicast(self) -> bool:
        return self.description.route == "unicast"

    @property
    def returns_home(self) -> bool:
        return self.description.meeting == "token_home"

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return "batch"

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        chosen = jax.lax.stop_gradient(self.choices(topology, visits))
        one, ways = jnp.ones((), visits.visited.dtype), _route_names(topology, self.unicast)
        return (
            tuple(
                Flows(
                    visits.visited,
                    chosen.home[part],
                    one / len(chosen.home),
                    visits.weight * (chosen.route[part] == number),
                    carried=None if self.unicast else chosen.carried[part, number],
                    route=way,
                )
                for part in range(len(chosen.home))
                for number, way in enumerate(ways)
            ),
        )

    def choices(self, topology: AbstractTopology, visits: Visits) -> "Choices":
        """Where each part of every token's vector meets, and by which route."""
        parts, at_once = 1 if self.unicast else 2, self.description.at_once
        visited = jax.lax.stop_gradient(visits.visited)
        tokens, slowness = len(visited), topology.link_rate.max() / topology.link_rate
        given = self._ways(topology, visited), self._allowed(visits), visits.weight
        rounds = jax.lax.stop_gradient(jax.tree.map(lambda each: _in_rounds(each, at_once), given))

        def choose(carried: Float[Array, "part route link"], given: tuple) -> tuple[Array, tuple[Array, Array]]:
            ways, allowed, weight = given
            homes, routes = [], []
            for part in range(parts):
                price = link_prices(carried.sum(axis=(0, 1)), slowness)
                costs = jnp.stack([jnp.where(allowed, way.costs(topology, price), jnp.inf) for way in ways], axis=1)
                found = least_at(costs.reshape(len(weight), -1))
                route, home = found // topology.num_nodes, found % topology.num_nodes
                added = [way.loads(topology, home, weight * (route == number)) for number, way in enumerate(ways)]
                carried = carried.at[part].add(jnp.stack(added))
                homes.append(home)
                routes.append(route)
            return carried, (jnp.stack(homes), jnp.stack(routes))

        idle = jnp.zeros((parts, len(given[0]), topology.num_links), visited.dtype)
        carried, chosen = jax.lax.scan(choose, idle, rounds)
        home, route = (jnp.moveaxis(each, 1, 0).reshape(parts, -1)[:, :tokens] for each in chosen)
        return Choices(home, route, carried)

    def _ways(self, topology: AbstractTopology, visited: Float[Array, "token node"]) -> "Sequence[_AbstractWays]":
        return [_Unicasts(visited)] if self.unicast else trees(topology, visited)

    def _allowed(self, visits: Visits) -> Bool[Array, "token node"]:
        visited = jax.lax.stop_gradient(visits.visited)
        if self.description.meeting == "token_home":
            return visits.source[:, None] == jnp.arange(visited.shape[1])
        if self.description.meeting == "visited":  # relaxed, at those that are most likely so
            return visited >= 0.5 * visited.max(axis=1, keepdims=True)
        return jnp.ones_like(visited, bool)


def link_prices(load: Float[Array, " link"], slowness: Float[Array, " link"]) -> Float[Array, " link"]:
    """Price of every link, from the messages that it carries and its time for one, relative to that of the fastest."""
    busy = (load + 0.5) * slowness
    level = jnp.floor(LEVELS * busy / busy.max() + ROUNDING).astype(jnp.int32)
    return (1 << level).astype(load.dtype)


def _in_rounds(values: Array, at_once: int) -> Array:
    """The tokens' values [token, ...] as [round, token of it, ...]; zeros fill the last round."""
    short = -len(values) % at_once
    filled = jnp.pad(values, ((0, short), *((0, 0),) * (values.ndim - 1)))
    return filled.reshape(-1, at_once, *values.shape[1:])


def _route_names(topology: AbstractTopology, unicast: bool) -> tuple[Literal["unicast", "tree", "cross_tree"], ...]:
    if unicast:
        return ("unicast",)
    return BOTH_TREES if topology.crossed() is not None else ("tree",)


# Ways from the nodes that tokens visit to any one node: what they cost at given prices, and which links they load.


class _AbstractWays(eqx.Module):
    @abc.abstractmethod
    def costs(self, topology: AbstractTopology, price: Float[Array, " link"]) -> Float[Array, "token node"]:
        """What every token would pay for meeting at every node."""

    @abc.abstractmethod
    def loads(
        self, topology: AbstractTopology, home: Int[Array, " token"], weight: Float[Array, " token"]
    ) -> Float[Array, " link"]:
        """Messages on every link if tokens meet at their homes."""


@singledispatch
def trees(topology: AbstractTopology, visited: Float[Array, "token node"]) -> Sequence[_AbstractWays]:
    """The trees of every token: along the network's paths, and those of the other order of directions, if any.

    `trees.register(Mine)` gives a class of network a faster rule.
    """
    networks = [topology] if topology.crossed() is None else [topology, crossed(topology)]
    return [_trees(network, visited) for network in networks]


@trees.register(Mesh)
def _of_mesh(topology: Mesh, visited: Float[Array, "token node"]) -> Sequence[_AbstractWays]:
    first = topology.routing == "yx"
    return [_mesh_trees(topology.shape, visited, across) for across in (first, not first)]


class _Unicasts(_AbstractWays):
    visited: Float[Array, "token node"]

    def costs(self, topology: AbstractTopology, price: Float[Array, " link"]) -> Float[Array, "token node"]:
        return self.visited @ path_sums(topology, price)

    def loads(self, topology, home, weight):
        return flow_loads(topology, self.visited * weight[:, None], home)


class _Trees(_AbstractWays):
    """Trees on any network: which links lead from visited nodes to every node."""

    passing: Float[Array, "token node link"]

    def costs(self, topology: AbstractTopology, price: Float[Array, " link"]) -> Float[Array, "token node"]:
        return self.passing @ price

    def loads(self, topology, home, weight):
        return weight @ jnp.take_along_axis(self.passing, home[:, None, None], axis=1)[:, 0]


def _trees(topology: AbstractTopology, visited: Float[Array, "token node"]) -> _Trees:
    nodes, links = topology.num_nodes, topology.num_links
    link, pair = topology.hops()
    start, stop = pair // nodes, pair % nodes
    reached = jax.ops.segment_max(visited.T[start], stop * links + link, nodes * links)
    return _Trees(jnp.maximum(reached, 0).T.reshape(-1, nodes, links))


class _MeshTrees(_AbstractWays):
    """Trees on a mesh: links in the rows of visited nodes, then those in the column of where they meet.

    Of links between successive positions, `up` leads to the higher one. A link of a row carries what was visited before
    it, if the tree ends beyond it; one of the column what any row before it has. `across`, rows and columns change
    places.
    """

    up_x: Float[Array, "token segment_x y"]
    down_x: Float[Array, "token segment_x y"]
    up_y: Float[Array, "token segment_y"]
    down_y: Float[Array, "token segment_y"]
    shape: tuple[int, int] = eqx.field(static=True)
    across: bool = eqx.field(static=True)

    def costs(self, topology: AbstractTopology, price: Float[Array, " link"]) -> Float[Array, "token node"]:
        up_x, down_x, up_y, down_y = _by_side(self.shape, price, self.across)
        row = _towards((self.up_x * up_x).sum(axis=2), (self.down_x * down_x).sum(axis=2))
        column = _towards(self.up_y[:, None] * up_y, self.down_y[:, None] * down_y)
        cost = row[:, :, None] + column  # [token, x, y]
        return (jnp.swapaxes(cost, 1, 2) if self.across else cost).reshape(len(cost), -1)

    def loads(self, topology, home, weight):
        x, y = self.shape[::-1] if self.across else self.shape
        at_x, at_y = (home % x, home // x) if self.across else (home // y, home % y)
        positions_x, positions_y = jnp.arange(x), jnp.arange(y)
        beyond_x, beyond_y = at_x[:, None] > positions_x[:-1], at_y[:, None] > positions_y[:-1]  # [token, segment]
        column = (at_x[:, None] == positions_x) * weight[:, None]
        sides = (
            (self.up_x * (beyond_x * weight[:, None])[:, :, None]).sum(axis=0),
            (self.down_x * (~beyond_x * weight[:, None])[:, :, None]).sum(axis=0),
            (column[:, :, None] * (self.up_y * beyond_y)[:, None]).sum(axis=0),
            (column[:, :, None] * (self.down_y * ~beyond_y)[:, None]).sum(axis=0),
        )
        ordered = [sides[side].T for side in (2, 3, 0, 1)] if self.across else sides
        return jnp.concatenate([side.ravel() for side in ordered])


def _mesh_trees(shape: tuple[int, int], visited: Float[Array, "token node"], across: bool) -> _MeshTrees:
    there = visited.reshape(-1, *shape)
    there = jnp.swapaxes(there, 1, 2) if across else there
    any_x = there.max(axis=1)  # [token, y]: rows with anything to bring

    def before(values: Array) -> Array:
        return jax.lax.cummax(values, axis=1)[:, :-1]

    def after(values: Array) -> Array:
        return jax.lax.cummax(values, axis=1, reverse=True)[:, 1:]

    return _MeshTrees(before(there), after(there), before(any_x), after(any_x), shape, across)


def _towards(up: Float[Array, "*lead segment"], down: Float[Array, "*lead segment"]) -> Float[Array, "*lead position"]:
    """What lies between each position and both ends: segments before it count `up`, those after it `down`."""
    nothing = jnp.zeros_like(up[..., :1])
    ups, downs = (jnp.split(each, each.shape[-1], axis=-1) if each.shape[-1] else [] for each in (up, down))
    before = itertools.accumulate(ups, jnp.add, initial=nothing)
    after = reversed(list(itertools.accumulate(downs[::-1], jnp.add, initial=nothing)))
    return jnp.concatenate([a + b for a, b in zip(before, after, strict=True)], axis=-1)


def _by_side(shape: tuple[int, int], per_link: Float[Array, " link"], across: bool) -> tuple[Array, ...]:
    """Links up and down along x [segment, y], and up and down along y [x, segment]; `across`, of the turned mesh."""
    x, y = shape
    sides = jnp.split(per_link, np.cumsum([(x - 1) * y, (x - 1) * y, x * (y - 1)]))
    shaped = [sides[0].reshape(x - 1, y), sides[1].reshape(x - 1, y), sides[2].reshape(x, -1), sides[3].reshape(x, -1)]
    return tuple(shaped[side].T for side in (2, 3, 0, 1)) if across else tuple(shaped)
