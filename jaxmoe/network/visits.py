"""Which nodes the tokens of a batch visit, and where their results meet: homes by the rule of the exchange."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.xy import prefix_sums
from jaxmoe.placement.exchange import LOAD_WEIGHT
from jaxmoe.relax import FEW_OPTIONS, AbstractSupport, HardSupport, OneOf, as_weights, straight_through, sums_of_rows
from jaxmoe.traces.batches import Batch

# Who computes what: the nodes that a token visits, and the tokens that a node has of every expert.
#
# Sharded: a token visits every host of its experts. Replicated: it visits one host of each of its experts, the one its
# recorded draw picks in proportion to the shares. A choice that was decided at run time is computed whole at one node.
# Copies to one node are sent once.

PLACED = -1  # computed where the expert is placed


class Visits(eqx.Module):
    """The nodes that the tokens of a batch visit, and the work that each node has for them.

    `visited` is 0 or 1, or between when relaxed. A token's draw names one of its choices. The lowest node that hosts
    this choice stands in row `named[token]` of `home`, or in the token's own row where `named` is None. `home` has node
    numbers for exact visits of experts as placed, else weights of nodes.
    """

    visited: Float[Array, "token node"]
    named: Int[Array, " token"] | None
    home: OneOf
    work: Float[Array, " node"]  # token-expert products
    rows: Float[Array, "expert node"]  # tokens of each expert at each node, and ...
    part: Float[Array, "expert node"]  # ... the part of the expert's columns that it applies to them
    read: Float[Array, " node"]  # weights read from memory, in experts
    weight: Float[Array, " token"]
    draw: Float[Array, " token"]
    source: Int[Array, " token"]  # node where the token lives
    relaxed: bool = eqx.field(static=True, default=False)  # by a support that is soft

    def lowest_host(self) -> OneOf:
        """The lowest host of the named choice of every token."""
        return _of_tokens(self.named, self.home)


def _of_tokens(named: Int[Array, " token"] | None, home: OneOf) -> OneOf:
    """The home of every token; `named` and `home` are as in `Visits`."""
    return home if named is None else home[named]


def sharded_visits(share: Float[Array, "expert node"], batch: Batch, support: AbstractSupport) -> Visits:
    """Visits when every host of an expert holds a part of its weights."""
    choice = batch.choices(share.shape[0])
    chosen = (batch.weight[:, None] * choice).sum(axis=0)
    named, home = _lowest_hosts(share, batch, support)
    if isinstance(support, HardSupport) and named is None and batch.chosen is None:
        visited = _any_host(share > 0, batch.experts).astype(share.dtype)
    elif batch.chosen is None and len(share) > FEW_OPTIONS:
        visited = support.presence(sums_of_rows(support.amount(share), batch.experts))
    else:  # [node, token] in memory, as `GatherExchange` adds up tokens of a home
        visited = support.presence((support.amount(share).T @ choice.T).T)
    return Visits(
        visited=visited,
        named=named,
        home=home,
        work=chosen @ share,
        rows=jnp.broadcast_to(chosen[:, None], share.shape),
        part=share,
        # What a node holds of the experts that any token uses.
        read=jnp.minimum(chosen, 1) @ share,
        weight=batch.weight,
        draw=batch.token_draw,
        source=batch.sources(share.shape[1]),
        relaxed=not isinstance(support, HardSupport),
    )


WORD = 16  # bits: floats, which are added up faster than whole numbers, hold as many exactly


def _any_host(hosts: Bool[Array, "expert node"], experts: Int[Array, "token top_k"]) -> Int[Array, "token node"]:
    """1 at the hosts of any of a token's choices, -1 for a missing one. The same as a product, and quicker if few.

    Nodes are bits of whole numbers, of which there are far fewer to pick up and to unite.
    """
    count, nodes = hosts.shape
    words = -(-nodes // WORD)
    there = jnp.pad(hosts, ((0, 0), (0, words * WORD - nodes))).reshape(count, words, WORD)
    packed = (there * 2.0 ** jnp.arange(WORD)).sum(axis=-1).astype(jnp.int32)
    found = packed.at[jnp.where(experts < 0, count, experts)].get(mode="fill", fill_value=0)
    united = jax.lax.reduce(found, np.int32(0), jax.lax.bitwise_or, (1,))
    bits = (united[:, :, None] >> jnp.arange(WORD)) & 1
    return bits.reshape(-1, words * WORD)[:, :nodes]


FEW, FEW_RELAXED = 2, 1  # tokens for each expert up to which a flow of every token is quicker than one of every expert


def _lowest_hosts(
    share: Float[Array, "expert node"], batch: Batch, support: AbstractSupport
) -> tuple[Int[Array, " token"] | None, OneOf]:
    """`named` and `home` of sharded visits: the lowest host of every expert, or at once that of every token."""
    experts, exact, of_token = share.shape[0], isinstance(support, HardSupport), batch.gather_expert
    few = len(of_token) <= (FEW if exact else FEW_RELAXED) * experts
    named = None if few else of_token
    if exact:
        lowest = _first(share > 0)  # every expert has a share somewhere
        return named, lowest[of_token] if few else lowest
    if few:
        share, support = share[of_token], support.of(of_token)
    # Presence up to and with a node, less presence before it; of a whole expert, as the shares of one sum to 1.
    present = support.presence(prefix_sums(support.amount(share)))
    whole = support.presence(support.amount(jnp.ones_like(share[:, :1])))
    return named, (present - jnp.pad(present[:, :-1], ((0, 0), (1, 0)))) / whole


def replicated_visits(share: Float[Array, "expert node"], batch: Batch, support: AbstractSupport) -> Visits:
    """Visits when every host has the whole expert and serves a part of its tokens.

    A token's draw u in [0, 1) picks the host whose slice of the cumulated shares holds u. A soft support blurs the
    borders of slices, so that shares have a gradient. A host reads an expert of which it serves any token. Choices that
    have a derivative pass it on to the hosts in proportion to their shares: a choice that is not made has no draw.
    """
    served = _drawn(share, batch, support)
    rows = jnp.zeros_like(share).at[batch.experts].add(batch.weight[:, None, None] * served, mode="drop")
    visited = support.union(served)
    if batch.chosen is not None:
        known = jax.lax.stop_gradient(share)  # its own derivative is in what was drawn
        visited += straight_through(jnp.zeros_like(visited), support.presence(batch.chosen @ known))
        rows += straight_through(jnp.zeros_like(rows), (batch.weight @ batch.chosen)[:, None] * known)
    return Visits(
        visited=visited,
        named=None,
        home=jnp.take_along_axis(served, batch.gather_slot[:, None, None], axis=1)[:, 0],
        work=rows.sum(axis=0),
        rows=rows,
        part=jnp.ones_like(share),
        read=jnp.minimum(rows, 1).sum(axis=0),
        weight=batch.weight,
        draw=batch.token_draw,
        source=batch.sources(share.shape[1]),
        relaxed=not isinstance(support, HardSupport),
    )


def _drawn(
    share: Float[Array, "expert node"], batch: Batch, support: AbstractSupport
) -> Float[Array, "token top_k node"]:
    """1 at the host that serves a choice, 0 elsewhere and for missing choices."""
    # A running sum may be rounded down on the way, and the border of a node without a share must not stand out.
    upper = jax.lax.cummax(jnp.where(share > 0, jnp.cumsum(share, axis=1), 0), axis=1)
    upper = upper / upper[:, -1:]
    below = support.of(batch.experts).step(upper[batch.experts] - batch.draw[:, :, None])
    # Slices share their borders, so rounding leaves no gap and no overlap between them; the last has no upper border.
    below = jnp.concatenate([below[..., :-1], jnp.ones_like(below[..., -1:])], axis=-1)
    served = below - jnp.pad(below, ((0, 0), (0, 0), (1, 0)))[:, :, :-1]
    return jnp.where((batch.experts >= 0)[:, :, None], served, 0)


def decided_visits(
    share: Float[Array, "expert node"], batch: Batch, served: Int[Array, "token top_k"], support: AbstractSupport
) -> Visits:
    """Visits of a sharded placement where the choices with a node in `served` are computed whole there.

    A token whose named choice is served so has that node for its home. A node reads a whole expert if it serves any
    choice of it.
    """
    placed = sharded_visits(share, kept(batch, served == PLACED), support)
    at = jax.nn.one_hot(served, share.shape[1], dtype=share.dtype)  # [token, top_k, node]; 0 where as placed
    named = jnp.take_along_axis(at, batch.gather_slot[:, None, None], axis=1)[:, 0]
    lowest = as_weights(_of_tokens(*_lowest_hosts(share, batch, support)), share.shape[1], share.dtype)
    # Choices as placed have no cell, and so are dropped.
    node = jnp.where(served == PLACED, share.shape[1], served)
    tokens = jnp.zeros_like(share).at[batch.experts, node].add(batch.weight[:, None], mode="drop")
    return Visits(
        visited=jnp.maximum(placed.visited, at.max(axis=1)),
        named=None,
        home=jnp.where(named.sum(axis=1, keepdims=True) > 0, named, lowest),
        work=placed.work + tokens.sum(axis=0),
        rows=jnp.where(tokens > 0, tokens, placed.rows),
        part=jnp.where(tokens > 0, 1, placed.part),
        read=placed.read + jnp.minimum(tokens, 1).sum(axis=0),
        weight=batch.weight,
        draw=batch.token_draw,
        source=placed.source,
        relaxed=placed.relaxed,
    )


def kept(batch: Batch, chosen: Array) -> Batch:
    """The batch with only the marked choices; the others are missing."""
    return eqx.tree_at(lambda b: b.experts, batch, jnp.where(chosen, batch.experts, -1))


# Where the results of a token meet: the home rules of `jaxmoe.placement.exchange.Gather`, on many tokens at once.
#
# Gradients see the chosen home as given, but for `lowest_host`, whose relaxed home is a distribution.


def homes(rule: str, topology: AbstractTopology, visits: Visits) -> OneOf:
    """The home of every token."""
    return {
        "lowest_host": lambda: visits.lowest_host(),
        "random_host": lambda: _random_host(visits),
        "fewest_hops": lambda: _fewest_hops(topology, visits),
        "least_loaded": lambda: _least_loaded(topology, visits),
        "corner_host": lambda: _corner_host(topology, visits),
        "token_home": lambda: visits.source,
    }[rule]()


def _random_host(visits: Visits) -> Int[Array, " token"]:
    """The visited node in whose part of the running count the token's draw falls."""
    reached = prefix_sums(visits.visited)
    beyond = visits.draw[:, None] * reached[:, -1:] < reached
    return _first(beyond)


