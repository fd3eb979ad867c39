"""Batches of tokens drawn from a trace, as arrays for the model and the event simulator alike."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.traces.logits import recorded_logits
from jaxmoe.traces.trace import GatingTrace, TraceError, take


class Batch(eqx.Module):
    """The tokens of one layer and one batch, with every random number that a rule may need already drawn.

    `weight` counts how often a row occurs, so equal tokens may be merged. Leading axes (layers, batches)
    are added by stacking and removed by `vmap`.
    """

    experts: Int[Array, "*lead token top_k"]  # -1: no expert
    token_draw: Float[Array, "*lead token"]  # in [0, 1): one for the token, such as for its home
    draw: Float[Array, "*lead token top_k"]  # in [0, 1): one for each choice, such as for a replica
    weight: Float[Array, "*batches token"]
    source: Int[Array, "*lead token"] | None = None  # node where the token lives; None: see `sources`
    row: Int[Array, "*lead token"] | None = None  # of the trace, for what else that knows of a token
    logits: Float[Array, "*lead token expert"] | None = None  # of the router, where a gate may choose anew
    chosen: Float[Array, "*lead token expert"] | None = None  # in place of `choices`, where these have a derivative

    def some(self, first: int, count: int) -> "Batch":
        """So many batches from the first on, of drawn ones, [layer, batch, ...], or merged ones. Outside `jit`."""

        def cut(leaf: Array) -> Array:  # by NumPy: JAX would compile a cut for every shape
            return jnp.asarray(np.asarray(leaf)[:, first : first + count])

        if self.experts.ndim == self.weight.ndim:  # merged ones share all else
            return replace(self, weight=cut(self.weight))
        return jax.tree.map(cut, self)

    @property
    def gather_slot(self) -> Int[Array, "*lead token"]:
        """The choice that the token's draw names: each that it has, with equal chance."""
        present = self.experts >= 0
        count = present.sum(axis=-1)
        rank = jnp.minimum((self.token_draw * count).astype(jnp.int32), count - 1)
        # A running count, which is slow on CPUs, as a product.
        reached = jnp.matmul(present.astype(jnp.int32), np.triu(np.ones((present.shape[-1],) * 2, np.int32)))
        return jnp.argmax(reached > rank[..., None], axis=-1)

    def sources(self, nodes: int) -> Int[Array, "*lead token"]:
        """The node where every token lives: as given, or successive tokens on successive nodes, evenly."""
        if self.source is not None:
            return self.source
        tokens = self.experts.shape[-2]
        home = np.arange(tokens, dtype=np.int32) * nodes // tokens
        return jnp.broadcast_to(jnp.asarray(home, jnp.int32), self.token_draw.shape)

    @property
    def gather_expert(self) -> Int[Array, "*lead token"]:
        return jnp.take_along_axis(self.experts, self.gather_slot[..., None], axis=-1)[..., 0]

    def choices(self, num_experts: int) -> Float[Array, "*lead token expert"]:
        """How often each token chose each expert: 0 or 1."""
        if self.chosen is not None:
            return self.chosen
        # Choice by choice: a sum over an inner axis takes many times as long.
        columns = jnp.moveaxis(self.experts, -1, 0)
        return functools.reduce(
            jnp.add, (jax.nn.one_hot(column, num_experts, dtype=self.weight.dtype) for column in columns)
        )


def expert_counts(batch: Batch, num_experts: int) -> Float[np.ndarray, "*lead expert"]:
    """Tokens of every batch that chose each expert, by their weight; nothing of the size [token, expert] is made.

    Leaves of the batch are [*lead, token, ...], or those of `merge_tokens`, whose batches share their rows.
    """
    weight, experts = np.asarray(batch.weight, float), np.asarray(batch.experts)
    if experts.ndim == weight.ndim:
        experts = experts[..., None, :, :]
    experts = np.broadcast_to(experts, (*weight.shape, experts.shape[-1]))
    bins = num_experts + 1  # the first is for missing choices
    place = experts + 1 + bins * np.arange(math.prod(weight.shape[:-1])).reshape(*weight.shape[:-1], 1, 1)
    weights = np.broadcast_to(weight[..., None], experts.shape)
    counted = np.bincount(place.ravel(), weights.ravel(), math.prod(weight.shape[:-1]) * bins)
    return counted.reshape(*weight.shape[:-1], bins)[..., 1:]


