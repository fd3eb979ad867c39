"""Local improvement of legal plans with the exact model: many short annealing chains, vmapped.

A chain proposes a small change, scores it on a set of batches and takes it if it is better, or a little
worse with a chance that falls. Batches are drawn afresh for every segment, so that a chain does not learn
one set by heart. Plans stay legal throughout.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, Key

from jaxmoe.hardware.mesh import hop_counts
from jaxmoe.latency import LayerModel
from jaxmoe.traces import Batch

SEGMENT = 100  # moves between two looks at the clock; static, so that more moves compile nothing new
SMALLEST_SHARE = 5e-3  # a smaller part is not worth a message to its host


class Search(NamedTuple):
    """What every chain needs to know. Numbers only: changing one compiles nothing."""

    model: LayerModel
    frequency: Float[Array, "layer expert"]
    room: Float[Array, " node"]
    p95_weight: Float[Array, ""]


class Pick(NamedTuple):
    """The random picks that a move is made from."""

    expert: Int[Array, ""]
    other: Int[Array, ""]  # an expert that lives at the target, if any does
    origin: Int[Array, ""]  # a host of the expert
    host: Int[Array, ""]  # another host of it, or the same
    target: Int[Array, ""]  # any node
    part: Float[Array, ""]  # of what the expert has at the origin


Share = Float[Array, "expert node"]


def _relocate(share: Share, pick: Pick, to: Int[Array, ""]) -> Share:
    """Part of an expert moves to another node."""
    moved = share[pick.expert, pick.origin] * pick.part
    return share.at[pick.expert, pick.origin].add(-moved).at[pick.expert, to].add(moved)


def _exchange(share: Share, pick: Pick, frequency: Float[Array, " expert"]) -> Share:
    """Two experts exchange equal work between two nodes."""
    given = share[pick.expert, pick.origin] * pick.part * frequency[pick.expert]
    work = jnp.minimum(given, share[pick.other, pick.target] * frequency[pick.other])
    there, back = work / frequency[pick.expert], work / frequency[pick.other]
    share = share.at[pick.expert, pick.origin].add(-there).at[pick.expert, pick.target].add(there)
    return share.at[pick.other, pick.target].add(-back).at[pick.other, pick.origin].add(back)


def _leave(share: Share, pick: Pick) -> Share:
    """An expert leaves a host for its others, if it has any."""
    alone = (share[pick.expert] > 0).sum() == 1
    return share.at[pick.expert, pick.origin].multiply(alone.astype(share.dtype))


def _swap_nodes(share: Share, pick: Pick) -> Share:
    """Two nodes swap all they hold."""
    nodes = jnp.arange(share.shape[1]).at[pick.origin].set(pick.target).at[pick.target].set(pick.origin)
    return share[:, nodes]


def _swap_experts(share: Share, pick: Pick) -> Share:
    """Two experts swap all their hosts."""
    experts = jnp.arange(share.shape[0]).at[pick.expert].set(pick.other).at[pick.other].set(pick.expert)
    return share[experts]


MOVE_CHANCES = (0.25, 0.25, 0.2, 0.1, 0.15, 0.05)  # in the order of `_propose`


def _pick(key: Key[Array, ""], share: Share, hops: Float[Array, "node node2"]) -> Pick:
    keys = jr.split(key, 8)
    experts = share.shape[0]
    expert = jr.randint(keys[0], (), 0, experts)
    hosts = jnp.where(share[expert] > 0, 0.0, -jnp.inf)
    origin = jr.categorical(keys[1], hosts)
    # Half of the targets are drawn near the origin, where paths change little.
    target = jr.categorical(keys[3], -hops[origin] * jr.bernoulli(keys[4]))
    guest = (share[:, target] > 0) & (jnp.arange(experts) != expert)
    other = jr.categorical(keys[5], jnp.where(guest, 0.0, jnp.where(guest.any(), -jnp.inf, 0.0)))
    part = jnp.where(jr.bernoulli(keys[6]), 1.0, jr.uniform(keys[7]))
    return Pick(expert, other, origin, jr.categorical(keys[2], hosts), target, part)


def _propose(key: Key[Array, ""], share: Share, frequency: Float[Array, " expert"], hops) -> Share:
    """A random small change of a legal plan; its rows still sum to 1."""
    for_pick, for_move = jr.split(key)
    pick = _pick(for_pick, share, hops)
    moves = jnp.stack(
        [
            _relocate(share, pick, pick.target),
            _exchange(share, pick, frequency),
            _relocate(share, pick, pick.host),
            _leave(share, pick),
            _swap_nodes(share, pick),
            _swap_experts(share, pick),
        ]
    )
    changed = moves[jr.categorical(for_move, jnp.log(jnp.asarray(MOVE_CHANCES)))]
    largest = changed.max(axis=1, keepdims=True)
    kept = jnp.where(changed < jnp.minimum(SMALLEST_SHARE, largest), 0, changed)
    return kept / kept.sum(axis=1, keepdims=True)


def _score(search: Search, share: Share, batches: Batch) -> Float[Array, ""]:
    """Exact objective of one plan of one layer, s; leaves of `batches` are [batch, ...], or merged rows."""

    def weighed(weight: Float[Array, " token"]) -> Float[Array, ""]:
        return search.model(share, eqx.tree_at(lambda batch: batch.weight, batches, weight)).total

    if batches.experts.ndim == batches.weight.ndim:  # merged: all batches share their rows
        seconds = jax.vmap(weighed)(batches.weight)
    else:
        seconds = jax.vmap(lambda batch: search.model(share, batch).total)(batches)
    return seconds.mean() + search.p95_weight * (jnp.quantile(seconds, 0.95) - seconds.mean())


@eqx.filter_jit
def score_all(
    search: Search, shares: Float[Array, "layer candidate expert node"], batches: Batch
) -> Float[Array, "layer candidate"]:
    """Exact objective of several plans of every layer, s; leaves of `batches` are [layer, batch, ...]."""

    def layer(given):
        shares, batches = given
        return jax.vmap(lambda share: _score(search, share, batches))(shares)

    # One layer at a time: all at once would take gigabytes on large meshes.
    return jax.lax.map(layer, (shares, batches))


@eqx.filter_jit
def improve(
    search: Search,
    shares: Float[Array, "layer chain expert node"],
    batches: Batch,
    coldness: Float[Array, " move"],
    key: Key[Array, ""],
) -> tuple[Float[Array, "layer chain expert node"], Float[Array, "layer chain"]]:
    """One segment of moves on every chain. Returns the plans they end with and their objective on `batches`, s.

    `coldness` is 1 / temperature for every move, relative to the objective; leaves of `batches` are
    [layer, batch, ...].
    """
    hops = jnp.asarray(hop_counts(search.model.platform.mesh.shape), jnp.float32)

    def chain(share, frequency, batches, key):
        def move(state, given):
            share, cost = state
            key, cold = given
            for_change, for_luck = jr.split(key)
            changed = _propose(for_change, share, frequency, hops)
            changed_cost = _score(search, changed, batches)
            fits = (changed.sum(axis=0) <= search.room * (1 + 1e-5)).all()
            lucky = jnp.log(jr.uniform(for_luck)) < (cost - changed_cost) / cost * cold
            taken = fits & ((changed_cost <= cost) | lucky)
            return (jnp.where(taken, changed, share), jnp.where(taken, changed_cost, cost)), None

        first = (share, _score(search, share, batches))
        (share, cost), _ = jax.lax.scan(move, first, (jr.split(key, coldness.shape[0]), coldness))
        return share, cost

    layers, chains = shares.shape[:2]
    keys = jr.split(key, (layers, chains))
    over_chains = jax.vmap(chain, in_axes=(0, None, None, 0))
    return jax.vmap(over_chains)(shares, search.frequency, batches, keys)
