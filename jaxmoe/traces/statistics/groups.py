"""Loads of groups of tokens: windows, batches, topics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Int64

from jaxmoe.traces.chunks import chunks, release
from jaxmoe.traces.statistics.counting import CHUNK_TOKENS
from jaxmoe.traces.trace import MISSING, GatingTrace


def loads_of_groups(
    trace: GatingTrace, group: Int[np.ndarray, " token"], groups: int, chunk_tokens: int = CHUNK_TOKENS
) -> Int64[np.ndarray, "group layer expert"]:
    """How often the tokens of every group chose each expert. `group` numbers each token's, from 0; -1 is none.

    Missing choices count nowhere. `chunk_tokens` bounds what is in memory at a time.
    """
    loads = np.zeros((groups, trace.experts.shape[1], trace.num_experts), np.int64)
    for part in chunks((trace.num_tokens,), 1, chunk_tokens):
        padding = min(chunk_tokens, trace.num_tokens) - (part.stop - part.start)
        experts = np.pad(trace.experts[part], ((0, padding), (0, 0), (0, 0)), constant_values=MISSING)
        member = np.pad(group[part], (0, padding)).astype(np.int32)
        loads += np.asarray(group_loads(experts, member, groups=groups, num_experts=trace.num_experts))
        release(trace.experts)
    return loads


@partial(jax.jit, static_argnames=("groups", "num_experts"))
def group_loads(
    experts: Int[Array, "token layer top_k"] | Int[np.ndarray, "token layer top_k"],
    group: Int[Array, " token"] | Int[np.ndarray, " token"],
    *,
    groups: int,
    num_experts: int,
) -> Int32[Array, "group layer expert"]:
    """The loads of tokens in memory, by group."""
    layers = experts.shape[1]
    row = group.astype(jnp.int32)[:, None] * layers + jnp.arange(layers)
    known = (experts != MISSING) & (group[:, None, None] >= 0)
    cells = groups * layers * num_experts
    cell = jnp.where(known, row[..., None] * num_experts + experts.astype(jnp.int32), cells)
    counts = jnp.zeros(cells + 1, jnp.int32).at[cell.ravel()].add(1, mode="promise_in_bounds")
    return counts[:-1].reshape(groups, layers, num_experts)
