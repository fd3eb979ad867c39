"""How long every node computes: its products, and what its memory channels have to bring for them."""

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.description import Gemm, LayerDescription
from jaxmoe.des.tokens import TokenPlan
from jaxmoe.traces import Batch


def node_seconds(layer: LayerDescription, plan: TokenPlan, batch: Batch) -> Float[np.ndarray, " node"]:
    """A node is done when its products are, and when each of its channels has served all that use it."""
    if layer.gemm is None:
        seconds = plan.part.sum(axis=(0, 1)) * layer.flops_per_token_expert / layer.flops
    else:
        seconds = _gemm_seconds(layer.gemm, plan, np.asarray(batch.experts), layer.mode == "sharded")
    weights = plan.experts_read * layer.expert_bytes
    vectors = plan.visited.sum(axis=0) * (layer.dispatch_bytes + layer.combine_bytes)
    for depth, level in enumerate(layer.memory):
        asked = weights if depth else weights + vectors
        served = np.bincount(level.channel, asked, len(level.bandwidth))
        channel = np.where(served > 0, level.latency + served / level.bandwidth, 0.0)
        seconds = np.maximum(seconds, channel[level.channel])
    return seconds


def _gemm_seconds(
    gemm: Gemm, plan: TokenPlan, experts: Int[np.ndarray, "token top_k"], sharded: bool
) -> Float[np.ndarray, " node"]:
    """The products of every expert on every node one after the other; a whole copy is apart from what is placed."""
    token, choice, node = np.nonzero(plan.part)
    is_copy = plan.served[token, choice] >= 0
    part = np.where(is_copy | (not sharded), 1.0, plan.part[token, choice, node])
    products = np.stack([node, experts[token, choice], is_copy])
    (node, _, _), first, tokens = np.unique(products, axis=1, return_index=True, return_counts=True)
    return np.bincount(node, gemm(node, tokens, part[first]), plan.part.shape[2])
