"""Slot placements: which expert every slot of every node holds, and the replicated shares that they make.

Serving engines place experts in this form. Every node has equally many slots: slot p of a layer is on node
p // (slots of a node). An expert with c copies serves 1 / c of its tokens at each, the equal split that all published
balancers assume. All functions are of NumPy arrays, for all layers at once.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.placement.placement import PlanError

EMPTY = -1  # a slot that holds no expert

Slots = Int[np.ndarray, "layer slot"]


def copies_of_slots(slots: Slots, experts: int, nodes: int) -> Int[np.ndarray, "layer expert node"]:
    """How many slots of every node hold each expert.

    Raises `PlanError` where nodes have not equally many slots, or a slot holds what is no expert.
    """
    layers, count = slots.shape
    if nodes < 1 or count % nodes:
        raise PlanError(f"{count} slots for {nodes} nodes; give every node equally many")
    if ((slots < EMPTY) | (slots >= experts)).any():
        wrong = slots[(slots < EMPTY) | (slots >= experts)][0]
        raise PlanError(f"a slot holds expert {wrong}, expected 0 to {experts - 1}, or {EMPTY} for an empty one")
    node = np.arange(count) // (count // nodes)
    place = (np.arange(layers)[:, None] * (experts + 1) + slots + 1) * nodes + node
    counted = np.bincount(place.ravel(), minlength=layers * (experts + 1) * nodes)
    return counted.reshape(layers, experts + 1, nodes)[:, 1:]


def share_of_slots(slots: Slots, experts: int, nodes: int) -> Float[np.ndarray, "layer expert node"]:
    """The replicated shares, float32, each copy serving alike. Raises `PlanError` also for an expert without a slot."""
    copies = copies_of_slots(slots, experts, nodes)
    total = copies.sum(axis=2, keepdims=True)
    if (total == 0).any():
        layer, expert, _ = np.argwhere(total == 0)[0]
        raise PlanError(f"no slot of layer {layer} holds expert {expert}; every expert needs one")
    return (copies / total).astype(np.float32)


def slots_of_share(share: Float[np.ndarray, "layer expert node"], slots_per_node: int) -> Slots:
    """Slots that hold every expert once on each of its hosts, experts in order; what is left stays empty.

    `share_of_slots` has the same hosts, and the same shares where hosts serve alike. Raises `PlanError` where a node
    hosts more experts than it has slots.
    """
    hosted = share > 0
    used = hosted.sum(axis=1)
    if used.max(initial=0) > slots_per_node:
        layer, node = np.argwhere(used > slots_per_node)[0]
        raise PlanError(
            f"node {node} hosts {used[layer, node]} experts in layer {layer}, but has {slots_per_node} slots; give more"
        )
    layers, _, nodes = share.shape
    at = np.cumsum(hosted, axis=1) - 1  # the slot of its node that an expert takes
    slots = np.full((layers, nodes, slots_per_node), EMPTY)
    layer, expert, node = np.nonzero(hosted)
    slots[layer, node, at[layer, expert, node]] = expert
    return slots.reshape(layers, nodes * slots_per_node)


def loads_of_slots(
    slots: Slots, loads: Float[np.ndarray, "layer expert"] | Int[np.ndarray, "layer expert"], nodes: int
) -> Float[np.ndarray, "layer node"]:
    """The load of every node, in the unit of `loads`, under equal split."""
    experts = loads.shape[1]
    total = np.maximum(copies_of_slots(slots, experts, nodes).sum(axis=2), 1)
    each = np.concatenate([loads / total, np.zeros((len(loads), 1))], axis=1)  # the last serves empty slots
    return np.take_along_axis(each, slots, axis=1).reshape(len(slots), nodes, -1).sum(axis=2)


def max_over_mean(loads: Float[np.ndarray, "*lead node"]) -> Float[np.ndarray, "*lead"]:
    """The largest load over the mean of all nodes; 1 where nobody has any."""
    mean = loads.mean(axis=-1)
    return np.where(mean > 0, loads.max(axis=-1) / np.where(mean > 0, mean, 1), 1.0)


def new_copies(before: Slots, after: Slots, experts: int, nodes: int) -> Bool[np.ndarray, "layer expert node"]:
    """Which nodes have to get which expert when slots change: those that hold it after, and not before."""
    held, wanted = (copies_of_slots(slots, experts, nodes) > 0 for slots in (before, after))
    return wanted & ~held
