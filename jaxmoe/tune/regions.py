"""Tuning with several copies of every expert, each in a region of the machine: which cut, and which rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jaxmoe.placement.regions import all_regions, regions_named
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import Progress, TuneResult, silent
from jaxmoe.tune.settings import StopSwitch

LOOK_BATCHES = 64  # among which plans of regions are compared: as many as the programs of the search take at once
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

    Exchanges that are far slower for the best plans under the first rule, whatever the cut, are left out from then on.
    Raises `PlanError` where so many do not divide the machine, or their copies do not fit the memory.
    """
    cuts, exchanges, looks = region_cuts(problem, copies), problem.exchanges, list[_Look]()
    with StopSwitch() as stop:
        for rule in SERVED_BY:
            for cut in cuts:
                progress("regions", len(looks), len(SERVED_BY) * len(cuts))
                each = replace(problem, regions=cut, served_by=rule, exchanges=exchanges)
                looks.append(_look(Evaluator(each, seed, stop, progress, LOOK_BATCHES)))
            near = {name for look in looks for name in look.near}
            exchanges = tuple(name for name in exchanges if name in near or name not in problem.gathers)
    dealt, best = (min(looks, key=of_kind).problem for of_kind in (lambda look: look.dealt, lambda look: look.best))
    searched = replace(dealt, exchanges=exchanges)
    return RegionProblems(searched, searched if best is dealt else replace(best, exchanges=exchanges))


class _Look(NamedTuple):
    """What a look at the plans of a cut and a rule finds: mean seconds, and exchanges worth another look."""

    problem: PlacementProblem
    dealt: float  # of the fastest plan that deals experts inside of regions
    best: float  # of the fastest of all
    near: set[str]  # exchanges under which one of these two is not far slower than under its best; all without plans


def _look(evaluator: Evaluator) -> _Look:
    gathers = evaluator.problem.gathers
    seconds = {name: float(look.seconds.mean()) for name, look in evaluator.looks.items()}
    dealt = {name: each for name, each in seconds.items() if regions_named(name).inside != "tp"}
    fastest = {min(kind, key=kind.__getitem__) for kind in (dealt, seconds) if kind}
    near = [evaluator.near(evaluator.looks[name].plan, gathers, evaluator.look) for name in fastest] or [gathers]
    least_dealt, least = (min(kind.values(), default=float("inf")) for kind in (dealt, seconds))
    return _Look(evaluator.problem, least_dealt, least, set().union(*near))
