"""From a space to its best machine: descend, polish, tune the placement where that is asked for, score exactly."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmoe.codesign import joint
from jaxmoe.codesign.descent import MET, Progress, descend, feasible_starts, to_feasible, violation
from jaxmoe.codesign.family import family_of
from jaxmoe.codesign.gate import Table, gated, lost_by_layer, tuned_table, within
from jaxmoe.codesign.polish import STATIONARY, Exact, Optimum, best_starts, polish
from jaxmoe.codesign.problem import SIZES, HardwareProblem
from jaxmoe.codesign.space import SYSTEM, TUNED
from jaxmoe.codesign.system import system_times
from jaxmoe.codesign.whole import best_whole
from jaxmoe.codesign.worth import Met, met_constraints
from jaxmoe.config import Scenario, unstated_energy
from jaxmoe.experiment.clock import StageClock
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.strategies import TUNED as TUNED_PLAN
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.latency import LayerTime
from jaxmoe.sweep.metrics import METRICS, Outcome
from jaxmoe.sweep.points import SweepError
from jaxmoe.sweep.setting import Setting
from jaxmoe.tune import TuneResult

DIGITS = 7  # of the numbers that are reported: those that are scored
SAME = 1e-6  # relative: times are float32
IN_TURN = "in_turn"  # the placement that is tuned for the best machine of the usual strategies
MOST_AGAIN = 4  # times that all designs are polished from the best machine


class Design(NamedTuple):
    """What runs on a machine: a placement, and the bias of the gate, [layer, node, expert], where it has one."""

    strategy: Strategy
    table: Table | None = None


class Candidate(NamedTuple):
    """A design: its metric at its own best machine, and at the best machine of all; and that machine of its own."""

    name: str
    own: float
    here: float
    residual: float
    design: Design
    numbers: dict[str, float]


@dataclass(frozen=True)
class Machine:
    """The best machine and the design that runs on it, scored by the exact model at the numbers as written."""

    numbers: dict[str, float]  # variables and what is derived from them, by key
    scenarios: tuple[Scenario, ...]  # one for every size of batch
    strategy: Strategy
    table: Table | None  # the bias of the gate
    lost: float  # gate mass that it loses on the batches that score the machine, mean over layers
    times: tuple[LayerTime, ...]
    metric: float  # SI units, geometric mean over sizes of batch
    constraints: list[Met]
    residual: float


@dataclass(frozen=True)
class HardwareResult:
    """What came out.

    `starts` are exact metrics of the machines that descent began with, `ended` those where it ended, moved to meet
    the constraints. `evaluations` counts machines timed, forward and backward each as one.
    """

    problem: HardwareProblem
    best: Machine
    candidates: list[Candidate]
    starts: Float[np.ndarray, " start"]
    ended: Float[np.ndarray, " start"]
    history: dict[str, Float[np.ndarray, "step start"]]  # the relaxed metric
    evaluations: dict[str, int]
    tuning: TuneResult | None
    notes: list[str]


@dataclass
class _Search:
    """One run."""

    problem: HardwareProblem
    report: Progress
    clock: StageClock
    known: np.ndarray | None = None  # a machine that is known to be good
    exacts: list[Exact] = field(default_factory=list)
    optima: list[Optimum] = field(default_factory=list)
    designs: list[Design] = field(default_factory=list)
    history: dict[str, np.ndarray] = field(default_factory=dict)
    evaluations: dict[str, int] = field(default_factory=dict)

    def result(self) -> HardwareResult:
        tuning = None
        with self.clock.stage("descend"):
            starts, ended = self._usual()
        if self.problem.space.placement == TUNED:
            tuning = self._joint()
        if self.problem.space.whole:
            with self.clock.stage("polish"):
                found, others = best_whole(self.exacts, self.optima, self.report)
                self.problem, self.exacts, self.optima = found.problem, found.exacts, found.optima
                self.evaluations["whole numbers"] = others
        problem = self.problem
        with self.clock.stage("polish"):
            index = self._settled()
        with self.clock.stage("score"):
            best, candidates = self._scored(index)
        self.evaluations["exact"] = sum(exact.evaluations for exact in self.exacts)
        metrics = {name: np.vectorize(problem.metric)(values) for name, values in self.history.items()}
        notes = _notes(problem, best, tuning)
        return HardwareResult(problem, best, candidates, starts, ended, metrics, self.evaluations, tuning, notes)

    def _usual(self) -> tuple[np.ndarray, np.ndarray]:
        """Descend over machines of every strategy. Returns exact metrics of all starts, and of where they ended."""
        problem, families = self.problem, self.problem.families
        names = [name for family in families for name in family.names]
        by_name = {strategy.name: strategy for strategy in problem.strategies}
        count = -(-problem.space.starts // len(names))  # of every strategy
        starts = feasible_starts(problem, count * len(names)).reshape(count, len(names), -1).swapaxes(0, 1)
        if self.known is not None:
            starts[:, 0] = self.known
        ends = np.cumsum([len(family.names) for family in families])[:-1]
        descended = descend(problem, np.split(starts, ends), self.report)
        self.history["descend"] = descended.history
        sizes = len(problem.settings)
        self.evaluations["descend"] = 2 * descended.history.size * sizes
        exact = Exact(problem, families)
        first, before = best_starts(exact, starts)
        ended = np.concatenate(descended.positions)
        ended = np.stack([[to_feasible(problem, each) for each in row] for row in ended])
        last, after = best_starts(exact, self._met(ended, starts))
        better = after.min(axis=1) <= before.min(axis=1)
        self.designs += [Design(by_name[name]) for name in names]
        self.exacts.append(exact)
        self.optima += polish(exact, np.where(better[:, None], last, first), self.report)
        return np.vectorize(problem.metric)(before).ravel(), np.vectorize(problem.metric)(after).ravel()

    def _met(self, positions: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Positions, or the others where constraints could not be met near the first."""
        excess = self.problem.excess_and_slope(positions.reshape(-1, positions.shape[-1]))[0]
        broken = violation(self.problem, excess).max(axis=1, initial=0).reshape(positions.shape[:2])
        return np.where((broken <= MET)[..., None], positions, others)

    def _joint(self) -> TuneResult:
        """Descend over machines, placements and the gate together, then round the plan at the best machine.

        Before that all are tuned in turn, for the best machine of the usual strategies: what is returned is never
        slower.
        """
        problem, usual = self.problem, min(self.optima, key=lambda optimum: optimum.value)
        self._in_turn(usual.position)
        with self.clock.stage("descend with placement"):
            inputs = _inputs(problem, self._numbers(usual.position))[0]
            starts = feasible_starts(problem, problem.space.starts)
            starts[0] = usual.position
            found = joint.descend(problem, inputs, starts, self.report)
            self.history["descend with placement"] = found.history
            self.evaluations["descend with placement"] = 2 * found.history.size
        with self.clock.stage("tune"):
            order = np.argsort(found.history[-joint.SEGMENT :].mean(axis=0))
            position = to_feasible(problem, found.positions[order[0]])
            if violation(problem, problem.excess_and_slope(position[None])[0]).max(initial=0) > MET:
                position = usual.position
            inputs = _inputs(problem, self._numbers(position))[0]
            kept = order[: inputs.scenario.tuning.restarts]
            table = None
            if found.tables is not None and problem.space.gate_loss is not None:
                drawn = joint.placement(problem, inputs).draw(joint.BIASED_BATCHES, problem.space.seed)
                table = within(found.tables[:, order[0]], drawn, problem.space.gate_loss)
            tuning, plans = joint.rounded(problem, inputs, found.shares[:, kept], self.report, table)
            designs = [Design(plan) for plan in plans]
            if table is not None:
                designs = [self._biased(inputs, plan, table) for plan in plans]
        # A plan of a machine that is slow at first may be the best where another is.
        self._add(designs, [position, usual.position])
        return tuning

    def _in_turn(self, position: np.ndarray) -> None:
        """A placement for a machine, the gate for both, and the machine once more."""
        with self.clock.stage("tune in turn"):
            inputs = _inputs(self.problem, self._numbers(position))[0]
            _, plans = joint.rounded(self.problem, inputs, None, self.report)
            plan = replace(next(plan for plan in plans if plan.name == TUNED_PLAN), name=IN_TURN)
            designs = [Design(plan)]
            if self.problem.space.gate_loss is not None:
                designs.append(self._biased(inputs, plan, np.zeros(plan.placement.share.shape).swapaxes(1, 2)))
        self._add(designs, [position])

    def _biased(self, inputs: Inputs, plan: Strategy, start: Table) -> Design:
        """A plan with the bias of the gate that serves it on this machine."""
        space, placement = self.problem.space, plan.placement
        assert space.gate_loss is not None
        placed = joint.placement(self.problem, inputs)
        table = tuned_table(
            placed, placement.share, placement.exchange, start, space.gate_loss, space.steps, space.seed
        )
        return Design(replace(plan, name=f"{plan.name}+gate"), table)

    def _add(self, designs: list[Design], positions: list[np.ndarray]) -> None:
        """Polish the machine of designs from the best of these positions."""
        with self.clock.stage("polish"):
            families = [family_of([each.strategy], self._settings(each.table)) for each in designs]
            exact = Exact(self.problem, families)
            self.designs += designs
            self.exacts.append(exact)
            self.optima += polish(exact, best_starts(exact, np.stack([positions] * len(designs)))[0], self.report)

    def _settings(self, table: Table | None) -> Sequence[Setting]:
        """The settings, whose tokens choose as a bias has it."""
        if table is None:
            return self.problem.settings
        return [replace(each, batches=gated(table, each.inputs.routed_batches)) for each in self.problem.settings]

    def _numbers(self, position: np.ndarray) -> dict[str, float]:
        """Variables with as many digits as are written, and what is derived from them."""
        plain = self.problem.numbers([float(part) for part in position])
        whole = {key: float(round(plain[key])) for key in self.problem.space.whole}
        written = {key: float(f"{plain[key]:.{DIGITS}g}") for key in self.problem.keys}
        return self.problem.with_derived(written | whole)

    def _settled(self) -> int:
        """The index of the best design, on whose machine no other one is faster."""
        for _ in range(MOST_AGAIN):
            best = int(np.argmin([optimum.value for optimum in self.optima]))
            here = self._at(self.optima[best].position)
            if here.min() > self.optima[best].value - SAME:
                break
            at, polished = self.optima[best].position, []
            for exact in self.exacts:
                polished += polish(exact, np.tile(at, (len(exact.names), 1)), self.report)
            self.optima = [min(pair, key=lambda each: each.value) for pair in zip(self.optima, polished, strict=True)]
        return int(np.argmin([optimum.value for optimum in self.optima]))

    def _at(self, position: np.ndarray) -> np.ndarray:
        """What is minimised of every design on one machine."""
        return np.concatenate([exact(np.tile(position, (len(exact.names), 1)))[0] for exact in self.exacts])

    def _scored(self, index: int) -> tuple[Machine, list[Candidate]]:
        problem, optimum, (strategy, table) = self.problem, self.optima[index], self.designs[index]
        numbers = self._numbers(optimum.position)
        inputs = _inputs(problem, numbers)
        of_system = problem.space.placement == SYSTEM
        times, lost = (
            tuple(system_times(each, strategy) if of_system else _score(each, strategy) for each in inputs),
            0.0,
        )
        if table is not None:
            (each,) = inputs
            times = (score(each, strategy, gated(table, each.routed_batches)),)
            lost = float(lost_by_layer(table, each.routed_batches).mean())
        metric = METRICS[problem.space.objective]
        seen = [
            Outcome(
                jax.tree.map(jnp.asarray, each),
                one.model.machine,
                jnp.asarray(one.scenario.workload.batch_tokens, float),
            )
            for each, one in zip(times, inputs, strict=True)
        ]
        value = float(np.exp(np.mean([np.log(float(metric(each))) for each in seen])))
        scenarios = tuple(each.scenario for each in inputs)
        met = met_constraints(problem, numbers, optimum, value)
        best = Machine(numbers, scenarios, strategy, table, lost, times, value, met, optimum.stationarity.residual)
        here = self._at(optimum.position)
        candidates = [
            Candidate(
                design.strategy.name,
                problem.metric(each.value),
                problem.metric(at),
                each.stationarity.residual,
                design,
                self._numbers(each.position),
            )
            for design, each, at in zip(self.designs, self.optima, here, strict=True)
        ]
        return best, candidates


