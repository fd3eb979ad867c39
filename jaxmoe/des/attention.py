"""Attention in equal groups of nodes, for the simulator: every node works for the tokens of its own group."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.description import LayerDescription


@dataclass(frozen=True)
class AttentionDescription:
    """Attention costs of a node: FLOPs and bytes for every token of its group, and bytes of weights for every step.

    `group` names the group of every node. Costs are those of one node, its share in a tensor-parallel group.
    """

    group: Int[np.ndarray, " node"]
    flops_per_token: float
    weight_bytes: float
    context_bytes: float  # of keys and values, for a token
    vector_bytes: float


def attention_seconds(
    layer: LayerDescription, attention: AttentionDescription, group: Int[np.ndarray, " token"]
) -> float:
    """Attention time of the slowest node, s, for tokens that belong to the groups `group`.

    Weights, keys and values pass every level of memory, hidden vectors the first level alone.
    """
    tokens = np.bincount(group, minlength=attention.group.max() + 1)[attention.group]
    seconds = tokens * attention.flops_per_token / layer.flops
    read = attention.weight_bytes + tokens * attention.context_bytes
    for depth, level in enumerate(layer.memory):
        asked = read if depth else read + tokens * 2 * attention.vector_bytes
        served = np.bincount(level.channel, asked, len(level.bandwidth))
        channel: Float[np.ndarray, " channel"] = level.latency + served / level.bandwidth
        seconds = np.maximum(seconds, channel[level.channel])
    return float(seconds.max())