def micro_batches(batch: Batch, parts: int) -> Batch:
    """A batch cut into equal parts of successive tokens, the leading axis of every leaf.

    Where tokens do not divide evenly, the last part is filled up with tokens of weight 0.
    """
    tokens = batch.weight.shape[-1]
    short = -tokens % parts

    def cut(leaf: Array) -> Array:
        filled = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], short, axis=0)]) if short else leaf
        return filled.reshape(parts, -1, *leaf.shape[1:])

    weight = jnp.pad(batch.weight, (0, short)).reshape(parts, -1)
    return replace(jax.tree.map(cut, batch), weight=weight)


Result = TypeVar("Result")  # an array, or a tree of arrays
Given = TypeVar("Given")
LARGEST_CHUNK = 2**22  # entries [token, node] of the batches that are computed at once


def over_batches(function: Callable[[Batch], Result], batches: Batch, nodes: int = 1) -> Result:
    """`vmap` of a function of one batch over the batches of a layer: drawn ones [batch, ...], or merged ones.

    Batches with many tokens for so many `nodes` go a few at a time, which takes less memory and no more time.
    """
    count, tokens = batches.weight.shape
    fitting = max(LARGEST_CHUNK // (tokens * nodes), 1)
    at_once = max(part for part in range(1, min(fitting, count) + 1) if count % part == 0)
    if batches.experts.ndim > batches.weight.ndim:
        return _in_chunks(function, batches, count, at_once)
    # Merged batches share their rows.
    return _in_chunks(lambda weight: function(replace(batches, weight=weight)), batches.weight, count, at_once)


def _in_chunks(function: Callable[[Given], Result], given: Given, count: int, at_once: int) -> Result:
    """`vmap` over the leading axis, a part of it at a time. `lax.map` in batches does not take empty results."""
    if at_once == count:
        return jax.vmap(function)(given)
    chunks = jax.tree.map(lambda leaf: leaf.reshape(count // at_once, at_once, *leaf.shape[1:]), given)
    mapped = jax.lax.map(jax.vmap(function), chunks)
    return jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), mapped)


def sample_batches(
    trace: GatingTrace,
    tokens: int,
    batches: int,
    seed: int,
    consecutive: bool = False,
    numbered: bool = False,
    logits: bool = False,
    resampled: bool = False,
) -> Batch:
    """Draw batches from the whole trace: every leaf is [layer, batch, token, ...].

    A batch is `tokens` different tokens in random order, or a run of consecutive ones. All layers of a batch
    have the same tokens; gather slots and replica draws are independent. The same seed gives the same batches. With
    `resampled` every batch mixes the trace's sequences anew, as another sample of requests might have: the Bayesian
    bootstrap (Rubin 1981), to tune for text that is not in the trace; a batch of consecutive tokens stays one. With
    `numbered` tokens know their row of the trace, with `logits` those of the router. Raises `TraceError` for a trace
    without what is asked for.
    """
    if tokens < 1 or batches < 1:
        raise TraceError(f"{batches} batches of {tokens} tokens are wanted, expected 1 or more of each")
    if tokens > trace.num_tokens:
        raise TraceError(
            f"a batch of {tokens} tokens cannot be drawn from a trace of {trace.num_tokens}; use a smaller batch"
        )
    rng = np.random.default_rng(seed)
    if consecutive:
        starts = rng.integers(trace.num_tokens - tokens + 1, size=batches)
        picked = starts[:, None] + np.arange(tokens)
    elif resampled and len(trace.seq_start) > 1:
        picked = np.stack([_mixed(trace, tokens, rng) for _ in range(batches)])
    else:
        picked = np.stack([rng.choice(trace.num_tokens, tokens, replace=False) for _ in range(batches)])
    drawn = _picked_batches(trace, picked, rng, numbered)
    if not logits:
        return drawn
    recorded = recorded_logits(trace)
    known = take(recorded, picked.ravel()).reshape(*picked.shape, *recorded.shape[1:])
    return replace(drawn, logits=jnp.asarray(np.moveaxis(known, 2, 0).astype(np.float32)))


def _mixed(trace: GatingTrace, tokens: int, rng: np.random.Generator) -> Int[np.ndarray, " token"]:
    """Different tokens in random order, those of a sequence by its random part of the mixture."""
    lengths = np.diff(trace.seq_start, append=trace.num_tokens)
    weight = np.repeat(rng.exponential(size=len(lengths)), lengths)  # scaled, uniform over mixtures
    # The smallest of exponential numbers at these rates are a draw without replacement (Efraimidis and Spirakis 2006).
    first = np.argpartition(rng.exponential(size=len(weight)) / weight, tokens - 1)[:tokens]
    return rng.permutation(first)


def topic_batches(
    topics: Sequence[GatingTrace],
    tokens: int,
    batches: int,
    seed: int,
    consecutive: bool = False,
    logits: bool = False,
    resampled: bool = False,
) -> Batch:
    """Batches like those of `sample_batches`, drawn from several traces in turn: batch b from topic b modulo theirs."""
    drawn, each = [], -(-batches // len(topics))
    for number, topic in enumerate(topics):
        own = int(np.random.default_rng([seed, number]).integers(2**62))
        drawn.append(sample_batches(topic, tokens, each, own, consecutive, logits=logits, resampled=resampled))

    def in_turn(*leaves: Array) -> Array:
        dealt = np.stack([np.asarray(leaf) for leaf in leaves], axis=2)
        return jnp.asarray(dealt.reshape(len(dealt), -1, *dealt.shape[3:])[:, :batches])

    return jax.tree.map(in_turn, *drawn)


def successive_batches(
    trace: GatingTrace, tokens: int, batches: int, seed: int, numbered: bool = False
) -> Batch | None:
    """The last tokens of a trace in their order, as batches like those of `sample_batches`, one after the other.

    `None` where the trace is too short.
    """
    first = trace.num_tokens - tokens * batches
    if first < 0:
        return None
    picked = first + np.arange(tokens * batches).reshape(batches, tokens)
    return _picked_batches(trace, picked, np.random.default_rng(seed), numbered)


def request_batches(trace: GatingTrace, requests: int, steps: int, seed: int) -> tuple[Batch, np.ndarray]:
    """Successive tokens of the same requests, as batches: token t of every batch is of one request. Leaves as above.

    A request is a window of `steps` tokens of one sequence, of its decode phase where the trace tells phases. First
    come the first windows of all sequences, then their second ones. Also returns which tokens are in no window and no
    later than the first of one in their sequence, bool [token]: what was seen before. Raises `TraceError` for a trace
    with fewer windows.
    """
    sequence = np.searchsorted(trace.seq_start, np.arange(trace.num_tokens), side="right") - 1
    chosen = request_windows(trace.num_tokens, trace.seq_start, trace.phase, requests, steps)
    picked = chosen[None] + np.arange(steps)[:, None]
    seen = np.ones(trace.num_tokens, bool)
    seen[picked.ravel()] = False
    opened = np.full(len(trace.seq_start), trace.num_tokens)
    np.minimum.at(opened, sequence[chosen], chosen)
    return _picked_batches(trace, picked, np.random.default_rng(seed), False), seen & (
        np.arange(trace.num_tokens) < opened[sequence]
    )


def request_windows(
    tokens: int,
    seq_start: Int[np.ndarray, " sequence"],
    phase: Int[np.ndarray, " token"] | None,
    requests: int,
    steps: int,
) -> Int[np.ndarray, " request"]:
    """The first token of every window of `request_batches`, ascending, of which what was chosen need not be known.

    Raises `TraceError` for a trace with fewer windows.
    """
    sequence = np.searchsorted(seq_start, np.arange(tokens), side="right") - 1
    usable = np.ones(tokens, bool) if phase is None else phase != 0
    first = np.concatenate([[0], np.cumsum(np.bincount(sequence[usable], minlength=len(seq_start)))])
    place = np.cumsum(usable) - 1 - first[sequence]
    length = np.diff(first)[sequence]
    opens = np.flatnonzero(usable & (place % steps == 0) & (place + steps <= length))
    if len(opens) < requests:
        raise TraceError(
            f"a batch of {requests} requests of {steps} tokens each is more than the {len(opens)} in the trace of "
            f"{tokens} tokens; use a smaller batch, fewer iterations or a longer trace"
        )
    return np.sort(opens[np.argsort(place[opens] // steps, kind="stable")[:requests]])


def _picked_batches(trace: GatingTrace, picked: np.ndarray, rng: np.random.Generator, numbered: bool) -> Batch:
    """Batches of the tokens `picked` [batch, token], with all their draws."""
    drawn = take(trace.experts, picked.ravel()).reshape(*picked.shape, *trace.experts.shape[1:])
    experts = np.moveaxis(drawn, 2, 0).astype(np.int32)  # [layer, batch, token, top_k]
    # Made by NumPy throughout: JAX would compile each of these for every new shape.
    slot = rng.integers(trace.top_k, size=experts.shape[:3])
    draw = rng.random(experts.shape, dtype=np.float32)
    within = np.minimum(rng.random(slot.shape, dtype=np.float32), 0.999)  # rounding never reaches the next slot
    return Batch(
        experts=jnp.asarray(experts),
        token_draw=jnp.asarray(((slot + within) / trace.top_k).astype(np.float32)),
        draw=jnp.asarray(draw),
        weight=jnp.asarray(np.ones(experts.shape[:3], np.float32)),
        row=jnp.asarray(np.broadcast_to(picked.astype(np.int32), slot.shape)) if numbered else None,
    )


_GATHER_EXPERT = jax.jit(lambda batch: batch.gather_expert)


def merge_tokens(
    batches: Batch, num_experts: int, by_slot: bool = True, turns: int = 1, rows_per_token: int = 1
) -> Batch:
    """Merges equal tokens of a batch into one weighted row where few kinds of token exist; else returns `batches`.

    With few experts there are few kinds: 8 experts of which 2 are chosen make 28 choices. Where it matters which
    choice a token's draw names (`by_slot`), these are 56; where the token's place in its batch matters, modulo `turns`,
    there are as many times more, and the row of a kind has that place too. Merged, all batches of a layer share their
    rows [layer, row, top_k] and differ in weight [layer, batch, row] alone, so that what does not depend on the weight
    is worked out once for all of them. There may be so many rows for each token of a batch. What a draw says beyond the
    slot is lost: merged batches are for sharded placements, and for exchanges that go by slot and place alone.
    """
    if batches.experts.ndim == batches.weight.ndim:
        return batches  # they are merged already
    layers, count, tokens, top_k = batches.experts.shape
    experts = np.asarray(batches.experts)
    slots = top_k if by_slot else 1
    size = math.comb(num_experts, top_k) * slots * turns
    if size > rows_per_token * tokens or num_experts**top_k >= 2**62 or (experts < 0).any():
        return batches
    kinds = np.array(list(itertools.combinations(range(num_experts), top_k)))
    # A choice as one number: its experts as digits, the highest first. Combinations come in that very order.
    digit = num_experts ** np.arange(top_k)[::-1]
    row = np.searchsorted(kinds @ digit, np.sort(experts.astype(np.int64)) @ digit)
    if by_slot:
        gathers = np.asarray(_GATHER_EXPERT(batches))[..., None]
        row = row * slots + (experts < gathers).sum(axis=-1)
    row = row * turns + np.arange(tokens) % turns
    place = row + size * np.arange(layers * count).reshape(layers, count, 1)
    weight = np.bincount(place.ravel(), np.asarray(batches.weight).ravel(), layers * count * size)
    rows = np.repeat(kinds, slots * turns, axis=0).astype(np.int32)
    token_draw = (np.arange(size) // turns % slots + 0.5) / top_k
    return Batch(
        experts=jnp.asarray(np.broadcast_to(rows, (layers, *rows.shape))),
        token_draw=jnp.asarray(np.broadcast_to(token_draw.astype(np.float32), (layers, size))),
        draw=jnp.asarray(np.zeros((layers, *rows.shape), np.float32)),
        weight=jnp.asarray(weight.reshape(layers, count, size).astype(np.float32)),
    )
