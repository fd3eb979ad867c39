"""Which cut of the machine into regions to tune, where experts may have several copies."""

from dataclasses import replace
from typing import Literal

from jaxmoe.placement.regions import all_regions
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import Progress, silent
from jaxmoe.tune.settings import StopSwitch

LOOK_BATCHES = 16  # on which plans of regions are compared
SERVED_BY: tuple[Literal["home", "least_work"], ...] = ("home", "least_work")


def region_cuts(problem: PlacementProblem, copies: int) -> list[tuple[int, ...]]:
    """All cuts of the machine into so many regions. Raises `PlanError` where there is none."""
    every = all_regions(problem.model.machine.topology, problem.trace.num_experts, copies)
    return list(dict.fromkeys(regions.cut for regions in every))


def in_regions(problem: PlacementProblem, copies: int, seed: int, progress: Progress = silent) -> PlacementProblem:
    """Returns the problem with so many regions, by the cut and rule under which plans of regions are fastest as they
    are.

    Raises `PlanError` where so many do not divide the machine, or their copies do not fit the memory.
    """
    cuts = region_cuts(problem, copies)
    problems = [replace(problem, regions=cut, served_by=rule) for rule in SERVED_BY for cut in cuts]
    with StopSwitch() as stop:
        seconds = [_shipped(Evaluator(each, seed, stop, progress, LOOK_BATCHES)) for each in problems]
    return problems[seconds.index(min(seconds))]


def _shipped(evaluator: Evaluator) -> float:
    shipped = evaluator.shipped
    return float("inf") if shipped is None else float(shipped.seconds.mean())
