"""What runs on a machine of the space: a placement, its exchanges and a bias of the gate; and runs at its numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxmoe.tune.machine.gate_table import Table, gated
from jaxmoe.experiment.codesign.problem import SIZES, HardwareProblem
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.strategies import Strategy

DIGITS = 7  # of the numbers that are reported: those that are scored


class Design(NamedTuple):
    """What runs on a machine: a placement, and the bias of the gate, [layer, node, expert], where it has one."""

    strategy: Strategy
    table: Table | None = None


def written(problem: HardwareProblem, position: np.ndarray) -> dict[str, float]:
    """Variables with as many digits as are written, and what is derived from them."""
    plain = problem.numbers([float(part) for part in position])
    whole = {key: float(round(plain[key])) for key in problem.space.whole}
    rounded = {key: float(f"{plain[key]:.{DIGITS}g}") for key in problem.keys}
    return problem.with_derived(rounded | whole)


def inputs_at(problem: HardwareProblem, numbers: dict[str, float]) -> list[Inputs]:
    """A run on the machine of these numbers, for every size of batch."""
    sizes: Sequence[int | None] = problem.space.batch_tokens or (None,)
    swept = problem.sweep.derived.keys() | problem.sweep.study.config.axes.keys()
    own = {key: value for key, value in numbers.items() if key in swept}
    layers = problem.sweep.study.layers
    scenarios = [problem.sweep.scenario(own | ({SIZES: size} if size else {})) for size in sizes]
    return [inputs_of(scenario, layers=layers) for scenario in scenarios]


def settings_of(problem: HardwareProblem, table: Table | None) -> Sequence[ParametricRun]:
    """The settings, whose tokens choose as a bias has it."""
    if table is None:
        return problem.settings
    return [replace(each, batches=gated(table, each.inputs.routed_batches)) for each in problem.settings]
