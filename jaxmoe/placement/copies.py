"""Copies of experts: several of each, whole or cut over a group of nodes, and the rule by which one serves a choice.

A copy is an expert of its own. Where choices name copies in place of experts, and shares are of copies, all else is as
in a sharded placement. The serving rule, which maps a choice to a copy of its expert, is described here:

- *by home*: a table says which copy serves tokens that live at a node. It knows nothing at run time.
- *by draw*: each copy serves a part of its expert's tokens; the recorded draw of the choice picks.
- *least work*: at run time, tokens in their order and choices of a token in theirs, the copy of the least `work` times
  the largest work so far of any of its hosts, this choice included, over the mean work of nodes at the end, plus
  `visits` times the number of nodes that the token visits for it anew. Among equals the one of the lowest number.
- *least work, together*: the same for a token as a whole. All its choices go to the first copies of their experts, or
  all to the second ones, and so on, as to the regions of a machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.errors import PlanError

ALIKE = 1e-5  # costs of copies under `LeastWork` that are equal but for rounding, relative
NO_COPY = -1  # where an expert has fewer copies than others

CopyOf = Int[np.ndarray, "layer copy"]


@dataclass(frozen=True)
class ByHome:
    """The copy of every expert that serves tokens which live at a node."""

    table: np.ndarray  # int [layer, expert, node]
    name: ClassVar[str] = "by_home"

    def check(self, copy_of: CopyOf, nodes: int) -> None:
        layers, experts = len(copy_of), int(copy_of.max()) + 1
        _check_whole("serving_table", self.table, (layers, experts, nodes))
        number = np.clip(self.table, 0, copy_of.shape[1] - 1)
        named = np.take_along_axis(copy_of, number.reshape(layers, -1), axis=1).reshape(number.shape)
        for layer, expert, node in np.argwhere((named != np.arange(experts)[:, None]) | (number != self.table))[:1]:
            raise PlanError(
                f"serving_table has copy {self.table[layer, expert, node]} for expert {expert} at node {node}, row "
                f"{layer} of its layers; name one of {np.flatnonzero(copy_of[layer] == expert).tolist()}"
            )

    def mean_parts(self, copy_of: CopyOf) -> Float[np.ndarray, "layer copy"]:
        """The part of its expert's tokens that every copy serves, tokens living at all nodes alike."""
        layers, _, nodes = self.table.shape
        place = self.table + copy_of.shape[1] * np.arange(layers)[:, None, None]
        return np.bincount(place.ravel(), minlength=copy_of.size).reshape(copy_of.shape) / nodes

    def rows(self, rows: Sequence[int] | Int[np.ndarray, " row"]) -> "ByHome":
        return ByHome(self.table[np.asarray(rows)])

    def arrays(self) -> dict[str, np.ndarray]:
        return {"serving_table": self.table.astype(np.int32)}


@dataclass(frozen=True)
class ByDraw:
    """The part of its expert's tokens that every copy serves; the parts of an expert sum to 1."""

    parts: np.ndarray  # [layer, copy]
    name: ClassVar[str] = "by_draw"

    def check(self, copy_of: CopyOf, nodes: int) -> None:
        _check_numbers("serving_parts", self.parts, copy_of.shape)
        total = _of_experts(self.parts, copy_of)
        for layer, expert in np.argwhere(np.abs(total - 1) > 1e-4)[:1]:
            raise PlanError(
                f"serving_parts of expert {expert}, row {layer} of its layers, sum to {total[layer, expert]:.6g}, "
                "expected 1; divide them by their sum"
            )

    def mean_parts(self, copy_of: CopyOf) -> Float[np.ndarray, "layer copy"]:
        """The part of its expert's tokens that every copy serves."""
        return self.parts

    def rows(self, rows: Sequence[int] | Int[np.ndarray, " row"]) -> "ByDraw":
        return ByDraw(self.parts[np.asarray(rows)])

    def arrays(self) -> dict[str, np.ndarray]:
        return {"serving_parts": self.parts.astype(np.float32)}


