"""Plans tuned on one machine of a space: the placement problem there, and relaxed plans made legal."""

from dataclasses import replace

import numpy as np

from jaxmoe.config import build_tuner_settings
from jaxmoe.experiment.codesign.problem import HardwareProblem
from jaxmoe.experiment.comparison import placement_problem, tuned_strategies
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.strategies import Strategy, strategy
from jaxmoe.placement.placement import Mode
from jaxmoe.tune import PlacementProblem, TuneResult
from jaxmoe.tune.machine.gate_table import Table, gated
from jaxmoe.tune.machine.joint_descent import Joint, descend
from jaxmoe.tune.machine.problem import Progress
from jaxmoe.tune.tuner import tune

BIASED_BATCHES = 240  # that a plan is tuned on for a gate that is biased
SHIPPED = "shipped"  # the best strategy of every layer, under its best exchange


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
    found = tuned_strategies(inputs, result, mode)
    if result.shipped is not None:
        found.append(strategy(inputs, SHIPPED, result.shipped.plan, result.shipped.exchange.tolist(), mode))
    return result, found