def _fewest_hops(topology: AbstractTopology, visits: Visits) -> Int[Array, " token"]:
    return _least(_hops_in_all(topology, visits))


def _least_loaded(topology: AbstractTopology, visits: Visits) -> Int[Array, " token"]:
    """Token by token: few hops, and few tokens so far. Whole numbers, so that equals are equal."""
    weight = visits.weight * (visits.visited.max(axis=1) > 0)  # a token without choices is nowhere
    cost = _hops_in_all(topology, visits, beyond=LOAD_WEIGHT * topology.num_nodes) * weight.sum()
    per_token = LOAD_WEIGHT * topology.num_nodes

    def choose(count: Float[Array, " node"], given: tuple[Array, Array]) -> tuple[Array, Array]:
        cost, weight = given
        home = _least(cost + per_token * count)
        return count.at[home].add(weight), home

    nodes = jnp.zeros(topology.num_nodes, cost.dtype)
    _, home = jax.lax.scan(choose, nodes, jax.lax.stop_gradient((cost, weight)))
    return home


def _corner_host(topology: AbstractTopology, visits: Visits) -> Int[Array, " token"]:
    corners = np.resize(topology.corners, visits.visited.shape[0])
    hops, farthest = _hops(topology, visits)
    return _least(hops[corners] + (1 - visits.visited) * farthest * 2)