@dataclass(frozen=True)
class LeastWork:
    """The two numbers of the rule, for every layer; `together`, a token's choices go to copies of one place."""

    work: np.ndarray  # [layer]
    visits: np.ndarray
    together: bool = False

    @property
    def name(self) -> str:
        return "least_work_together" if self.together else "least_work"

    def check(self, copy_of: CopyOf, nodes: int) -> None:
        count = _of_experts(np.ones(copy_of.shape), copy_of)
        if self.together and (count != count[0, 0]).any():
            raise PlanError(
                f"serving is least_work_together for {count.min():g} to {count.max():g} copies of an expert; give all "
                "equally many, or serve by least_work"
            )
        for name, numbers in self.arrays().items():
            _check_numbers(name, numbers, (len(copy_of),))

    def mean_parts(self, copy_of: CopyOf) -> Float[np.ndarray, "layer copy"]:
        """Equal parts: what copies serve is decided at run time."""
        count = _of_experts(np.ones(copy_of.shape), copy_of)
        return 1 / np.take_along_axis(count, copy_of, axis=1)

    def rows(self, rows: Sequence[int] | Int[np.ndarray, " row"]) -> "LeastWork":
        return LeastWork(self.work[np.asarray(rows)], self.visits[np.asarray(rows)], self.together)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"serving_work": self.work.astype(np.float32), "serving_visits": self.visits.astype(np.float32)}


Serving = ByHome | ByDraw | LeastWork


