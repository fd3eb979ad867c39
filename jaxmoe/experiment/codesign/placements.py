"""Placements tuned for a machine, and together with it: token layout, copies and the gate as well.

Sequentially, plans descend on a given machine. Jointly, each plan descends beside a machine of its own. Then both are
rounded, improved by local moves and given a gate, and the machine is searched once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmoe.config import build_tuner_settings
from jaxmoe.experiment.codesign.designs import Design
from jaxmoe.experiment.codesign.problem import HardwareProblem
from jaxmoe.experiment.comparison import placement_problem, tuned_strategies
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import TUNED as TUNED_PLAN
from jaxmoe.experiment.strategies import Strategy, strategy
from jaxmoe.placement.placement import Mode
from jaxmoe.tune import PlacementProblem, TuneResult
from jaxmoe.tune.descent import SEGMENT
from jaxmoe.tune.machine.augmented_lagrangian import MET, feasible_starts, to_feasible, violation
from jaxmoe.tune.machine.gate_table import Table, gated, tuned_table, within
from jaxmoe.tune.machine.joint_descent import Joint, descend
from jaxmoe.tune.machine.problem import Progress
from jaxmoe.tune.tuner import tune

BIASED_BATCHES = 240  # that a plan is tuned on for a gate that is biased
SHIPPED = "shipped"  # the best strategy of every layer, under its best exchange
IN_TURN = "in_turn"  # the placement that is tuned for the best machine of the usual strategies
ROUNDED = 2  # plans of the joint descent that are rounded, each on the machine where it ended


def mode_of(problem: HardwareProblem) -> Mode:
    """Whether a tuned placement cuts experts, or has copies of whole ones."""
    return "replicated" if problem.space.copies else "sharded"


def placement_on(problem: HardwareProblem, inputs: Inputs) -> PlacementProblem:
    """The placement problem on a machine, for the space's objective, mean or 95th percentile, and kind of plan."""
    placed = replace(placement_problem(inputs), p95_weight=float(problem.space.objective == "p95"))
    placed = replace(placed, model=replace(placed.model, mode=mode_of(problem)))
    return replace(placed, logits=problem.space.gate_loss is not None)


def relaxed_plans(problem: HardwareProblem, inputs: Inputs, starts: np.ndarray, report: Progress) -> Joint:
    """Plans and machines that descend together from all starts [start, variable]; `inputs` are of any machine."""
    settings = build_tuner_settings(inputs.scenario.tuning)
    return descend(problem, placement_on(problem, inputs), settings, starts, problem.space.gate_loss, report)


def rounded(
    problem: HardwareProblem,
    inputs: Inputs,
    relaxed: np.ndarray | None,
    report: Progress,
    table: Table | None = None,
    exchange: str | None = None,
) -> tuple[TuneResult, list[Strategy]]:
    """Relaxed plans [layer, start, expert, node] rounded, improved under an exchange and compared by the tuner at a
    machine's numbers; without any it descends itself. With a `table` tokens choose as that bias has it.

    Returns its result, and what it found as strategies: the plan, what the search ended with where that is another,
    and the best shipped strategies. Ctrl-C raises `KeyboardInterrupt` when the tuner has ended.
    """
    placed = placement_on(problem, inputs)
    if table is not None:
        placed = replace(placed, batches=gated(table, placed.draw(BIASED_BATCHES, problem.space.seed)))
    settings, mode = build_tuner_settings(inputs.scenario.tuning), mode_of(problem)
    result = tune(replace(placed, logits=False), settings, report, relaxed, exchange)
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    found = tuned_strategies(inputs, result, placed)
    if result.shipped is not None:
        found.append(strategy(inputs, SHIPPED, result.shipped.plan, result.shipped.exchange.tolist(), mode))
    return result, found


