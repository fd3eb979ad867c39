"""What the nodes of a placement get to do over time, and in batches."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxmoe.traces.chunks import release
from jaxmoe.traces.statistics.counting import CHUNK_TOKENS
from jaxmoe.traces.statistics.drawn import drawn_loads
from jaxmoe.traces.statistics.groups import group_loads
from jaxmoe.traces.trace import MISSING, GatingTrace, TraceError

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
