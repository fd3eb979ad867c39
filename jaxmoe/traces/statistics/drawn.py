"""Batches of tokens drawn from a trace, as their loads."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from jaxmoe.traces.chunks import take
from jaxmoe.traces.statistics.counting import CHUNK_TOKENS
from jaxmoe.traces.statistics.groups import group_loads
from jaxmoe.traces.trace import GatingTrace, TraceError


def drawn_loads(
    trace: GatingTrace, sizes: Sequence[int], batches: int, seed: int
) -> Iterator[Int32[np.ndarray, "batch size layer expert"]]:
    """Loads of `batches` batches of every size, in runs of batches that fit in memory.

    `sizes` are tokens in a batch, ascending. A batch is different tokens taken at random from the whole trace; one
    of a smaller size is part of the one of the next. Raises `TraceError` when the trace has fewer tokens. The same
    seed gives the same batches.
    """
    most = sizes[-1]
    if most > trace.num_tokens:
        raise TraceError(f"a batch of {most} tokens cannot be drawn from a trace of {trace.num_tokens}")
    rng = np.random.default_rng(seed)
    at_once = min(batches, max(1, CHUNK_TOKENS // most))
    added = np.searchsorted(sizes, np.arange(most), side="right")  # the first size that has each token
    group = (np.arange(at_once)[:, None] * len(sizes) + added).ravel().astype(np.int32)
    for start in range(0, batches, at_once):
        picked = np.concatenate([_draw(rng, trace.num_tokens, most) for _ in range(at_once)])
        experts = take(trace.experts, picked)
        loads = group_loads(experts, group, groups=at_once * len(sizes), num_experts=trace.num_experts)
        by_size = np.asarray(loads).reshape(at_once, len(sizes), *loads.shape[1:])
        yield np.cumsum(by_size, axis=1, dtype=np.int32)[: batches - start]


def _draw(rng: np.random.Generator, tokens: int, count: int) -> np.ndarray:
    """`count` of `tokens` tokens in random order, without a list of all of them."""
    return rng.choice(tokens, count, replace=False, shuffle=True)
