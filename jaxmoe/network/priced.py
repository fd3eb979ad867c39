"""Priced exchanges: each token draws where halves of its vector meet, and along which tree, by a table of link prices.

Nothing is known of other tokens: the table has it all, and is made beforehand (`jaxmoe.tune.link_prices`). Exact visits
take what is drawn. Relaxed ones take the mean over all draws, every node and route by its chance, so that prices,
shares and visits have gradients. As the support hardens, relaxed loads tend to the mean of the exact ones over draws,
not to those of the draws at hand, and their maximum to one that is no larger than the mean of the exact maxima.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.exchange import BOTH_TREES, AbstractExchange
from jaxmoe.network.flows import Flows, Phases
from jaxmoe.network.route_costs import trees
from jaxmoe.network.visits import Visits
from jaxmoe.network.xy import prefix_sums
from jaxmoe.placement.exchange import HALVES, ExchangeError, PricedLinks, exchange_of
from jaxmoe.relax import as_number, least_at

MOST = 10.0  # bounds the derivative with respect to being allowed
NEVER = 1e-6  # a chance so small that where the way would lead does not matter


class PricedExchange(AbstractExchange):
    """Each half of a token's vector draws its tree by prices of links. The table is data: all tables compile once."""

    price: Float[Array, " link"]
    softness: Float[Array, ""] = eqx.field(converter=as_number)
    meeting: Literal["any", "visited", "token_home"] = eqx.field(static=True, default="any")

    @classmethod
    def build(cls, description: str | PricedLinks, topology: AbstractTopology) -> "PricedExchange":
        """With the table of a description, or under a name alone with a price of 1 for every link."""
        priced = exchange_of(description) if isinstance(description, str) else description
        assert isinstance(priced, PricedLinks)
        if priced.price and len(priced.price) != topology.num_links:
            raise ExchangeError(
                f"exchange {priced.name} has prices of {len(priced.price)} links, but the machine has "
                f"{topology.num_links}; use a table that was fitted for this machine"
            )
        price = np.asarray(priced.price or np.ones(topology.num_links), np.float32)
        with jax.ensure_compile_time_eval():  # constants, and told of by `described`, while others trace
            return cls(jnp.asarray(price), jnp.asarray(priced.softness, jnp.float32), priced.meeting)

    @property
    def name(self) -> str:
        return PricedLinks(self.meeting).name

    @property
    def described(self) -> PricedLinks:
        return PricedLinks(self.meeting, tuple(np.asarray(self.price, float).tolist()), float(self.softness))

    @property
    def returns_home(self) -> bool:
        return self.meeting == "token_home"

    @property
    def knows(self) -> Literal["nothing", "last", "batch"]:
        return "nothing"

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        chance = self.chances(topology, visits)
        ways = BOTH_TREES[: chance.shape[1]]
        part = jnp.ones((), chance.dtype) / HALVES
        if visits.relaxed:  # both halves are alike
            taken = chance.sum(axis=2)
            to = chance / jnp.maximum(taken, NEVER)[:, :, None]
            halves = [(to[:, number], taken[:, number], way) for number, way in enumerate(ways)] * HALVES
        else:
            home, route = drawn(jax.lax.stop_gradient(chance), visits.draw)
            halves = [
                (home[half], (route[half] == number).astype(part.dtype), way)
                for half in range(HALVES)
                for number, way in enumerate(ways)
            ]
        return (tuple(Flows(visits.visited, to, part, visits.weight * taken, route=way) for to, taken, way in halves),)

    def chances(self, topology: AbstractTopology, visits: Visits) -> Float[Array, "token route node"]:
        """How likely a half of a token's vector is to take every route to every node; of a token they sum to 1."""
        ways = trees(topology, visits.visited[..., None])  # one lane
        cost = jnp.stack([way.costs(self.price[:, None])[..., 0] for way in ways], axis=1)
        allowed = jnp.broadcast_to(self._allowed(visits)[:, None], cost.shape)
        least = jnp.where(allowed > 0, cost, jnp.inf).min(axis=(1, 2), keepdims=True)
        cheaper = (jax.lax.stop_gradient(least) - cost) / self.softness  # above 0 at most where it is not allowed
        likely = allowed * jnp.exp(jnp.minimum(cheaper, MOST))
        return likely / likely.sum(axis=(1, 2), keepdims=True)

    def _allowed(self, visits: Visits) -> Float[Array, "token node"]:
        """1 where the results of a token may meet; relaxed, by how likely the node is visited."""
        if self.meeting == "token_home":
            return jax.nn.one_hot(visits.source, visits.visited.shape[1], dtype=visits.visited.dtype)
        if self.meeting == "visited":
            return jnp.where(visits.visited.max(axis=1, keepdims=True) > 0, visits.visited, 1)
        return jnp.ones_like(visits.visited)


def drawn(
    chance: Float[Array, "token route node"], draw: Float[Array, " token"]
) -> tuple[Int[Array, "half token"], Int[Array, "half token"]]:
    """Where each half of a token's vector meets and its route, by the token's draw in [0, 1).

    Options follow each other by route, then by node. A half takes the first whose running sum of chances is above its
    number: half h of H has that of the draw + h/H, less 1 from 1 on.
    """
    nodes = chance.shape[2]
    chance = chance.reshape(len(chance), -1)
    reached = prefix_sums(chance)
    number = (draw + jnp.arange(HALVES, dtype=draw.dtype)[:, None] / HALVES) % 1
    beyond = reached > number[:, :, None] * reached[:, -1:]
    found = least_at(jnp.where(beyond & (chance > 0), 0, 2 - chance))  # by rounding there may be none
    return found % nodes, found // nodes
