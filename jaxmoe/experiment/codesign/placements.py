"""Placements tuned for a machine, and together with it: token layout, copies and the gate as well.

Sequentially, plans descend on a given machine. Jointly, each plan descends beside a machine of its own. Then both are
rounded, improved by local moves and given a gate, and the machine is searched once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmoe.experiment.codesign.designs import Design
from jaxmoe.experiment.codesign.machines import inputs_at, reported_numbers
from jaxmoe.experiment.codesign.plans import BIASED_BATCHES, placement_on, relaxed_plans, rounded
from jaxmoe.experiment.codesign.problem import HardwareProblem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import TUNED as TUNED_PLAN
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.tune import TuneResult
from jaxmoe.tune.descent import SEGMENT
from jaxmoe.tune.machine.augmented_lagrangian import MET, feasible_starts, to_feasible, violation
from jaxmoe.tune.machine.gate_table import Table, tuned_table, within
from jaxmoe.tune.machine.joint_descent import Joint
from jaxmoe.tune.machine.problem import Progress

IN_TURN = "in_turn"  # the placement that is tuned for the best machine of the usual strategies
ROUNDED = 2  # plans of the joint descent that are rounded, each on the machine where it ended


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
                if self.problem.space.gate_loss is not None:
                    designs += [self._biased(inputs, plan, None) for plan in plans]
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
        if ended.tables is not None and problem.space.gate_loss is not None:
            drawn = placement_on(problem, inputs).draw(BIASED_BATCHES, problem.space.seed)
            table = within(ended.tables[:, at], drawn, problem.space.gate_loss)
        relaxed = ended.shares[:, [at]]
        result, plans = rounded(problem, inputs, relaxed, self.report, table, ended.exchanges[at])
        plans = [replace(plan, name=f"{plan.name}{suffix}") for plan in plans]
        if table is None:
            return result, [Design(plan) for plan in plans]
        return result, [self._biased(inputs, plan, table) for plan in plans]

    def _biased(self, inputs: Inputs, plan: Strategy, start: Table | None) -> Design:
        """A plan with a gate bias tuned for it on this machine; the bias starts from `start`, or from zero."""
        space, placement = self.problem.space, plan.placement
        assert space.gate_loss is not None
        placed, none = placement_on(self.problem, inputs), np.zeros(placement.share.shape).swapaxes(1, 2)
        table = tuned_table(
            placed,
            placement.share,
            placement.exchange,
            none if start is None else start,
            space.gate_loss,
            space.steps,
            space.seed,
        )
        return Design(replace(plan, name=f"{plan.name}+gate"), table)

    def _inputs(self, position: np.ndarray) -> Inputs:
        return inputs_at(self.problem, reported_numbers(self.problem, position))[0]

    def _feasible(self, position: np.ndarray, other: np.ndarray) -> np.ndarray:
        """A machine that meets the constraints near a position, or the other one where there is none."""
        near = to_feasible(self.problem, position)
        broken = violation(self.problem, self.problem.excess_and_slope(near[None])[0])
        return other if broken.max(initial=0) > MET else near


def _in_turn(name: str) -> str:
    """The name of a tuned plan that was found for a given machine."""
    return IN_TURN if name == TUNED_PLAN else f"{IN_TURN}_{name.removeprefix(f'{TUNED_PLAN}_')}"
