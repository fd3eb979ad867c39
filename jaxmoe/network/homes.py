"""Where the results of a token meet: the home rules of `jaxmoe.placement.exchange.Gather`, on many tokens at once.

Gradients see the chosen home as given, but for `lowest_host`, whose relaxed home is a distribution.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.hardware import AbstractTopology
from jaxmoe.hardware.mesh import corner_nodes
from jaxmoe.network.prefix import prefix_sums
from jaxmoe.network.visits import Visits
from jaxmoe.placement.exchange import LOAD_WEIGHT


def homes(rule: str, topology: AbstractTopology, visits: Visits) -> Float[Array, "token node"]:
    """1 at the home of every token."""
    return {
        "lowest_host": lambda: visits.lowest_host(),
        "random_host": lambda: _random_host(visits),
        "fewest_hops": lambda: _fewest_hops(topology, visits),
        "least_loaded": lambda: _least_loaded(topology, visits),
        "corner_host": lambda: _corner_host(topology, visits),
        "token_home": lambda: jax.nn.one_hot(visits.source, topology.num_nodes, dtype=visits.visited.dtype),
    }[rule]()


def _random_host(visits: Visits) -> Float[Array, "token node"]:
    """The visited node in whose part of the running count the token's draw falls."""
    reached = prefix_sums(visits.visited)
    beyond = visits.draw[:, None] * reached[:, -1:] < reached
    return _one_hot(jnp.argmax(beyond, axis=1), visits)


def _fewest_hops(topology: AbstractTopology, visits: Visits) -> Float[Array, "token node"]:
    return _one_hot(jnp.argmin(_hops_in_all(topology, visits), axis=1), visits)


def _least_loaded(topology: AbstractTopology, visits: Visits) -> Float[Array, "token node"]:
    """Token by token: few hops, and few tokens so far. Whole numbers, so that equals are equal."""
    weight = visits.weight * (visits.visited.max(axis=1) > 0)  # a token without choices is nowhere
    cost = _hops_in_all(topology, visits, beyond=LOAD_WEIGHT * topology.num_nodes) * weight.sum()
    per_token = LOAD_WEIGHT * topology.num_nodes

    def choose(count: Float[Array, " node"], given: tuple[Array, Array]) -> tuple[Array, Array]:
        cost, weight = given
        home = jnp.argmin(cost + per_token * count)
        return count.at[home].add(weight), home

    nodes = jnp.zeros(topology.num_nodes, cost.dtype)
    _, home = jax.lax.scan(choose, nodes, jax.lax.stop_gradient((cost, weight)))
    return _one_hot(home, visits)


def _corner_host(topology: AbstractTopology, visits: Visits) -> Float[Array, "token node"]:
    corners = np.resize(corner_nodes(topology), visits.visited.shape[0])
    hops = jnp.asarray(topology.hop_counts(), visits.visited.dtype)
    beyond = hops.max() * 2
    return _one_hot(jnp.argmin(hops[corners] + (1 - visits.visited) * beyond, axis=1), visits)


def _hops_in_all(topology: AbstractTopology, visits: Visits, beyond: int = 0) -> Float[Array, "token node"]:
    """From every node to all that the token visits; for a node that it does not, more than any of these + `beyond`."""
    hops = jnp.asarray(topology.hop_counts(), visits.visited.dtype)
    return visits.visited @ hops + (1 - visits.visited) * (hops.max() * topology.num_nodes + beyond)


def _one_hot(node: Array, visits: Visits) -> Float[Array, "token node"]:
    return jax.nn.one_hot(node, visits.visited.shape[1], dtype=visits.visited.dtype)
