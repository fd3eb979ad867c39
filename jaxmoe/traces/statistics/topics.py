"""Expert load split by topic, batch, node and group of experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int, Int32, Int64

from jaxmoe.traces.statistics.counting import CHUNK_TOKENS
from jaxmoe.traces.statistics.heatmaps import common_fraction, hottest
from jaxmoe.traces.trace import MISSING, GatingTrace, LoadCounts, TraceError, chunks, release, take

# Loads of groups of tokens: windows, batches, topics.


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


# Batches of tokens drawn from a trace, as their loads.


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


# What the nodes of a placement get to do over time, and in batches.

Shares = Float[np.ndarray, "layer expert node"]


def expert_runs(layers: int, experts: int, nodes: int) -> Float32[np.ndarray, "layer expert node"]:
    """The usual expert parallelism: whole experts, in runs of equal or nearly equal length, over the nodes."""
    host = np.arange(experts) * nodes // experts
    return np.broadcast_to(np.eye(nodes, dtype=np.float32)[host], (layers, experts, nodes))


def node_load_ratio(trace: GatingTrace, share: Shares, window_tokens: int) -> Float32[np.ndarray, "window layer node"]:
    """Load of every node over the mean of all, in windows of consecutive tokens (moentwine Fig. 12).

    The share of each expert's work that a node has is `share`. Tokens after the last full window are left out; a
    window without any choice in a layer is NaN there. Raises `TraceError` when the trace is shorter than a window.
    """
    windows = trace.num_tokens // window_tokens
    if windows == 0:
        raise TraceError(f"has {trace.num_tokens} tokens, fewer than a window of {window_tokens}; take a smaller one")
    at_once = min(windows, max(1, CHUNK_TOKENS // window_tokens))
    group = np.repeat(np.arange(at_once, dtype=np.int32), window_tokens)
    ratios, weights = [], jnp.asarray(share)
    for start in range(0, windows, at_once):
        stop = min(start + at_once, windows)
        experts = np.asarray(trace.experts[start * window_tokens : stop * window_tokens])
        padding = (at_once - (stop - start)) * window_tokens
        experts = np.pad(experts, ((0, padding), (0, 0), (0, 0)), constant_values=MISSING)
        loads = group_loads(experts, group, groups=at_once, num_experts=trace.num_experts)
        ratios.append(np.asarray(_ratio(loads, weights))[: stop - start])
        release(trace.experts)
    return np.concatenate(ratios)


def batch_node_ratio(
    trace: GatingTrace, share: Shares, batch_tokens: int, batches: int = 256, seed: int = 0
) -> Float32[np.ndarray, "batch layer node"]:
    """Load of every node over the mean of all, in batches of tokens drawn at random from the whole trace.

    Raises `TraceError` when the trace has fewer tokens than a batch. The same seed gives the same batches.
    """
    weights = jnp.asarray(share)
    drawn = drawn_loads(trace, [batch_tokens], batches, seed)
    return np.concatenate([np.asarray(_ratio(loads[:, 0], weights)) for loads in drawn])


@dataclass(frozen=True)
class Imbalance:
    """Load of the busiest node over the mean, `max_over_mean`, in windows or batches: their mean and tail."""

    mean: Float[np.ndarray, " layer"]
    p95: Float[np.ndarray, " layer"]
    worst: Float[np.ndarray, " layer"]


def imbalance(ratio: Float[np.ndarray, "batch layer node"]) -> Imbalance:
    """How unequal the loads of nodes are. Batches without a choice in a layer do not count there."""
    busiest = ratio.max(axis=2).T.astype(np.float64)
    return Imbalance(*np.array([_mean_and_tail(layer[np.isfinite(layer)]) for layer in busiest]).T)


def _mean_and_tail(values: np.ndarray) -> tuple[float, float, float]:
    if values.size == 0:
        return np.nan, np.nan, np.nan
    return float(values.mean()), float(np.percentile(values, 95)), float(values.max())


@jax.jit
def _ratio(
    loads: Int32[Array, "window layer expert"] | Int32[np.ndarray, "window layer expert"],
    share: Float[Array, "layer expert node"],
) -> Float[Array, "window layer node"]:
    load = jnp.einsum("wle,len->wln", loads.astype(share.dtype), share)
    return load / load.mean(axis=-1, keepdims=True)


# Which experts are popular with which topic (wafer-scale study, Ob4, Fig. 7): loads by topic and their overlap.
#
# A topic is what sequences of one name, load counts of one window, or whole traces have in common.

TOP_EXPERTS = 10  # as the study shows them


@dataclass(frozen=True)
class Topics:
    """How often the tokens of every topic chose each expert, in the layers that all topics have."""

    names: tuple[str, ...]
    layer_ids: np.ndarray
    counts: Int64[np.ndarray, "topic layer expert"]

    @property
    def load(self) -> Float64[np.ndarray, "topic layer expert"]:
        """Loads over the mean of topic and layer, as in Fig. 7a; 0 where there are none."""
        mean = self.counts.mean(axis=-1, keepdims=True)
        return np.divide(self.counts, mean, out=np.zeros(self.counts.shape), where=mean > 0)

    def top(self, count: int = TOP_EXPERTS) -> np.ndarray:
        """The most popular experts of every topic, int [topic, layer, rank] (Fig. 7b)."""
        return hottest(self.counts, count)

    def overlap(self, count: int = TOP_EXPERTS) -> Float64[np.ndarray, "topic topic layer"]:
        """The part of the most popular experts that two topics have in common."""
        top = self.top(count)
        return np.stack([common_fraction(np.broadcast_to(one, top.shape), top) for one in top])


def topics_of_sequences(trace: GatingTrace, chunk_tokens: int = CHUNK_TOKENS) -> Topics:
    """Topics as sequences are named, in the order of their first one.

    Raises `TraceError` when the trace does not name its sequences.
    """
    if trace.seq_name is None:
        raise TraceError("does not name its sequences; it needs the array seq_name")
    names = tuple(dict.fromkeys(trace.seq_name))
    number = {name: index for index, name in enumerate(names)}
    lengths = np.diff(trace.seq_start, append=trace.num_tokens)
    group = np.repeat([number[name] for name in trace.seq_name], lengths)
    return Topics(names, trace.layer_ids, loads_of_groups(trace, group, len(names), chunk_tokens))


def topics_of_windows(loads: LoadCounts) -> Topics:
    """Topics as windows are named; windows of one name are added up."""
    names = tuple(dict.fromkeys(loads.window_name))
    number = {name: index for index, name in enumerate(names)}
    counts = np.zeros((len(names), *loads.counts.shape[1:]), np.int64)
    np.add.at(counts, [number[name] for name in loads.window_name], loads.counts)
    return Topics(names, loads.layer_ids, counts)


def topics_of_files(loads: Mapping[str, LoadCounts]) -> Topics:
    """Topics as files of one model are named, in the layers that all of them have.

    Raises `TraceError` when files differ in their number of experts or have no layer in common.
    """
    first, *others = loads.items()
    for name, other in others:
        if other.num_experts != first[1].num_experts:
            raise TraceError(
                f"{name} has {other.num_experts} experts, {first[0]} has {first[1].num_experts}; "
                "take files of one model"
            )
    common = [layer for layer in first[1].layer_ids.tolist() if all(layer in each.layer_ids for each in loads.values())]
    if not common:
        raise TraceError(f"{', '.join(loads)} have no layer in common; take files of one model")
    rows = [[each.layer_ids.tolist().index(layer) for layer in common] for each in loads.values()]
    counts = [each.counts.sum(axis=0)[row] for each, row in zip(loads.values(), rows, strict=True)]
    return Topics(tuple(loads), np.array(common), np.stack(counts))