@dataclass(frozen=True)
class Copies:
    """Copies of the experts of every layer, and the rule by which one of them serves a choice.

    `copy_of` is the expert of every copy, equally many in all layers. `share` is the part of every copy on every node,
    float32; rows sum to 1. Raises `PlanError` for copies that are none, and for an expert without one.
    """

    copy_of: np.ndarray  # int [layer, copy]
    share: np.ndarray  # [layer, copy, node]
    serving: Serving

    def __post_init__(self) -> None:
        if self.share.ndim != 3 or 0 in self.share.shape:
            raise PlanError(f"copy_share has shape {self.share.shape}, expected non-empty [layer, copy, node]")
        _check_whole("copy_of", self.copy_of, self.share.shape[:2])
        if self.copy_of.min() < 0 or self.copy_of.max() >= self.copy_of.shape[1]:
            raise PlanError(
                f"copy_of names experts {self.copy_of.min()} to {self.copy_of.max()} for {self.copy_of.shape[1]} "
                "copies; number experts from 0, each with a copy"
            )
        for layer, expert in np.argwhere(_of_experts(np.ones(self.copy_of.shape), self.copy_of) == 0)[:1]:
            raise PlanError(
                f"copy_of has no copy of expert {expert} in row {layer} of its layers; every expert needs one"
            )
        _check_numbers("copy_share", self.share, self.share.shape)
        total = self.share.sum(axis=2)
        for layer, copy in np.argwhere(np.abs(total - 1) > 1e-4)[:1]:
            raise PlanError(
                f"copy_share of copy {copy}, row {layer} of its layers, sums to {total[layer, copy]:.6g}, expected 1"
            )
        self.serving.check(self.copy_of, self.share.shape[2])

    @property
    def num_experts(self) -> int:
        return int(self.copy_of.max()) + 1

    def rows(self, rows: Sequence[int] | Int[np.ndarray, " row"]) -> "Copies":
        """The copies of these layers alone."""
        return Copies(self.copy_of[np.asarray(rows)], self.share[np.asarray(rows)], self.serving.rows(rows))

    @cached_property
    def of_expert(self) -> Int[np.ndarray, "layer expert most"]:
        """The copies of every expert in the order of their numbers; `NO_COPY` where it has fewer than others."""
        layers, copies = self.copy_of.shape
        # Copies ordered by expert; each has a place among those of its expert.
        order = np.argsort(self.copy_of, axis=1, kind="stable")
        expert = np.take_along_axis(self.copy_of, order, axis=1)
        place = np.arange(copies) - np.stack([np.searchsorted(row, row) for row in expert])
        found = np.full((layers, self.num_experts, int(place.max()) + 1), NO_COPY)
        found[np.arange(layers)[:, None], expert, place] = order
        return found

    @cached_property
    def borders(self) -> Float[np.ndarray, "layer expert most"]:
        """Upper ends of the slices of [0, 1) that copies have by their parts, float32: a draw lies in one of them."""
        parts = np.take_along_axis(
            self.serving.mean_parts(self.copy_of)[:, None, :], np.maximum(self.of_expert, 0), axis=2
        )
        upper = np.cumsum(np.where(self.of_expert == NO_COPY, 0, parts), axis=2, dtype=np.float64)
        return (upper / upper[:, :, -1:]).astype(np.float32)

    def mean_share(self) -> Float[np.ndarray, "layer expert node"]:
        """The part of every expert's work on every node, as the rule fixes it; one at run time is taken for even."""
        layers, _, nodes = self.share.shape
        mean = np.zeros((layers, self.num_experts, nodes))
        served = self.serving.mean_parts(self.copy_of)[:, :, None] * self.share
        np.add.at(mean, (np.arange(layers)[:, None], self.copy_of), served)
        return (mean / mean.sum(axis=2, keepdims=True)).astype(np.float32)

    def memory(self, expert_bytes: float) -> Float[np.ndarray, " node"]:
        """Bytes of weights on every node, of all copies and layers together."""
        return self.share.sum(axis=(0, 1), dtype=np.float64) * expert_bytes

    def served(
        self,
        layer: int,
        experts: Int[np.ndarray, "*lead token top_k"],
        source: Int[np.ndarray, "*lead token"],
        draw: Float[np.ndarray, "*lead token top_k"],
    ) -> Int[np.ndarray, "*lead token top_k"]:
        """The copy that serves every choice of a layer's tokens; -1 for a missing choice.

        `source` is the node where a token lives. Raises `PlanError` for a rule that decides at run time.
        """
        match self.serving:
            case ByHome(table):
                copy = table[layer, experts, source[..., None]]
            case ByDraw():
                place = (self.borders[layer, experts] <= draw[..., None]).sum(axis=-1)
                copy = np.take_along_axis(self.of_expert[layer, experts], place[..., None], axis=-1)[..., 0]
            case LeastWork():
                raise PlanError(
                    f"serving is {self.serving.name}, which decides at run time; simulate it, or serve by home"
                )
        return np.where(experts >= 0, copy, NO_COPY)

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of a plan file for copies."""
        known = {"copy_of": self.copy_of.astype(np.int32), "copy_share": self.share.astype(np.float32)}
        return known | {"serving": np.asarray(self.serving.name)} | self.serving.arrays()


def copies_of_arrays(arrays: dict[str, np.ndarray]) -> Copies:
    """Copies from the arrays of a plan file. Raises `PlanError` where one is missing or is no such array."""

    def given(name: str, kind: str = "fiu") -> Any:
        if name not in arrays:
            raise PlanError(f"has mode copies and no {name}; write the plan again")
        if arrays[name].dtype.kind not in kind:
            raise PlanError(f"{name} is {arrays[name].dtype} of shape {arrays[name].shape}, expected numbers")
        return arrays[name]

    share = given("copy_share")
    with np.errstate(over="ignore"):  # what becomes infinite is refused
        share = share.astype(np.float32)
    match str(arrays.get("serving", "")):
        case "by_home":
            serving: Serving = ByHome(given("serving_table"))
        case "by_draw":
            serving = ByDraw(given("serving_parts").astype(np.float64))
        case "least_work" | "least_work_together" as name:
            work, visits = (given(each).astype(np.float64) for each in ("serving_work", "serving_visits"))
            serving = LeastWork(work, visits, together=name != "least_work")
        case other:
            known = "'by_home', 'by_draw', 'least_work' or 'least_work_together'"
            raise PlanError(f"serving is {other[:40]!r}, expected {known}")
    return Copies(given("copy_of"), share, serving)


def _of_experts(values: Float[np.ndarray, "layer copy"], copy_of: CopyOf) -> Float[np.ndarray, "layer expert"]:
    """Sums over the copies of every expert."""
    experts = int(copy_of.max()) + 1
    place = copy_of + experts * np.arange(len(copy_of))[:, None]
    return np.bincount(place.ravel(), np.ravel(values), len(copy_of) * experts).reshape(len(copy_of), experts)


def _check_whole(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype.kind not in "iu":
        raise PlanError(f"{name} is {array.dtype} of shape {array.shape}, expected whole numbers of shape {shape}")


def _check_numbers(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise PlanError(f"{name} has shape {array.shape}, expected {shape}")
    for at in np.argwhere(~(np.isfinite(array) & (array >= 0)))[:1]:
        raise PlanError(f"{name} has {array[tuple(at)]:g} at {at.tolist()}; give finite numbers from 0 on")
