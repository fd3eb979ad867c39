"""Decisions for experts that stream through dies: which dies each expert visits, and the order in which experts load.

Source: expert_streaming_fse_dp sections III to V. The analytic model and the event simulator get the same
decisions. Decisions that depend on the state at run time, such as the next group of experts for an idle die, are rules
that both carry out.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine import LoadRules, StreamDecisions, StreamTokens
from jaxmoe.engine.streaming import NONE
from jaxmoe.hardware import AbstractTopology
from jaxmoe.traces import Batch


class Trajectories(NamedTuple):
    """Where the micro-slices of every expert go, relaxed or not: shares of dies in [0, 1]."""

    needed: Float[Array, "expert die"]  # 1 at the dies that hold tokens of the expert
    following: Float[Array, "expert die die2"]  # 1 at the die that comes next; of a die outside, where it begins


def tokens_on_dies(batch: Batch, experts: int, dies: int) -> Float[Array, "expert die"]:
    """Tokens of every expert that live on each die, by the batch's own sources or spread evenly."""
    home = jax.nn.one_hot(batch.sources(dies), dies, dtype=jnp.float32) * batch.weight[..., None]
    return batch.choices(experts).T @ home


def redistributed(tokens: Float[Array, "expert die"]) -> Float[Array, "expert die"]:
    """The tokens of every expert spread over the dies as evenly as whole tokens can be (section III).

    What does not divide stays with the dies that have most of it.
    """
    dies = tokens.shape[1]
    total = tokens.sum(axis=1, keepdims=True)
    rank = jnp.argsort(jnp.argsort(-tokens, axis=1, stable=True), axis=1)
    return jnp.ceil(jnp.maximum(total - rank, 0) / dies - 1e-6)


def moved_tokens(before: Float[Array, "expert die"], after: Float[Array, "expert die"]) -> Float[Array, "die die2"]:
    """Tokens that dies send each other, of all experts together, in equal parts to all that have too few."""
    given, taken = jnp.maximum(before - after, 0), jnp.maximum(after - before, 0)
    return jnp.einsum("ed,ef->df", given, taken / jnp.maximum(taken.sum(axis=1, keepdims=True), 1))


def ring_of(topology: AbstractTopology) -> Int[np.ndarray, " die"]:
    """The order in which a logical ring passes the dies: back and forth through a mesh, along neighbours.

    A mesh with an even side has such a ring that also closes between neighbours: its first column is the way back.
    """
    if topology.grid is None or min(topology.grid) == 1:
        return np.arange(topology.num_nodes)
    rows, columns = topology.grid
    grid = np.arange(rows * columns).reshape(rows, columns)
    if rows % 2:  # the other side may be even
        grid = grid.T
    back, rest = grid[:, 0], grid[:, 1:].copy()
    rest[1::2] = rest[1::2, ::-1]
    return np.concatenate([rest.ravel(), back[::-1]])


def trajectories(tokens: Float[Array, "expert die"], ring: Int[np.ndarray, " die"]) -> Trajectories:
    """Rings through the dies that hold tokens of an expert; on more than four dies every other one runs the other way.

    Several rings at once are for arrays larger than 2x2 (section VI-A). On four dies one way round keeps all in step: a
    die receives from one neighbour alone, which sends when it does.
    """
    dies = len(ring)
    needed = (tokens > 0).astype(tokens.dtype)
    along = _following(needed[:, ring], ring)
    if dies <= 4:
        return Trajectories(needed, along)
    odd = (jnp.arange(len(tokens)) % 2 == 1)[:, None, None]
    return Trajectories(needed, jnp.where(odd, _following(needed[:, ring[::-1]], ring[::-1]), along))


def loading_dies(needed: Float[Array, "expert die"], everywhere: bool) -> Float[Array, "expert die"]:
    """The part of every expert that each die loads: equal parts on all dies, or on those that hold its tokens.

    All dies load where memory holds experts fully sharded, a slice behind each die (Fig. 6).
    """
    dies = jnp.ones_like(needed) if everywhere else needed
    return dies / jnp.maximum(dies.sum(axis=1, keepdims=True), 1)