def _hops_in_all(topology: AbstractTopology, visits: Visits, beyond: int = 0) -> Float[Array, "token node"]:
    """From every node to all that the token visits; for a node that it does not, more than any of these + `beyond`."""
    hops, farthest = _hops(topology, visits)
    return visits.visited @ hops + (1 - visits.visited) * (farthest * topology.num_nodes + beyond)


def _hops(topology: AbstractTopology, visits: Visits) -> tuple[Float[Array, "node node2"], Int[Array | np.integer, ""]]:
    """From every node to every node, and the most of them: by NumPy on a mesh, for XLA is long over large constants."""
    hops = topology.hop_counts()
    return jnp.asarray(hops, visits.visited.dtype), hops.max()


def _least(values: Float[Array, "*lead node"]) -> Int[Array, "*lead"]:
    """The first node with the least value: `argmin`, which is slow on CPUs."""
    return _first(values <= values.min(axis=-1, keepdims=True))


def _first(there: Bool[Array, "*lead node"]) -> Int[Array, "*lead"]:
    """The first node where it is so, the last one if nowhere. In floats: so are reductions fast on CPUs."""
    nodes = there.shape[-1]
    number = jnp.arange(nodes, dtype=jnp.float32)
    return jnp.min(jnp.where(there, number, nodes - 1), axis=-1).astype(jnp.int32)
