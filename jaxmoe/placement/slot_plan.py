"""A placement as serving engines hold it: which expert every slot of every rank has, layer by layer."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.placement.placement import Placement, PlanError
from jaxmoe.placement.slots import (
    EMPTY,
    Slots,
    copies_of_slots,
    loads_of_slots,
    new_copies,
    share_of_slots,
    slots_of_share,
)


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
    empty = int((slots == EMPTY).sum())
    if empty:
        slots = filled(slots, experts, nodes)
        notes.append(f"{empty} slots that no expert needs hold further copies, since every rank has equally many")
    return SlotPlan(slots, nodes, experts, placement.layer_ids), notes


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