@dataclass
class PlacementSearch:
    """A search for designs. `optimised` takes designs in, and finds the best machine of each from given positions."""

    problem: HardwareProblem
    report: Progress
    clock: StageTimer
    optimised: Callable[[list[Design], list[np.ndarray]], None]

    def sequential(self, machines: Sequence[np.ndarray]) -> None:
        """Tune placements on each of these machines, then a gate bias for each plan, then each design's machine."""
        for number, position in enumerate(machines):
            with self.clock.stage("tune in turn"):
                inputs = self._inputs(position)
                _, plans = rounded(self.problem, inputs, None, self.report)
                suffix = "" if number == 0 else f"_{number + 1}"
                plans = [replace(plan, name=f"{_in_turn(plan.name)}{suffix}") for plan in plans]
                designs = [Design(plan) for plan in plans]
                if (loss := self.problem.space.gate_loss) is not None:
                    designs += [self._biased(inputs, plan, loss) for plan in plans]
            self.optimised(designs, [position])

    def simultaneous(self, usual: np.ndarray) -> tuple[TuneResult, np.ndarray]:
        """Descend over machines and placements together, then round the best plans, each on its machine.

        One descent starts at the machine of the usual strategies. Returns the tuning result of the best plan, and the
        objective of every step and start.
        """
        problem = self.problem
        with self.clock.stage("descend with placement"):
            starts = feasible_starts(problem, problem.space.starts)
            starts[0] = usual
            ended = relaxed_plans(problem, self._inputs(usual), starts, self.report)
        order = np.argsort(ended.history[-SEGMENT:].mean(axis=0))[:ROUNDED]
        results = []
        for number, at in enumerate(order.tolist(), start=1):
            with self.clock.stage("tune"):
                position = self._feasible(ended.positions[at], usual)
                result, designs = self._rounded(ended, at, position, "" if number == 1 else f"_{number}")
                results.append(result)
            # A plan of a machine that is slow at first may be the best where another is.
            self.optimised(designs, [position, usual])
        return results[0], ended.history

    def _rounded(self, ended: Joint, at: int, position: np.ndarray, suffix: str) -> tuple[TuneResult, list[Design]]:
        """Designs from where one descent ended."""
        problem, inputs, table = self.problem, self._inputs(position), None
        loss = problem.space.gate_loss
        if ended.tables is not None and loss is not None:
            drawn = placement_on(problem, inputs).draw(BIASED_BATCHES, problem.space.seed)
            table = within(ended.tables[:, at], drawn, loss)
        relaxed = ended.shares[:, [at]]
        result, plans = rounded(problem, inputs, relaxed, self.report, table, ended.exchanges[at])
        plans = [replace(plan, name=f"{plan.name}{suffix}") for plan in plans]
        if table is None or loss is None:
            return result, [Design(plan) for plan in plans]
        return result, [self._biased(inputs, plan, loss, table) for plan in plans]

    def _biased(self, inputs: Inputs, plan: Strategy, loss: float, start: Table | None = None) -> Design:
        """A plan with a gate bias tuned for it on this machine; the bias starts from `start`, or from zero."""
        space, share, exchange = self.problem.space, plan.placement.share, plan.placement.exchange
        start = np.zeros(share.shape).swapaxes(1, 2) if start is None else start
        placed = placement_on(self.problem, inputs)
        table = tuned_table(placed, share, exchange, start, loss, space.steps, space.seed)
        return Design(replace(plan, name=f"{plan.name}+gate"), table)

    def _inputs(self, position: np.ndarray) -> Inputs:
        return self.problem.inputs_at(self.problem.reported_numbers(position))[0]

    def _feasible(self, position: np.ndarray, other: np.ndarray) -> np.ndarray:
        """A machine that meets the constraints near a position, or the other one where there is none."""
        near = to_feasible(self.problem, position)
        broken = violation(self.problem, self.problem.excess_and_slope(near[None])[0])
        return other if broken.max(initial=0) > MET else near


def _in_turn(name: str) -> str:
    """The name of a tuned plan that was found for a given machine."""
    return IN_TURN if name == TUNED_PLAN else f"{IN_TURN}_{name.removeprefix(f'{TUNED_PLAN}_')}"
