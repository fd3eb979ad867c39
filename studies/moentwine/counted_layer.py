"""A layer from counts in the event simulator, node by node, as `jaxmoe.engine.counts` prices it."""

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.description import LayerDescription
from jaxmoe.des.layers_in_turn import Phase, phases
from jaxmoe.placement.slots import EMPTY
from jaxmoe.placement.token_layout import TokenLayout


def counted_layer(
    layer: LayerDescription,
    layout: TokenLayout,
    slots: Int[np.ndarray, "node slot"],
    loads: Float[np.ndarray, "group expert"],
    attention: Float[np.ndarray, " node"],
    reduced_bytes: float,
) -> list[Phase]:
    """The phases of a layer in which the tokens of every group make so many choices of each expert.

    All copies of an expert serve equal parts of its choices, each of which is a vector of its own. `reduced_bytes` is
    the buffer of a device in the all-reduce.
    """
    served = _served(slots, loads)
    traffic = np.zeros((layout.num_nodes,) * 2)
    for group, node in np.argwhere(served.sum(axis=2) > 0).tolist():
        for holder in layout.parts[group, :, node].tolist():
            traffic[node, holder] += served[group, node].sum() / layout.parts.shape[1]
    computing = _computing(layer, slots, served.sum(axis=0))
    return phases(layer, layout, [traffic], attention, computing, reduced_bytes)


def _served(
    slots: Int[np.ndarray, "node slot"], loads: Float[np.ndarray, "group expert"]
) -> Float[np.ndarray, "group node slot"]:
    """Choices of every group that each slot serves: all copies of an expert have equal parts."""
    served = np.zeros((len(loads), *slots.shape))
    for expert in range(loads.shape[1]):
        places = np.argwhere(slots == expert)
        for node, slot in places.tolist():
            served[:, node, slot] = loads[:, expert] / len(places)
    return served


def _computing(
    layer: LayerDescription, slots: Int[np.ndarray, "node slot"], rows: Float[np.ndarray, "node slot"]
) -> Float[np.ndarray, " node"]:
    """Compute time of every node, s: the longest of its matrix products and of each memory channel that it uses."""
    seconds = rows.sum(axis=1) * layer.flops_per_token_expert / layer.flops
    for depth, level in enumerate(layer.memory):
        moved = np.zeros(len(rows))
        for node, held in enumerate(slots.tolist()):
            chosen = {expert: 0.0 for expert in held if expert != EMPTY}
            for expert, count in zip(held, rows[node].tolist(), strict=True):
                if expert != EMPTY:
                    chosen[expert] = max(chosen[expert], min(count, 1.0))
            moved[node] = sum(chosen.values()) * layer.expert_bytes
            if depth == 0:
                moved[node] += rows[node].sum() * (layer.dispatch_bytes + layer.combine_bytes)
        asked = np.bincount(level.channel, moved, len(level.bandwidth))
        channel = np.where(asked > 0, level.latency + asked / level.bandwidth, 0.0)
        seconds = np.maximum(seconds, channel[level.channel])
    return seconds
