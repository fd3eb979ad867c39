"""Least congested exchanges: tokens choose where their results meet, and along which tree, by prices of links.

Choices are successive: each changes the loads, and so the prices, that the next one sees. Where many plans or batches
are mapped over, all of them make their next choice together, side by side in memory: see `lanes_last`.

Gradients see what was chosen as given. Prices are whole numbers, so that equal costs are equal on any machine, as long
as they add up to less than 2**24.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.network.exchange import BOTH_TREES, DescribedExchange
from jaxmoe.network.flows import Flows, Phases
from jaxmoe.network.loads import crossed, known_loads
from jaxmoe.network.route_costs import Unicasts, trees
from jaxmoe.network.visits import Visits
from jaxmoe.placement.exchange import LEVELS, ROUNDING, LeastCongested, exchange_of
from jaxmoe.relax import least_at


class ChosenRoutes(NamedTuple):
    """Where every part of a token's vector meets, its route (0 the machine's own, 1 across), and what links carry."""

    home: Int[Array, "part token"]
    route: Int[Array, "part token"]
    carried: Float[Array, "part route link"]  # parts of vectors


Carried = list[list[Float[Array, "link lane"]]]  # by part and route: arrays of their own are updated where they are


class LeastCongestedExchange(DescribedExchange):
    """Every visited node brings one vector to where the token's prices are least, alone or along a tree."""

    description: LeastCongested = eqx.field(static=True, default=LeastCongested())

    @classmethod
    def build(cls, name: str, topology: AbstractTopology) -> "LeastCongestedExchange":
        described = exchange_of(name)
        assert isinstance(described, LeastCongested)
        return cls(described)

    def in_rounds(self, tokens: int) -> "LeastCongestedExchange":
        return LeastCongestedExchange(replace(self.description, at_once=max(tokens, self.description.at_once)))

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        chosen = jax.lax.stop_gradient(self.choices(topology, visits))
        one, names = jnp.ones((), visits.visited.dtype), _route_names(topology, self.unicast)
        parts = len(chosen.home)
        visited = jnp.concatenate([visits.visited] * parts)  # flows of a route are priced together, whatever the part

        def carried(number: int) -> Float[Array, " link"] | None:
            if self.unicast:
                return None
            along = topology if number == 0 else crossed(topology)
            homes = chosen.home[..., None] == jnp.arange(topology.num_nodes)
            towards = (homes & (chosen.route == number)[..., None]).sum(axis=0).astype(one.dtype)
            return known_loads(chosen.carried[:, number].sum(axis=0), along, visits.visited, towards, visits.weight)

        return (
            tuple(
                Flows(
                    visited,
                    chosen.home.reshape(-1),
                    one / parts,
                    (visits.weight * (chosen.route == number)).reshape(-1),
                    carried=carried(number),
                    route=name,
                )
                for number, name in enumerate(names)
            ),
        )

    def choices(self, topology: AbstractTopology, visits: Visits) -> ChosenRoutes:
        """Where each part of every token's vector meets, and by which route."""
        slowness, given = topology.link_rate.max() / topology.link_rate, (visits.visited, visits.source, visits.weight)
        rounds = jax.tree.map(lambda each: _in_rounds(each, self.description.at_once), given)

        def one_after_the_other(slowness: Float[Array, "link lane"], rounds: tuple[Array, ...]) -> ChosenRoutes:
            return self._choices(topology, slowness, *rounds)

        # The routes of a mesh follow from its shape alone; what is mapped over must not be closed over.
        choose = lanes_last(one_after_the_other) if isinstance(topology, Mesh) else one_after_the_other
        one_lane = jax.tree.map(lambda each: each[..., None], jax.lax.stop_gradient((slowness, rounds)))
        chosen = jax.tree.map(lambda each: each[..., 0], choose(*one_lane))
        return chosen._replace(home=chosen.home[:, : len(visits.weight)], route=chosen.route[:, : len(visits.weight)])

    def _choices(
        self,
        topology: AbstractTopology,
        slowness: Float[Array, "link lane"],
        visited: Float[Array, "round token node lane"],
        source: Int[Array, "round token lane"],
        weight: Float[Array, "round token lane"],
    ) -> ChosenRoutes:
        """The same round by round, for many batches in lanes of their own; so are the choices."""
        parts = 1 if self.unicast else 2

        def choose(carried: Carried, given: tuple[Array, ...]) -> tuple[Carried, tuple[Array, Array]]:
            visited, source, weight = given
            offered = [Unicasts(topology, visited)] if self.unicast else trees(topology, visited)
            allowed = self._allowed(visited, source)
            homes, routes = [], []
            for part in range(parts):
                price = link_prices(reduce(jnp.add, itertools.chain(*carried)), slowness)
                costs = jnp.concatenate([jnp.where(allowed, way.costs(price), jnp.inf) for way in offered], axis=1)
                found = least_at(jnp.moveaxis(costs, 1, -1))
                route, home = found // topology.num_nodes, found % topology.num_nodes
                carried[part] = [
                    way.loaded(load, home, weight * (route == number))
                    for number, (way, load) in enumerate(zip(offered, carried[part], strict=True))
                ]
                homes.append(home)
                routes.append(route)
            return carried, (jnp.stack(homes), jnp.stack(routes))

        count = len(_route_names(topology, self.unicast))
        idle = [[jnp.zeros_like(slowness)] * count for _ in range(parts)]
        carried, chosen = jax.lax.scan(choose, idle, (visited, source, weight))
        home, route = (jnp.moveaxis(each, 1, 0).reshape(parts, -1, each.shape[-1]) for each in chosen)
        return ChosenRoutes(home, route, jnp.stack([jnp.stack(each) for each in carried]))

    def _allowed(
        self, visited: Float[Array, "token node lane"], source: Int[Array, "token lane"]
    ) -> Bool[Array, "token node lane"]:
        if self.description.meeting == "token_home":
            return source[:, None] == jnp.arange(visited.shape[1])[:, None]
        if self.description.meeting == "visited":  # relaxed, at those that are most likely so
            return visited >= 0.5 * visited.max(axis=1, keepdims=True)
        return jnp.ones_like(visited, bool)


def lanes_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose arguments and results end with an axis of lanes, each worked out by itself.

    Mapped over many, it gets all their lanes at once, still last: neighbours in memory are worked out alike, which is
    what vector units of CPUs need. `jax.vmap` alone would put them first.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def _all_lanes(size: int, is_mapped: Any, *given: Any) -> tuple[Any, Any]:
        def beside(values: Array, is_mapped: bool) -> Array:
            each = jnp.moveaxis(values, 0, -1) if is_mapped else jnp.stack([values] * size, axis=-1)
            return each.reshape(*each.shape[:-2], -1)

        def apart(values: Array) -> Array:
            return jnp.moveaxis(values.reshape(*values.shape[:-1], -1, size), -1, 0)

        found = jax.tree.map(apart, mapped(*jax.tree.map(beside, given, tuple(is_mapped))))
        return found, jax.tree.map(lambda _: True, found)

    return mapped


def link_prices(load: Float[Array, "link *lane"], slowness: Float[Array, "link *lane"]) -> Float[Array, "link *lane"]:
    """Price of every link, from the messages that it carries and its time for one, relative to that of the fastest."""
    busy = (load + 0.5) * slowness
    level = jnp.floor(LEVELS * busy / busy.max(axis=0) + ROUNDING).astype(jnp.int32)
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
