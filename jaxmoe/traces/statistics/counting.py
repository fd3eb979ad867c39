"""How often experts are chosen, and chosen together: by neighbouring tokens, in neighbouring layers, by one token.

The temporal and spatial relations of the study of data movement on wafer-scale GPUs (III, Fig. 3) are all
functions of these counts. A trace is gone through once, a run of tokens at a time, with one compiled program.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Int64

from jaxmoe.traces.trace import MISSING, GatingTrace, chunks, release

CHUNK_TOKENS = 2**14  # enough for the sums of a chunk to take far longer than the handling of its tables

Report = Callable[[int, int], None]
"""Called with the tokens counted and the tokens in all."""


@dataclass(frozen=True)
class PairCounts:
    """Exact counts of a trace. Missing choices count nowhere.

    `load` is how often each expert was chosen. `token_pairs` counts (expert of a token, expert of the next) in
    one layer, all K x K of a step, where a step is two neighbouring tokens of one sequence. `layer_pairs` counts
    (expert in a layer row, expert in the next row) of one token. `together` counts the two experts i < j that one
    token chose in one layer; what is not above the diagonal is 0. `slots` is how many experts the two tokens of
    each step could have had in common, summed over steps: K of every step where no choice is missing.
    """

    load: Int64[np.ndarray, "layer expert"]
    token_pairs: Int64[np.ndarray, "layer expert expert"]
    layer_pairs: Int64[np.ndarray, "step expert expert"]
    together: Int64[np.ndarray, "layer expert expert"]
    slots: Int64[np.ndarray, " layer"]

    @property
    def shared(self) -> Int64[np.ndarray, " layer"]:
        """How many experts the two tokens of each step had in common, summed over steps."""
        return np.einsum("lee->l", self.token_pairs)

    @property
    def reuse(self) -> np.ndarray:
        """The mean part of its experts that a token has in common with the one before, [layer]; NaN without steps."""
        return np.divide(self.shared, self.slots, out=np.full(self.slots.shape, np.nan), where=self.slots > 0)


def count_pairs(
    trace: GatingTrace,
    report: Report | None = None,
    only: Bool[np.ndarray, " token"] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> PairCounts:
    """Count a trace, or only those of its tokens, and steps between them, that are marked.

    `chunk_tokens` bounds what is in memory at a time and changes no count.
    """
    starts = np.zeros(trace.num_tokens + 1, bool)
    starts[trace.seq_start] = starts[-1] = True

    def pairings() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for part in _even_parts(trace.num_tokens, chunk_tokens):
            after = slice(part.start + 1, part.stop + 1)
            tokens = np.asarray(trace.experts[part.start : after.stop])
            if only is not None:
                tokens = np.where(only[part.start : after.stop, None, None], tokens, MISSING)
            here = tokens[: part.stop - part.start]
            following = np.full_like(here, MISSING)
            linked = np.flatnonzero(~starts[after])
            following[linked] = tokens[linked + 1]
            yield here, following, here

    return _count(trace, pairings(), report, chunk_tokens)


def count_shuffled(
    trace: GatingTrace, seed: int, report: Report | None = None, chunk_tokens: int = CHUNK_TOKENS
) -> PairCounts:
    """Count the trace with its order taken away: what token and layer pairs, and reuse, are by chance.

    Every token is followed by another token of the trace, taken at random; and its experts in one layer are
    paired with those that this other token has in the next. Each token is once the first and once the second.
    A trace of several chunks is read a chunk at a time: the tokens of a chunk, in random order, are followed by
    those of another chunk, taken at random, in random order. Where the last chunk is the shorter, as many tokens
    as it lacks, fewer than there are chunks, are left out. The same seed gives the same counts.
    """
    rng = np.random.default_rng(seed)
    parts = list(_even_parts(trace.num_tokens, chunk_tokens))
    order = rng.permutation(len(parts))

    def shuffled(part: slice) -> np.ndarray:
        return rng.permutation(np.asarray(trace.experts[part]))

    def pairings() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for this, other in zip(order, np.roll(order, -1), strict=True):
            here = shuffled(parts[this])
            # In one chunk a token is followed by its neighbour in random order, which is never itself.
            following = np.roll(here, -1, axis=0) if this == other else shuffled(parts[other])
            both = min(len(here), len(following))
            yield here[:both], following[:both], following[:both]

    return _count(trace, pairings(), report, chunk_tokens)


def _even_parts(tokens: int, most: int) -> Iterator[slice]:
    """Slices of at most `most` tokens, all of one length but for the last, which lacks less than one for each."""
    return chunks((tokens,), 1, math.ceil(tokens / math.ceil(tokens / most)))


def _count(
    trace: GatingTrace,
    pairings: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    report: Report | None,
    chunk_tokens: int,
) -> PairCounts:
    """Add up the counts of chunks: (tokens, those that follow them, those that have their next layer)."""
    layers = trace.experts.shape[1]
    # Few different lengths, so that traces of a model share a compiled program.
    length = min(chunk_tokens, 2 ** (trace.num_tokens - 1).bit_length())
    table = (layers, trace.num_experts, trace.num_experts)
    sums = [np.zeros(shape, np.int64) for shape in (table, (layers - 1, *table[1:]), table, (layers,))]
    done = 0
    for pairing in pairings:
        counts = _count_chunk(*(_padded(tokens, length) for tokens in pairing), num_experts=trace.num_experts)
        for total, part in zip(sums, counts, strict=True):
            total += np.asarray(part)
        release(trace.experts)
        done += len(pairing[0])
        if report is not None:
            report(done, trace.num_tokens)
    token_pairs, layer_pairs, together, slots = sums
    load = np.einsum("lee->le", together).copy()
    np.einsum("lee->le", together)[...] = 0
    return PairCounts(load, token_pairs, layer_pairs, together, slots)


def _padded(tokens: np.ndarray, length: int) -> np.ndarray:
    padding = ((0, length - len(tokens)), (0, 0), (0, 0))
    return np.pad(tokens, padding, constant_values=MISSING)


@partial(jax.jit, static_argnames="num_experts")
def _count_chunk(
    here: Int[Array, "token layer top_k"],
    following: Int[Array, "token layer top_k"],
    above: Int[Array, "token layer top_k"],
    *,
    num_experts: int,
) -> tuple[
    Int32[Array, "layer expert expert"],
    Int32[Array, "step expert expert"],
    Int32[Array, "layer expert expert"],
    Int32[Array, " layer"],
]:
    """Token pairs, layer pairs, pairs i <= j of one token with loads on the diagonal, and slots of a chunk.

    `following` are the tokens of the next step, `above` those that have the next layer.
    """
    first, second = np.triu_indices(here.shape[2])

    def layer(rows: tuple[Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        here, following, above = (row.astype(jnp.int32) for row in rows)
        one, other = here[:, first], here[:, second]
        return (
            _tally(here[:, :, None], following[:, None, :], num_experts),
            _tally(here[:, :, None], above[:, None, :], num_experts),
            _tally(jnp.minimum(one, other), jnp.maximum(one, other), num_experts),
            jnp.minimum((here != MISSING).sum(axis=1), (following != MISSING).sum(axis=1)).sum(),
        )

    # Layer after layer, because one layer's tables stay in the cache.
    by_layer = [jnp.swapaxes(tokens, 0, 1) for tokens in (here, following, above)]
    by_layer[2] = jnp.roll(by_layer[2], -1, axis=0)
    token_pairs, layer_pairs, together, slots = jax.lax.map(layer, tuple(by_layer))
    return token_pairs, layer_pairs[:-1], together, slots


def _tally(one: Int32[Array, "..."], other: Int32[Array, "..."], num_experts: int) -> Int32[Array, "expert expert"]:
    """How often each pair (one, other) occurs. Those with a missing expert go to a spare cell."""
    known = (one != MISSING) & (other != MISSING)
    cell = jnp.where(known, one * num_experts + other, num_experts**2)
    counts = jnp.zeros(num_experts**2 + 1, jnp.int32).at[cell.ravel()].add(1, mode="promise_in_bounds")
    return counts[:-1].reshape(num_experts, num_experts)