def _following(here: Float[Array, "expert place"], order: Int[np.ndarray, " place"]) -> Float[Array, "expert die die2"]:
    """The next die with tokens after every die, in this order of the dies; `here` says whether a place has any."""
    dies = len(order)
    ahead = (np.arange(dies)[:, None] + np.arange(1, dies + 1)) % dies  # place, and so many steps further
    steps = jnp.argmax(here[:, ahead] > 0, axis=-1)
    place = (np.arange(dies) + steps + 1) % dies
    die = jnp.zeros_like(place).at[:, order].set(jnp.asarray(order)[place])
    return jax.nn.one_hot(die, dies, dtype=here.dtype)


# The order of loading: groups of experts whose micro-slices are loaded in turns.


def groups_in_order(tokens: Float[Array, "expert die"], paired: bool) -> Int[Array, "group member"]:
    """Experts by group, in the order of loading; those without tokens are in none.

    By themselves they go by number. In pairs the hottest goes with the coldest (IV-A, Fig. 5).
    """
    counts = tokens.sum(axis=1)
    if not paired:
        order = jnp.argsort(counts <= 0, stable=True)
        return jnp.where(counts[order] > 0, order, NONE)[:, None]
    return pairs_of(jnp.argsort(-counts, stable=True), (counts > 0).sum())


def prefetched_slices(
    forecast: Float[Array, " expert"], room: Float[Array, " die"], micro_slices: Float[Array, ""], paired: bool
) -> Float[Array, "expert die"]:
    """Micro-slices that dies with `room` for so many load before the gate decides (IV-A).

    Experts come in the order of loading that the tokens that are `forecast` of them would have.
    """
    order = groups_in_order(forecast[:, None], paired).ravel()
    place = jnp.zeros(forecast.shape[0] + 1).at[order].set(jnp.cumsum(order != NONE) - 1)[:-1]
    left = room[None] - place[:, None] * micro_slices
    return jnp.floor(jnp.clip(left, 0, micro_slices)) * (forecast > 0)[:, None]


def groups_with_first(
    tokens: Float[Array, "expert die"], first: Bool[Array, " expert"], paired: bool
) -> Int[Array, "group member"]:
    """Experts by group, in the order of loading, those that are `first` before all others."""
    parts = (tokens * first[:, None], tokens * ~first[:, None])
    return jnp.concatenate([groups_in_order(part, paired) for part in parts])


def pairs_of(order: Int[Array, " expert"], active: Int[Array, ""]) -> Int[Array, "group 2"]:
    """Pairs from both ends of the first `active` experts of an order; one in the middle is alone."""
    experts = order.shape[0]
    first = jnp.arange((experts + 1) // 2)
    last = active - 1 - first
    second = jnp.where(last > first, order[jnp.clip(last, 0, experts - 1)], NONE)
    hot = jnp.where(last >= first, order[first], NONE)
    return jnp.stack([hot, second], axis=1)


# All together.


def carried_out(rules: LoadRules, everywhere: bool) -> LoadRules:
    """The rules as dies carry them out: channels run apart where only dies with tokens of an expert load it.

    Under rule 5 loads go where there is room, so all channels go in step.
    """
    return replace(rules, apart=not everywhere and not rules.balanced)


def streams(
    topology: AbstractTopology,
    tokens: StreamTokens,
    rules: LoadRules,
    paired: bool = True,
    everywhere: bool = True,
    redistribute: bool = False,
) -> StreamDecisions:
    """All decisions of one layer.

    `paired` loads hot and cold experts together, else each by itself in the order of its number. `everywhere`, all dies
    load, else those with tokens of the expert. To `redistribute` tokens is to spread them evenly first.
    """
    here = redistributed(tokens.on_dies) if redistribute else tokens.on_dies
    needed, following = trajectories(here, ring_of(topology))
    if tokens.ahead is None:
        groups, held = groups_in_order(here, paired), jnp.zeros_like(here)
    else:
        held = tokens.ahead * (here > 0).any(axis=1, keepdims=True)  # others make room at the gate
        groups = groups_with_first(here, held.any(axis=1), paired)
    return StreamDecisions(
        on_dies=here,
        needed=needed,
        following=following,
        loaders=loading_dies(needed, everywhere),
        held=held,
        groups=groups,
        rules=carried_out(rules, everywhere),
        moved=moved_tokens(tokens.on_dies, here) if redistribute else None,
        facts={"passing": tokens.count},
    )
