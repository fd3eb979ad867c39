"""From a space to its best machine: descent, trust region, placement where that is tuned, and exact scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmoe.config import Scenario, unstated_energy
from jaxmoe.config.hardware_space import SYSTEM, TUNED
from jaxmoe.engine import LayerTime
from jaxmoe.experiment.codesign.designs import Design, biased_group, system_times
from jaxmoe.experiment.codesign.placements import PlacementSearch, placement_on
from jaxmoe.experiment.codesign.problem import HardwareProblem
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.metrics import Outcome
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.registry import METRICS
from jaxmoe.threads import beside
from jaxmoe.tune import TuneResult
from jaxmoe.tune.machine.augmented_lagrangian import MET, descend, feasible_starts, to_feasible, violation
from jaxmoe.tune.machine.gate_table import Table, gated, lost_by_layer
from jaxmoe.tune.machine.problem import MachineSearchError, Progress
from jaxmoe.tune.machine.trust_region import (
    STATIONARY,
    DesignOptimum,
    ExactObjective,
    PricedConstraint,
    best_integers,
    best_starts,
    local_optima,
    shadow_prices,
)

SAME = 1e-6  # relative: times are float32
MOST_AGAIN = 4  # times that all designs are found from the best machine


class Candidate(NamedTuple):
    """A design: its metric at its own best machine, and at the best machine of all; and that machine of its own."""

    name: str
    own: float
    here: float
    residual: float
    design: Design
    numbers: dict[str, float]


@dataclass(frozen=True)
class ScoredMachine:
    """The best machine and the design that runs on it, scored by the exact model at the numbers as written."""

    numbers: dict[str, float]  # variables and what is derived from them, by key
    scenarios: tuple[Scenario, ...]  # one for every size of batch
    strategy: Strategy
    table: Table | None  # the bias of the gate
    lost: float  # gate mass that it loses on the batches that score the machine, mean over layers
    times: tuple[LayerTime, ...]
    metric: float  # SI units, geometric mean over sizes of batch
    constraints: list[PricedConstraint]
    residual: float


class PresentMachine(NamedTuple):
    """The machine as the scenario has it, whether or not it meets the constraints, with its best usual design."""

    numbers: dict[str, float]  # by key, where the scenario has such a number
    strategy: str
    metric: float  # as that of the best machine


@dataclass(frozen=True)
class HardwareResult:
    """Result of a search.

    `starts` are exact metrics of the machines that descent began with, `ended` those where it ended, moved to meet
    the constraints. `evaluations` counts machines timed, forward and backward each as one.
    """

    problem: HardwareProblem
    best: ScoredMachine
    candidates: list[Candidate]
    starts: Float[np.ndarray, " start"]
    ended: Float[np.ndarray, " start"]
    history: dict[str, Float[np.ndarray, "step start"]]  # the relaxed metric
    evaluations: dict[str, int]
    tuning: TuneResult | None
    notes: list[str]
    present: PresentMachine | None = None


@dataclass
class _Search:
    """State of one search: designs so far, their exact objectives and optima, histories and counts of evaluations."""

    problem: HardwareProblem
    report: Progress
    clock: StageTimer
    known: np.ndarray | None = None  # a machine that is known to be good
    exacts: list[ExactObjective] = field(default_factory=list)
    optima: list[DesignOptimum] = field(default_factory=list)
    designs: list[Design] = field(default_factory=list)
    history: dict[str, np.ndarray] = field(default_factory=dict)
    evaluations: dict[str, int] = field(default_factory=dict)

    def result(self) -> HardwareResult:
        tuning = None
        with self.clock.stage("descend"):
            starts, ended = self._usual()
        if self.problem.space.placement == TUNED:
            tuning = self._tuned()
        if self.problem.integers:
            with self.clock.stage("trust region"):
                found, others = best_integers(self.exacts, self.optima, self.report)
                self.problem = cast(HardwareProblem, found.problem)
                self.exacts, self.optima = found.exacts, found.optima
                self.evaluations["whole numbers"] = others
        problem = self.problem
        with self.clock.stage("trust region"):
            index = self._settled()
        with self.clock.stage("score"):
            best, candidates = self._scored(index)
        self.evaluations["exact"] = sum(exact.evaluations for exact in self.exacts)
        metrics = {name: np.vectorize(problem.metric)(values) for name, values in self.history.items()}
        notes = _notes(problem, best, tuning)
        return HardwareResult(problem, best, candidates, starts, ended, metrics, self.evaluations, tuning, notes)

    def _usual(self) -> tuple[np.ndarray, np.ndarray]:
        """Descend over machines of every strategy. Returns exact metrics of all starts, and of where they ended."""
        problem, groups = self.problem, self.problem.groups
        names = [name for group in groups for name in group.names]
        by_name = {strategy.name: strategy for strategy in problem.strategies}
        count = -(-problem.space.starts // len(names))  # of every strategy
        starts = feasible_starts(problem, count * len(names)).reshape(count, len(names), -1).swapaxes(0, 1)
        if self.known is not None:
            starts[:, 0] = self.known
        ends = np.cumsum([len(group.names) for group in groups])[:-1]
        exact = ExactObjective(problem, groups)
        # Both take long to compile.
        with beside(lambda: best_starts(exact, starts)) as scored:
            descended = descend(problem, np.split(starts, ends), self.report)
        first, before = scored.result()
        self.history["descend"] = descended.history
        sizes = problem.num_sizes
        self.evaluations["descend"] = 2 * descended.history.size * sizes
        ended = np.concatenate(descended.positions)
        ended = np.stack([[to_feasible(problem, each) for each in row] for row in ended])
        last, after = best_starts(exact, self._met(ended, starts))
        better = after.min(axis=1) <= before.min(axis=1)
        self.designs += [Design(by_name[name]) for name in names]
        self.exacts.append(exact)
        self.optima += local_optima(exact, np.where(better[:, None], last, first), self.report)
        return np.vectorize(problem.metric)(before).ravel(), np.vectorize(problem.metric)(after).ravel()

    def _met(self, positions: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Positions, or the others where constraints could not be met near the first."""
        excess = self.problem.excess_and_slope(positions.reshape(-1, positions.shape[-1]))[0]
        broken = violation(self.problem, excess).max(axis=1, initial=0).reshape(positions.shape[:2])
        return np.where((broken <= MET)[..., None], positions, others)

    def _tuned(self) -> TuneResult:
        """Machine and placement, and the gate where it may be biased: sequentially, then jointly.

        The sequential search begins at the best machine of the usual strategies, and at that of the best one whose
        exchange suits any plan; the result is never slower than what it finds.
        """
        placements, usual = PlacementSearch(self.problem, self.report, self.clock, self._optimised), [*self.optima]
        best = min(usual, key=lambda optimum: optimum.value).position
        (inputs,) = self.problem.inputs_at(self.problem.reported_numbers(best))
        gathers = placement_on(self.problem, inputs).gathers
        any_plan = [
            optimum
            for optimum, design in zip(usual, self.designs, strict=True)
            if design.strategy.placement.exchange[0] in gathers
        ]
        other = min(any_plan, key=lambda optimum: optimum.value, default=usual[0]).position
        placements.sequential([best] if np.array_equal(best, other) else [best, other])
        tuning, history = placements.simultaneous(best)
        self.history["descend with placement"] = history
        self.evaluations["descend with placement"] = 2 * history.size
        return tuning

    def _optimised(self, designs: list[Design], positions: list[np.ndarray]) -> None:
        """Add designs, and find the optimum of each from the best of these positions."""
        with self.clock.stage("trust region"):
            exact = self.exacts[0].of([biased_group(each, self.problem.runs) for each in designs])
            self.designs += designs
            self.exacts.append(exact)
            self.optima += local_optima(exact, best_starts(exact, np.stack([positions] * len(designs)))[0], self.report)

    def _settled(self) -> int:
        """The index of the best design, on whose machine no other one is faster."""
        for _ in range(MOST_AGAIN):
            best = int(np.argmin([optimum.value for optimum in self.optima]))
            here = self._at(self.optima[best].position)
            if here.min() > self.optima[best].value - SAME:
                break
            at, found = self.optima[best].position, []
            for exact in self.exacts:
                found += local_optima(exact, np.tile(at, (len(exact.names), 1)), self.report)
            self.optima = [min(pair, key=lambda each: each.value) for pair in zip(self.optima, found, strict=True)]
        return int(np.argmin([optimum.value for optimum in self.optima]))

    def _at(self, position: np.ndarray) -> np.ndarray:
        """Objectives of all designs on one machine, [design]."""
        return np.concatenate([exact(np.tile(position, (len(exact.names), 1)))[0] for exact in self.exacts])

    def _scored(self, index: int) -> tuple[ScoredMachine, list[Candidate]]:
        problem, optimum, (strategy, table) = self.problem, self.optima[index], self.designs[index]
        times: tuple[LayerTime, ...]
        numbers = problem.reported_numbers(optimum.position)
        inputs = problem.inputs_at(numbers)
        lost = 0.0
        if table is None:
            times = _times(problem, inputs, strategy)
        else:
            (each,) = inputs
            times = (score(each, strategy, gated(table, each.routed_batches)),)
            lost = float(lost_by_layer(table, each.routed_batches).mean())
        value = _metric(problem, inputs, times)
        scenarios = tuple(each.scenario for each in inputs)
        met = shadow_prices(problem, numbers, optimum, value)
        best = ScoredMachine(
            numbers, scenarios, strategy, table, lost, times, value, met, optimum.stationarity.residual
        )
        here = self._at(optimum.position)
        candidates = [
            Candidate(
                design.strategy.name,
                problem.metric(each.value),
                problem.metric(at),
                each.stationarity.residual,
                design,
                problem.reported_numbers(each.position),
            )
            for design, each, at in zip(self.designs, self.optima, here, strict=True)
        ]
        return best, candidates


