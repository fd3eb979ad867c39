"""Tuning with several copies of every expert, each in a region of the machine: which cut, and which rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from jaxmoe.placement.regions import all_regions, regions_named
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import Progress, TuneResult, silent
from jaxmoe.tune.settings import StopSwitch

LOOK_BATCHES = 16  # on which plans of regions are compared
SERVED_BY: tuple[Literal["home", "least_work"], ...] = ("home", "least_work")


def region_cuts(problem: PlacementProblem, copies: int) -> list[tuple[int, ...]]:
    """All cuts of the machine into so many regions. Raises `PlanError` where there is none."""
    every = all_regions(problem.model.machine.topology, problem.trace.num_experts, copies)
    return list(dict.fromkeys(regions.cut for regions in every))


@dataclass(frozen=True)
class RegionProblems:
    """Problems with so many regions, by what plans of regions take as they are.

    There is nothing to search for in tensor parallelism: the search may have another cut or rule than the best plan.
    """

    searched: PlacementProblem  # whose best plan that deals experts inside of regions is fastest
    shipped: PlacementProblem  # whose best plan of any kind is

    def tuned(self, search: Callable[[PlacementProblem], TuneResult], seed: int) -> tuple[PlacementProblem, TuneResult]:
        """The faster of what a search finds and of the best plan of regions, with its problem."""
        found = search(self.searched)
        if self.shipped is self.searched or found.stopped:
            return self.searched, found
        with StopSwitch() as stop:
            evaluator = Evaluator(self.shipped, seed, stop)
            best = evaluator.shipped
            if best is None or best.seconds.mean() > found.cost.mean():
                return self.searched, found
            return self.shipped, evaluator.conclude(best.plan, found.stages, found.history)


def in_regions(problem: PlacementProblem, copies: int, seed: int, progress: Progress = silent) -> RegionProblems:
    """The problem with so many regions, under every cut and rule.

    Raises `PlanError` where so many do not divide the machine, or their copies do not fit the memory.
    """
    cuts = region_cuts(problem, copies)
    problems = [replace(problem, regions=cut, served_by=rule) for rule in SERVED_BY for cut in cuts]
    with StopSwitch() as stop:
        looks = []
        for number, each in enumerate(problems):
            progress("regions", number, len(problems))
            looks.append(_look(Evaluator(each, seed, stop, progress, LOOK_BATCHES)))
    dealt, best = ([look[kind] for look in looks] for kind in (0, 1))
    return RegionProblems(problems[dealt.index(min(dealt))], problems[best.index(min(best))])


def _look(evaluator: Evaluator) -> tuple[float, float]:
    """Mean seconds of the fastest plan that deals experts inside of regions, and of the fastest of all."""
    seconds = {name: float(ranked.seconds.mean()) for name, ranked in evaluator.strategies.items()}
    dealt = [each for name, each in seconds.items() if regions_named(name).inside != "tp"]
    return min(dealt, default=float("inf")), min(seconds.values(), default=float("inf"))
