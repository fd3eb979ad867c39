"""Logits of routers where a trace does not have them: reconstructed from gate weights, with bounds (camoe needs them).

A gate's weights are a softmax: of all experts, or of the chosen ones alone. Logits matter up to a number that all
experts of a token share, so one of a token is free: here its smallest chosen logit is 0.

- Weights of a softmax over all experts (they sum to less than 1): chosen logits are exact, and so is what the unchosen
  experts have together; how they divide it is not known. No one has more than the least chosen.
- Weights over the chosen experts alone (they sum to 1): differences of chosen logits are exact, and nothing is known of
  the others but that they are below the least chosen.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float

from jaxmoe.traces.trace import MISSING, GatingTrace, TraceError, load_counts

WHOLE = 0.995  # of weights that sum to 1 but for rounding
LEAST = 1e-8  # a weight that was rounded to 0
# Of the least chosen logit, 0, that no other reaches. A smaller number would not outlast the sum with a bias: XLA takes
# what is below 1e-38 for 0, and float32 has 8 digits.
BELOW = 1e-6

Logits = Literal["recorded", "reconstructed"]


@dataclass(frozen=True)
class Reconstruction:
    """A trace with logits, and the most that each may be; what is not chosen is an assumption within that bound.

    `known_mass` is whether what the unchosen experts of a token have together is known, and kept to.
    """

    trace: GatingTrace
    most: Float[np.ndarray, "token layer expert"]
    known_mass: bool


def recorded_logits(trace: GatingTrace) -> Float[np.ndarray, "token layer expert"]:
    """Logits of a trace that has them. Raises `TraceError` that says where to get them."""
    if trace.logits is not None:
        return trace.logits
    raise TraceError(
        "the trace has no logits, which a biased gate needs; record them (Megatron-core's router traces and this "
        "project's npz can hold them), draw them with `logits: 1.5` in a preset or process, or let a system "
        "reconstruct them from the gate's weights with system.logits or system.gate.logits: reconstructed"
    )


def trace_with_logits(trace: GatingTrace, logits: Logits, key: str) -> GatingTrace:
    """The trace with logits of its own, or with those of its gate weights. Raises `TraceError` that names the key."""
    if logits == "recorded":
        recorded_logits(trace)
    if trace.logits is not None:
        return trace
    try:
        return reconstruct_logits(trace).trace
    except TraceError as error:
        raise TraceError(f"{key} is reconstructed: {error}") from None


def reconstruct_logits(trace: GatingTrace, gap: float = 1.0) -> Reconstruction:
    """Logits from gate weights. Raises `TraceError` for a trace without weights or a choice, or with no softmax's.

    What is not chosen is divided in proportion to how often experts were chosen in the layer, none above the least
    chosen. Where their mass is not known, the most popular of them stands `gap` below the least chosen.
    """
    if trace.weights is None:
        raise TraceError("the trace has no gate weights to reconstruct logits from; use one that has, or with logits")
    if (trace.experts == MISSING).any():
        raise TraceError("a choice is missing, so its weight is unknown; leave such tokens out first")
    weights = np.maximum(trace.weights.astype(np.float64), LEAST)
    total = weights.sum(axis=2)
    if total.max() > 2 - WHOLE:
        raise TraceError(
            f"gate weights of a token sum to {total.max():.4g}, more than 1, so they are no softmax that logits could "
            "be had from; record the logits"
        )
    known = bool((total < WHOLE).mean() > 0.5)
    chosen = np.zeros((*total.shape, trace.num_experts), bool)
    np.put_along_axis(chosen, trace.experts.astype(np.int64), True, axis=2)
    least = weights.min(axis=2, keepdims=True)
    usual = np.maximum(load_counts(trace).counts[0], 0.5)[None]
    if known:
        rest = np.maximum(1 - total, LEAST)[..., None]
        part = _filled(np.where(chosen, 0, usual), rest, least)
    else:
        free = np.where(chosen, 0, usual)
        part = free / free.max(axis=2, keepdims=True) * least * np.exp(-gap)
    np.put_along_axis(part, trace.experts.astype(np.int64), weights, axis=2)
    logits = np.log(np.maximum(part, LEAST)) - np.log(least)
    logits = np.where(chosen, logits, np.minimum(logits, -BELOW)).astype(np.float32)
    most = np.where(chosen, logits, -BELOW).astype(np.float32)
    facts = trace.facts | {"logit_source": "reconstructed from gate weights; those not chosen are assumed"}
    return Reconstruction(replace(trace, logits=logits, facts=facts), most, known)


def _filled(
    usual: Float[np.ndarray, "token layer expert"],
    total: Float[np.ndarray, "token layer 1"],
    most: Float[np.ndarray, "token layer 1"],
) -> Float[np.ndarray, "token layer expert"]:
    """`total` divided in proportion to `usual`, none above `most`: what overflows goes to the others in proportion."""
    part = np.zeros(np.broadcast_shapes(usual.shape, total.shape))
    for _ in range(20):
        free = np.where((part < most) & (usual > 0), usual, 0)
        left = total - part.sum(axis=2, keepdims=True)
        weight = free.sum(axis=2, keepdims=True)
        part = np.minimum(part + np.divide(left * free, weight, out=np.zeros_like(part), where=weight > 0), most)
    return part