def _times(problem: HardwareProblem, inputs: Sequence[Inputs], strategy: Strategy) -> tuple[LayerTime, ...]:
    """Exact times of a design without a biased gate, for every size of batch."""
    if problem.space.placement == SYSTEM:
        return tuple(system_times(each, strategy) for each in inputs)
    return tuple(score(each, strategy, each.evaluation_batches) for each in inputs)


def _metric(problem: HardwareProblem, inputs: Sequence[Inputs], times: Sequence[LayerTime]) -> float:
    """The metric in SI units, geometric mean over sizes of batch."""
    metric, logs = METRICS[problem.space.objective], []
    for each, one in zip(times, inputs, strict=True):
        tokens = jnp.asarray(one.scenario.workload.batch_tokens, float)
        logs.append(np.log(float(metric(Outcome(jax.tree.map(jnp.asarray, each), one.model.machine, tokens)))))
    return float(np.exp(np.mean(logs)))


def present_machine(problem: HardwareProblem) -> PresentMachine:
    """The scenario's own machine with the usual design that is best there."""
    inputs, sign = problem.inputs_at({}), 1 if problem.lower_is_better else -1
    found = {each.name: _metric(problem, inputs, _times(problem, inputs, each)) for each in problem.strategies}
    name = min(found, key=lambda each: sign * found[each])
    return PresentMachine(problem.present_numbers, name, found[name])


