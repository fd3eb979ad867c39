"""Tuning with copies of every expert, each in a region of the machine: how many, which cut, and which rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jaxmoe.placement.regions import all_regions, numbers_of_regions, regions_named
from jaxmoe.tune.bounds import lower_bound
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


def check_copies(problem: PlacementProblem, copies: int) -> None:
    """Raise `PlanError` for so many copies as do not divide the machine, or do not fit its memory."""
    for cut in region_cuts(problem, copies):
        replace(problem, regions=cut)


class FrontPoint(NamedTuple):
    """The best plan that was found with so many copies of every expert."""

    copies: int
    seconds: float | None  # mean over layers, on the batches that decide; `None` where the bound told enough
    bound: float  # s, mean over layers, of the cut and the rule that were searched; else the least of all cuts


class Budgeted(NamedTuple):
    """The problem that was solved within a budget of copies, its result, and every number of copies that it allows."""

    problem: PlacementProblem
    result: TuneResult
    front: tuple[FrontPoint, ...]


def within_budget(
    problem: PlacementProblem,
    copies: int,
    search: Callable[[PlacementProblem, int], TuneResult],
    seed: int,
    progress: Progress = silent,
) -> Budgeted:
    """The fastest plan with at most so many copies of every expert, of searches with each number that can be.

    A search is told how many are still to come, itself among them. There is none with a number whose bound is not below
    what fewer copies take: so it is where reading weights takes longest, for more copies are more to read. Ctrl-C ends
    the search under way and all others. Raises `PlanError` where so many do not divide the machine, or do not fit the
    memory.
    """
    if copies > 1:
        check_copies(problem, copies)

    def with_copies(number: int, to_come: int) -> tuple[PlacementProblem, TuneResult]:
        return in_regions(problem, number, seed, progress).tuned(lambda each: search(each, to_come), seed)

    numbers = [each for each in numbers_of_regions(problem.model.machine.topology) if each <= copies]
    best, result = problem, search(problem, len(numbers))
    stopped, front = result.stopped, [_point(1, result)]
    for done, number in enumerate(numbers[1:], start=1):
        if stopped == "interrupted":
            break
        bound = _least_bound(problem, number, seed)
        if bound >= result.cost.mean():
            front.append(FrontPoint(number, None, bound))
            continue
        solved, found = with_copies(number, len(numbers) - done)
        front.append(_point(number, found))
        stopped = found.stopped or stopped
        if found.cost.mean() < result.cost.mean():
            best, result = replace(solved, exchanges=problem.exchanges), found
    return Budgeted(best, replace(result, stopped=stopped), tuple(front))


def _point(copies: int, result: TuneResult) -> FrontPoint:
    return FrontPoint(copies, float(result.cost.mean()), float(result.bound.mean()))


def _least_bound(problem: PlacementProblem, copies: int, seed: int) -> float:
    """Least bound of all cuts on plans whose tokens are served where they live, s, on the batches that decide.

    It stands for plans that serve by least work too, of which it is no proof: those read about as many copies.
    """
    bounds = []
    with StopSwitch() as stop:
        for cut in region_cuts(problem, copies):
            evaluator = Evaluator(replace(problem, regions=cut), seed, stop)
            bounds.append(float(lower_bound(evaluator.problem, evaluator.selection).mean()))
    return min(bounds)


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