def _score(inputs: Inputs, strategy: Strategy) -> LayerTime:
    return score(inputs, strategy, inputs.evaluation_batches)


def tune_hardware(
    problem: HardwareProblem, report: Progress, clock: StageClock, known: np.ndarray | None = None
) -> HardwareResult:
    """The best machine of a space, with the placement that runs on it. Raises `SweepError` where none is feasible.

    The result is scored by the exact model, and no design that was tried is faster there. The position of a machine
    that is `known` to be good is one of the starts.
    """
    return _Search(problem, report, clock, known).result()


def _inputs(problem: HardwareProblem, numbers: dict[str, float]) -> list[Inputs]:
    """A run on the machine of these numbers, for every size of batch."""
    sizes: Sequence[int | None] = problem.space.batch_tokens or (None,)
    swept = problem.sweep.derived.keys() | problem.sweep.study.config.axes.keys()
    own = {key: value for key, value in numbers.items() if key in swept}
    layers = problem.sweep.study.layers
    scenarios = [problem.sweep.scenario(own | ({SIZES: size} if size else {})) for size in sizes]
    return [inputs_of(scenario, layers=layers) for scenario in scenarios]


def _notes(problem: HardwareProblem, best: Machine, tuning: TuneResult | None) -> list[str]:
    """What a reader has to know. Raises `SweepError` where a constraint is not met."""
    broken = [met.constraint.text for met in best.constraints if met.excess > MET]
    if broken:
        raise SweepError(f"the search ended where {' and '.join(map(repr, broken))} does not hold; use more starts")
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