def tune_hardware(
    problem: HardwareProblem, report: Progress, clock: StageTimer, known: np.ndarray | None = None
) -> HardwareResult:
    """The best machine of a space, with the placement that runs on it.

    The result is scored by the exact model, and no design that was tried is faster there. The position of a machine
    that is `known` to be good is one of the starts. Raises `MachineSearchError` where no machine meets the constraints.
    """
    return _Search(problem, report, clock, known).result()


def _notes(problem: HardwareProblem, best: ScoredMachine, tuning: TuneResult | None) -> list[str]:
    """Notes for a reader. Raises `MachineSearchError` where a constraint is not met."""
    broken = [met.constraint.text for met in best.constraints if met.excess > MET]
    if broken:
        told = " and ".join(map(repr, broken))
        raise MachineSearchError(f"the search ended where {told} does not hold; use more starts")
    notes = [best.strategy.note] if best.strategy.note else []
    unstated = unstated_energy(best.scenarios[0].hardware)
    if unstated and METRICS[problem.space.objective].part == "energy":
        notes.append(f"energy counts nothing for what the machine does not state: {', '.join(unstated)}")
    if best.table is not None:
        notes.append(f"the gate is biased, and loses {100 * best.lost:.3g} % of its mass; other commands know no bias")
    if tuning is not None and tuning.stopped:
        notes.append(f"the search for a placement stopped early ({tuning.stopped})")
    if best.residual > 10 * STATIONARY:
        notes.append(f"not quite an optimum: slopes leave {best.residual:.2g} per range of a variable; more steps")
    return notes
