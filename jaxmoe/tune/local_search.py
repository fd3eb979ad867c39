"""Local improvement of legal plans with the exact model: many short annealing chains, vmapped.

A chain proposes a small change, scores it on a set of batches and takes it if it is better, or a little
worse with a chance that falls. All moves of a search see the same batches, so that what differs is the plan. Plans stay
legal throughout.
"""

import math
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, Key

from jaxmoe.engine import AbstractServing, Decisions, Layer, evaluate_soon
from jaxmoe.network import AbstractExchange
from jaxmoe.network.xy import prefix_sums
from jaxmoe.traces import Batch, over_batches
from jaxmoe.tune.objective import Objective
from jaxmoe.tune.problem import BRIM, PlacementProblem

SEGMENT = 100  # moves of a compiled call; the time limit is checked in between
ENOUGH = 1e9  # experts that any node may hold without a memory limit
SMALLEST_SHARE = 5e-3  # a smaller part is not worth a message to its host


class Search(NamedTuple):
    """Arguments of every annealing chain: model, frequencies, memory, distances and objective.

    Its leaves are arrays, so that another value compiles nothing anew.
    """

    model: Layer
    frequency: Float[Array, "layer expert"]
    room: Float[Array, " node"]  # in experts
    hops: Float[Array, "node node2"]
    pace: Float[Array, " node"]  # by which the nodes of a group divide what they hold
    aim: Objective
    serving: AbstractServing | None = None  # of copies, where that is decided at run time


def search_of(problem: PlacementProblem) -> Search:
    """Arguments of the chains of a problem."""
    array = partial(jnp.asarray, dtype=jnp.float32)
    return Search(
        model=problem.model,
        frequency=array(problem.frequency),
        room=array(problem.room),
        hops=array(problem.model.machine.topology.hop_counts()),
        pace=array(problem.pace),
        aim=problem.aim,
        serving=problem.serving,
    )


class Places(NamedTuple):
    """Where a chain moves parts of experts: nodes, or groups of nodes that divide by their pace what they hold.

    There are as many places as nodes; those without room stay empty.
    """

    member: Float[Array, "place node"]  # 1 or 0
    spread: Float[Array, "place node"]  # rows sum to 1
    room: Float[Array, " place"]  # in experts
    hops: Float[Array, "place place2"]  # near places are tried more often

    @classmethod
    def of(cls, search: Search, group: Int[Array, " node"]) -> "Places":
        """`group` numbers the group of every node from 0."""
        member = (group == jnp.arange(len(group))[:, None]).astype(search.hops.dtype)
        total = member @ search.pace
        spread = member * search.pace / jnp.where(total > 0, total, 1)[:, None]
        # A place is full when the first of its nodes is.
        full = jnp.minimum(search.room, ENOUGH) / jnp.where(member > 0, spread, 1)
        room = jnp.where(total > 0, jnp.where(member > 0, full, jnp.inf).min(axis=1), 0)
        return cls(member, spread, room, spread @ search.hops @ spread.T)


class Pick(NamedTuple):
    """Random choices that define a move."""

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


def _index(weights: Float[Array, " option"], luck: Float[Array, ""]) -> Int[Array, ""]:
    """An option drawn in proportion to its weight by a uniform number in [0, 1)."""
    reached = prefix_sums(weights)
    return jnp.minimum((reached <= luck * reached[-1]).sum(), weights.shape[0] - 1)


def _pick(
    luck: Float[Array, " draw"], share: Share, hops: Float[Array, "place place2"], room: Float[Array, " place"]
) -> Pick:
    experts = jnp.arange(share.shape[0])
    expert = _index(jnp.ones_like(share[:, 0]), luck[0])
    hosts = (share[expert] > 0).astype(share.dtype)
    origin = _index(hosts, luck[1])
    # Half of the targets are drawn near the origin, where paths change little.
    target = _index(jnp.exp(-hops[origin] * (luck[2] < 0.5)) * (room > 0), luck[3])
    guests = ((share[:, target] > 0) & (experts != expert)).astype(share.dtype)
    other = _index(jnp.where(guests.any(), guests, 1), luck[4])
    part = jnp.where(luck[5] < 0.5, 1.0, luck[6])
    return Pick(expert, other, origin, _index(hosts, luck[7]), target, part)


LUCK = 10  # uniform numbers that one move uses up: eight for its picks, its kind, and whether it is taken


