"""Regions: the machine in equal parts, each with a copy of every expert that serves the tokens living there.

Data parallelism times tensor, expert or hybrid parallelism. The names say how the machine is cut and what is inside:
`regions_1x2_tp` and `regions_1x2_ep` have two halves of a mesh, cut along y, `regions_1x2_hybrid_4x4` has 4x4 groups in
each half, over which experts are cut. Elsewhere a single number cuts successive nodes, as in `regions_2_tp`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Int

from jaxmoe.errors import PlanError
from jaxmoe.hardware import AbstractTopology
from jaxmoe.placement.copies import ByHome, Copies, LeastWork
from jaxmoe.placement.exchange import Rings
from jaxmoe.placement.strategies import (
    Frequency,
    Shares,
    Shipped,
    equal_cuts,
    equal_groups,
    expert_parallel_on,
    in_groups,
    tensor_parallel,
)

SPREAD = 0.3  # standard deviation of the logarithm of the errors with which experts are dealt in further regions
_CUT = r"[1-9][0-9]*(?:x[1-9][0-9]*)?"
_NAME = re.compile(rf"regions_({_CUT})_(?:(tp)|(ep)|hybrid_({_CUT}))")


@dataclass(frozen=True)
class Regions:
    """How the machine is cut into regions, and what is inside of each: `groups` are those of a hybrid."""

    cut: tuple[int, ...]
    inside: Literal["tp", "ep", "hybrid"]
    groups: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return math.prod(self.cut)

    @property
    def name(self) -> str:
        sides = ["x".join(map(str, each)) for each in (self.cut, self.groups) if each]
        return "_".join(["regions", sides[0], self.inside, *sides[1:]])


def regions_named(name: str) -> Regions:
    """The regions of this name. Raises `PlanError` for any other."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise PlanError(f"regions are {name!r}, expected a name such as regions_1x2_tp, _ep or _hybrid_4x4")
    cut, tensor, expert, groups = found.groups()
    return Regions(_sides(cut), "tp" if tensor else "ep" if expert else "hybrid", _sides(groups) if groups else ())


def numbers_of_regions(topology: AbstractTopology) -> list[int]:
    """Numbers of equal regions into which the machine can be cut, from 1 on."""
    return sorted({math.prod(cut) for cut in equal_cuts(topology.num_nodes, topology.grid)})


def all_regions(topology: AbstractTopology, experts: int, count: int) -> list[Regions]:
    """All plans with so many regions: every cut, and inside tensor, expert and every hybrid parallelism.

    Raises `PlanError` where so many regions do not divide the machine.
    """
    found = [cut for cut in equal_cuts(topology.num_nodes, topology.grid) if math.prod(cut) == count]
    if not found:
        legal = ", ".join(map(str, numbers_of_regions(topology)))
        raise PlanError(f"{count} regions do not divide a machine of {topology.num_nodes} nodes; use one of {legal}")
    plans: list[Regions] = []
    for cut in found:
        nodes, grid = _inside(cut, topology)
        groups = [each for each in equal_cuts(nodes, grid) if 2 <= math.prod(each) <= min(experts, nodes // 2)]
        plans += [Regions(cut, "tp"), Regions(cut, "ep"), *(Regions(cut, "hybrid", each) for each in groups)]
    return plans


def region_copies(regions: Regions, frequency: Frequency, topology: AbstractTopology) -> Copies:
    """The copies of a plan of regions: copy r E + e is that of expert e in region r.

    Experts are dealt inside a region by `frequency` [layer, expert], in any unit, in each with other errors: experts
    that share a group in one region are apart in others, among which tokens may then choose. Raises `PlanError` where
    regions do not divide the machine, or groups a region.
    """
    region = _groups(regions.cut, topology.num_nodes, topology.grid, f"{regions.name} on this machine")
    layers, experts = frequency.shape
    share = np.zeros((layers, regions.count, experts, topology.num_nodes), np.float32)
    for number in range(regions.count):
        errors = np.exp(SPREAD * np.random.default_rng(number).normal(size=experts)) if number else 1.0
        # In a region nodes keep their order, row by row.
        share[:, number, :, region == number] = np.moveaxis(_share_inside(regions, frequency * errors, topology), 2, 0)
    copies = regions.count * experts
    table = region * experts + np.arange(experts)[:, None]
    return Copies(
        np.tile(np.arange(copies) % experts, (layers, 1)),
        share.reshape(layers, copies, -1),
        ByHome(np.broadcast_to(table, (layers, *table.shape))),
    )


def by_least_work(copies: Copies) -> Copies:
    """The same copies, each token served as a whole by those of the region whose hosts have done least."""
    ones = np.ones(len(copies.copy_of))
    return replace(copies, serving=LeastWork(ones, 0 * ones, together=True))


def shipped_regions(
    cut: tuple[int, ...], frequency: Frequency, topology: AbstractTopology, gathers: Sequence[str]
) -> list[Shipped]:
    """All plans of a cut into regions, shares of copies as in `region_copies`, and the exchanges that each can use.

    Where experts are cut over groups, these are the rings inside the groups, and `gathers`, which suit every plan.
    """
    made = []
    for regions in all_regions(topology, frequency.shape[1], math.prod(cut)):
        if regions.cut != cut:
            continue
        rings = Rings(tuple(map(math.prod, zip(cut, regions.groups or (1,) * len(cut), strict=True))), both_ways=True)
        grouped = regions.inside != "ep" and rings.count < topology.num_nodes
        share = region_copies(regions, frequency, topology).share
        exchanges = (rings.name, *gathers) if grouped else tuple(gathers)
        made.append(Shipped(regions.name, share, exchanges, rings if grouped else None))
    return made


def _share_inside(regions: Regions, frequency: Frequency, topology: AbstractTopology) -> Shares:
    """Shares of every expert on the nodes of a region."""
    nodes, grid = _inside(regions.cut, topology)
    match regions.inside:
        case "tp":
            return tensor_parallel(frequency.shape[0], frequency.shape[1], nodes)
        case "ep":
            return expert_parallel_on(frequency, nodes, grid)
    return in_groups(frequency, _groups(regions.groups, nodes, grid, f"the groups of {regions.name} in a region"))


def _inside(cut: tuple[int, ...], topology: AbstractTopology) -> tuple[int, tuple[int, int] | None]:
    """The number of nodes of a region, and the sides of the grid that they form."""
    if topology.grid is None or len(cut) == 1:
        return topology.num_nodes // math.prod(cut), None
    x, y = topology.grid[0] // cut[0], topology.grid[1] // cut[1]
    return x * y, (x, y)


def _groups(cut: tuple[int, ...], nodes: int, grid: tuple[int, int] | None, what: str) -> Int[np.ndarray, " node"]:
    if len(cut) == 2 and grid is None:
        raise PlanError(f"{what}: rectangles are of a mesh, which these nodes are not; use {math.prod(cut)} alone")
    try:
        return equal_groups(cut, nodes, grid)
    except ValueError as error:
        raise PlanError(f"{what}: {error}") from None


def _sides(text: str) -> tuple[int, ...]:
    return tuple(int(side) for side in text.split("x"))
