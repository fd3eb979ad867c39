"""Slot placements: which expert every slot of every node or rank holds, and the replicated shares that they make.

Serving engines place experts in this form. Every node has equally many slots: slot p of a layer is on node
p // (slots of a node). An expert with c copies serves 1 / c of its tokens at each, the equal split that all published
balancers assume. Functions of NumPy arrays are for all layers at once, those of JAX arrays for one.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.placement.copies import Copies
from jaxmoe.placement.placement import Placement, PlanError

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


# Slots of all layers as one plan.


@dataclass(frozen=True)
class SlotPlan:
    """Experts of all slots, int [layer, slot]; every rank has equally many, one after another.

    `layer_ids` are layers with routed experts, as numbered in the full model. `num_layers` counts dense ones as well,
    where it is known. Every expert has a slot in every layer, and every slot an expert. Raises `PlanError` otherwise.
    """

    slots: Slots
    ranks: int
    num_experts: int
    layer_ids: tuple[int, ...]
    num_layers: int | None = None

    def __post_init__(self) -> None:
        layers, count = self.slots.shape
        if self.ranks < 1 or count % self.ranks:
            raise PlanError(f"{count} slots do not divide among {self.ranks} ranks; give every rank equally many")
        if count < self.num_experts:
            raise PlanError(f"{count} slots cannot hold {self.num_experts} experts; every expert needs one")
        if len(self.layer_ids) != layers:
            raise PlanError(f"has {layers} layers with experts, the model {len(self.layer_ids)}; use that of its model")
        wrong = (self.slots < 0) | (self.slots >= self.num_experts)
        if wrong.any():
            row, slot = np.argwhere(wrong)[0]
            raise PlanError(
                f"slot {slot} of layer {self.layer_ids[row]} holds expert {self.slots[row, slot]}, expected 0 to "
                f"{self.num_experts - 1}"
            )
        missing = self.copies.sum(axis=2) == 0
        if missing.any():
            row, expert = np.argwhere(missing)[0]
            raise PlanError(f"no slot of layer {self.layer_ids[row]} holds expert {expert}; every expert needs one")

    @property
    def slots_per_rank(self) -> int:
        return self.slots.shape[1] // self.ranks

    @property
    def redundant(self) -> int:
        """Slots of a layer beyond one for every expert."""
        return self.slots.shape[1] - self.num_experts

    @property
    def copies(self) -> Int[np.ndarray, "layer expert rank"]:
        """How many slots of every rank hold each expert."""
        return copies_of_slots(self.slots, self.num_experts, self.ranks)

    @property
    def repeated(self) -> Bool[np.ndarray, "layer expert rank"]:
        """Where a rank has an expert in more than one slot: memory that serves nobody."""
        return self.copies > 1

    def loads(self, counts: Float[np.ndarray, "layer expert"]) -> Float[np.ndarray, "layer rank"]:
        """The load of every rank under equal split, in the unit of `counts`."""
        return loads_of_slots(self.slots, counts, self.ranks)

    def placement(self) -> Placement:
        """The replicated placement with the same shares, each copy serving alike."""
        share = share_of_slots(self.slots, self.num_experts, self.ranks)
        return Placement(share, None, "replicated", self.layer_ids, {"slots": self.slots.tolist()})


def slot_plan(placement: Placement) -> tuple[SlotPlan, list[str]]:
    """A placement in slots, and what is lost by it. Slots that some node does not need get further copies.

    A plan that was made of slots gets those. Raises `PlanError` for experts that are shared out in parts.
    """
    if placement.copies is not None:
        return _slots_of_copies(placement.copies, placement.layer_ids)
    share = placement.share
    layers, experts, nodes = share.shape
    if placement.mode == "sharded" and (share.max(axis=2) < 1 - 1e-4).any():
        raise PlanError(
            "gives parts of experts to nodes, but a slot holds a whole one; use a plan of whole experts, such as that "
            "of ep_balanced, or a replicated one"
        )
    recorded = placement.meta.get("slots")
    if recorded is not None:
        slots = np.asarray(recorded)
        if slots.ndim != 2 or len(slots) != layers or slots.dtype.kind != "i":
            raise PlanError(f"meta.slots has the shape {slots.shape}, expected slots of {layers} layers")
        return SlotPlan(slots, nodes, experts, placement.layer_ids), []
    hosts = share > 1e-4
    slots = slots_of_share(np.where(hosts, share, 0), int(hosts.sum(axis=1).max()))
    notes = []
    even = np.where(hosts, 1 / hosts.sum(axis=2, keepdims=True), 0)
    if np.abs(even - share).max() > 1e-3:
        notes.append("copies of an expert serve unequal parts of its tokens; slots do not hold that, each serves alike")
    return _full(slots, experts, nodes, placement.layer_ids, notes)


def _slots_of_copies(copies: Copies, layer_ids: tuple[int, ...]) -> tuple[SlotPlan, list[str]]:
    """Copies that are whole on single nodes, in slots; the rule by which they serve is lost."""
    for row, copy in np.argwhere(copies.share.max(axis=2) < 1 - 1e-4)[:1]:
        raise PlanError(
            f"copy {copy}, of expert {copies.copy_of[row, copy]} in layer {layer_ids[row]}, is cut over several nodes, "
            "but a slot holds a whole one; use copies on single nodes, such as those of regions_1x2_ep"
        )
    node, nodes = copies.share.argmax(axis=2), copies.share.shape[2]
    most = max(int(np.bincount(row).max()) for row in node)
    slots = np.full((len(node), nodes, most), EMPTY)
    for row, (hosts, experts) in enumerate(zip(node, copies.copy_of, strict=True)):
        for host in range(nodes):
            held = experts[hosts == host]
            slots[row, host, : len(held)] = held
    notes = [f"slots do not hold the rule {copies.serving.name}; engines choose among copies by a rule of their own"]
    return _full(slots.reshape(len(slots), -1), copies.num_experts, nodes, layer_ids, notes)


def _full(
    slots: Slots, experts: int, nodes: int, layer_ids: tuple[int, ...], notes: list[str]
) -> tuple[SlotPlan, list[str]]:
    """A plan without empty slots, and notes on it."""
    empty = int((slots == EMPTY).sum())
    if empty:
        slots = filled(slots, experts, nodes)
        notes.append(f"{empty} slots that no expert needs hold further copies, since every rank has equally many")
    return SlotPlan(slots, nodes, experts, layer_ids), notes


def filled(slots: Slots, experts: int, nodes: int) -> Slots:
    """The slots with a further copy in every empty one: of the expert with the fewest that its rank does not have."""
    slots, per_rank = slots.copy(), slots.shape[1] // nodes
    for row, slot in np.argwhere(slots == EMPTY):
        rank = slot // per_rank
        there = slots[row, rank * per_rank : (rank + 1) * per_rank]
        count = np.bincount(slots[row][slots[row] != EMPTY], minlength=experts)
        count[there[there != EMPTY]] += slots.shape[1]  # before an expert is twice on a rank, any other one
        slots[row, slot] = count.argmin()
    return slots


def moved(before: SlotPlan, after: SlotPlan) -> Bool[np.ndarray, "layer expert rank"]:
    """Which ranks have to get which expert for `after`. Raises `PlanError` for plans of different models or ranks."""
    for what, one, other in (
        ("experts", before.num_experts, after.num_experts),
        ("ranks", before.ranks, after.ranks),
        ("layers", before.layer_ids, after.layer_ids),
    ):
        if one != other:
            raise PlanError(
                f"the plans have different {what}, {one} and {other}; compare plans of one model and machine"
            )
    return new_copies(before.slots, after.slots, before.num_experts, before.ranks)


# Loads of the slots of one layer, as JAX functions: copies of an expert serve equal parts of its tokens.


NodeSlots = Int[Array, "node slot"]


def copies_of(slots: NodeSlots, experts: int) -> Int[Array, " expert"]:
    """Slots that hold each expert."""
    return jnp.zeros(experts + 1, jnp.int32).at[jnp.where(slots == EMPTY, experts, slots)].add(1)[:experts]


def per_slot(slots: NodeSlots, loads: Float[Array, "*group expert"]) -> Float[Array, "*group node slot"]:
    """The load of every slot under equal split."""
    each = loads / jnp.maximum(copies_of(slots, loads.shape[-1]), 1)
    return jnp.where(slots == EMPTY, 0, each[..., slots])


def node_loads(slots: NodeSlots, loads: Float[Array, " expert"]) -> Float[Array, " node"]:
    """The load of every node under equal split: its heat, moentwine Algorithm 1."""
    return per_slot(slots, loads).sum(axis=-1)


def share_of(slots: NodeSlots, experts: int) -> Float[Array, "expert node"]:
    """The part of every expert's tokens that each node serves."""
    each = 1 / jnp.maximum(copies_of(slots, experts), 1)
    node = jnp.arange(slots.shape[0])[:, None]
    held = jnp.zeros((experts + 1, slots.shape[0])).at[jnp.where(slots == EMPTY, experts, slots), node].add(1)
    return held[:experts] * each[:, None]


def repeated(slots: Int[Array, "*lead node slot"]) -> Bool[Array, "*lead node slot"]:
    """Slots whose expert another slot of the same node holds, before it."""
    count = slots.shape[-1]
    return ((slots[..., :, None] == slots[..., None, :]) & np.tri(count, k=-1, dtype=bool)).any(axis=-1)


def excess_over_mean(loads: Float[Array, "*lead node"]) -> Float[Array, "*lead"]:
    """(max - mean) / mean, moentwine Eq. 2; 0 where nobody has any load."""
    mean = loads.mean(axis=-1)
    return jnp.where(mean > 0, loads.max(axis=-1) / jnp.where(mean > 0, mean, 1) - 1, 0)