def _propose(
    luck: Float[Array, " draw"],
    share: Share,
    frequency: Float[Array, " expert"],
    hops: Float[Array, "place place2"],
    room: Float[Array, " place"],
) -> Share:
    """A random small change of a legal plan; its rows still sum to 1."""
    pick = _pick(luck, share, hops, room)
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
    changed = moves[_index(jnp.asarray(MOVE_CHANCES), luck[8])]
    largest = changed.max(axis=1, keepdims=True)
    kept = jnp.where(changed < jnp.minimum(SMALLEST_SHARE, largest), 0, changed)
    return kept / kept.sum(axis=1, keepdims=True)


def _seconds(
    search: Search, share: Share, batches: Batch, exchange: AbstractExchange | None = None
) -> Float[Array, " batch"]:
    """Exact times of one plan of one layer, s; leaves of `batches` are [batch, ...], or merged rows."""
    decisions = Decisions(share, exchange, serving=search.serving)
    return over_batches(lambda batch: search.model.time(decisions, batch).total, batches, share.shape[1])


def _score(search: Search, share: Share, batches: Batch, exchange: AbstractExchange | None = None) -> Float[Array, ""]:
    """Exact objective of one plan of one layer, s."""
    return search.aim(_seconds(search, share, batches, exchange))


def seconds_of_all(
    search: Search,
    shares: Float[Array, "layer expert node"],
    batches: Batch,
    exchange: AbstractExchange | None = None,
) -> Float[Array, "layer batch"]:
    """Exact times of one plan of every layer, s; leaves of `batches` are [layer, batch, ...].

    `exchange` defaults to the model's own.
    """
    layers, used = len(shares), search.model.exchange if exchange is None else exchange
    serving = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (layers, *leaf.shape)), search.serving)
    return evaluate_soon(search.model, shares, batches, used, serving).total


@eqx.filter_jit
def score_candidates(
    search: Search, shares: Float[Array, "layer candidate expert node"], batches: Batch
) -> Float[Array, "layer candidate"]:
    """Exact objective of many plans of every layer, s; leaves of `batches` are [layer, batch, ...]."""

    def layer(given: tuple[Float[Array, "candidate expert node"], Batch]) -> Float[Array, " candidate"]:
        shares, batches = given
        return jax.vmap(lambda share: _score(search, share, batches))(shares)

    return jax.lax.map(layer, (shares, batches))


@eqx.filter_jit
def improve(
    search: Search,
    shares: Float[Array, "layer chain expert node"],
    batches: Batch,
    coldness: Float[Array, " move"],
    key: Key[Array, ""],
    exchange: AbstractExchange | None = None,
    group: Int[Array, "layer chain node"] | None = None,
) -> tuple[Float[Array, "layer chain expert node"], Float[Array, "layer chain"]]:
    """One segment of moves on every chain. Returns the plans they end with and their objective on `batches`, s.

    `coldness` is 1 / temperature for every move, relative to the objective; leaves of `batches` are
    [layer, batch, ...]. With `group` a chain moves parts of experts between groups of nodes, in place of nodes.
    """
    replicated = search.model.mode == "replicated"
    if group is None:
        group = jnp.broadcast_to(jnp.arange(shares.shape[3]), (*shares.shape[:2], shares.shape[3]))

    def chain(share, group, frequency, batches, lucks):
        places = Places.of(search, group)

        def move(state, given):
            share, cost = state
            luck, cold = given
            # The first move leaves the plan as it is and finds what it costs: one model to compile, not two.
            changed = jnp.where(jnp.isinf(cost), share, _propose(luck, share, frequency, places.hops, places.room))
            changed_cost = _score(search, changed @ places.spread, batches, exchange)
            held = jnp.where(replicated, changed > 0, changed)
            fits = (held.sum(axis=0) <= places.room * BRIM).all()
            lucky = jnp.log1p(-luck[9]) < (cost - changed_cost) / changed_cost * cold
            taken = fits & ((changed_cost <= cost) | lucky)
            return (jnp.where(taken, changed, share), jnp.where(taken, changed_cost, cost)), None

        start = (share @ places.member.T, jnp.full((), jnp.inf, share.dtype))
        (share, cost), _ = jax.lax.scan(move, start, (lucks, coldness))
        return share @ places.spread, cost

    # Draw all random numbers up front and in one row: random bits inside the loop, or in short rows, would take longer
    # to compile than all the rest.
    drawn = (*shares.shape[:2], coldness.shape[0], LUCK)
    lucks = jr.uniform(key, (math.prod(drawn),)).reshape(drawn)
    over_chains = jax.vmap(chain, in_axes=(0, 0, None, None, 0))
    return jax.vmap(over_chains)(shares, group, search.frequency, batches, lucks)
