"""Machines of the space: their numbers as they are reported, and runs on them."""

from collections.abc import Mapping

import numpy as np

from jaxmoe.experiment.codesign.problem import BATCH_TOKENS, HardwareProblem
from jaxmoe.experiment.inputs import Inputs, inputs_of

DIGITS = 7  # of the numbers that are reported: those that are scored


def reported_numbers(problem: HardwareProblem, position: np.ndarray) -> dict[str, float]:
    """Variables with as many digits as are reported, and numbers that are derived from them."""
    plain = problem.numbers([float(part) for part in position])
    integers = {key: float(round(plain[key])) for key in problem.integers}
    rounded = {key: float(f"{plain[key]:.{DIGITS}g}") for key in problem.keys}
    return problem.with_derived(rounded | integers)


def inputs_at(problem: HardwareProblem, numbers: Mapping[str, float]) -> list[Inputs]:
    """A run on the machine of these numbers, for every size of batch."""
    sizes = [{BATCH_TOKENS: tokens} for tokens in problem.space.batch_tokens or ()] or [{}]
    scenarios = [problem.scenario_at({**numbers, **size}) for size in sizes]
    return [inputs_of(scenario, layers=problem.layers) for scenario in scenarios]
