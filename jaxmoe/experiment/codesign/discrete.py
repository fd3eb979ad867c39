"""Discrete choices, sizes and names: every combination is searched in short, and the best one in full."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxmoe.config.hardware_space import SpaceFile
from jaxmoe.errors import InputError
from jaxmoe.experiment.codesign.problem import HardwareProblem, hardware_problem
from jaxmoe.experiment.codesign.search import HardwareResult, PresentMachine, present_machine, tune_hardware
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.tune.machine.augmented_lagrangian import feasible_starts
from jaxmoe.tune.machine.problem import MachineSearchError, Progress
from jaxmoe.tune.machine.trust_region import ExactObjective, best_starts, local_optima

STARTS = 8  # machines of a combination that are timed under every strategy
ROUNDS = 20  # of the search for an exact optimum from the best of them
TRYING = "try choices"


class TriedChoice(NamedTuple):
    """A combination: its values by key, and the best metric that a strategy has there, or why there is none."""

    values: dict[str, Any]
    metric: float | None
    reason: str = ""


class ShortSearch(NamedTuple):
    """The best machine that a short search found: its objective, its position, and how many were timed for it."""

    value: float
    position: Float[np.ndarray, " variable"]
    evaluations: int


def tune_space(
    file: SpaceFile,
    scenario: Path,
    fixed: Mapping[str, Any],
    layers: Sequence[int] | None,
    report: Progress,
    clock: StageTimer,
) -> tuple[HardwareResult, list[TriedChoice]]:
    """The best machine of a space on the scenario at a path, and the best metric of every combination of its choices.

    Combinations are tried under the usual strategies. The full search of the best one starts from the machine found
    there, among others, so its result is no slower, up to the tolerance of constraints, `MET`. Raises `InputError`
    where no combination has a machine.
    """
    for key in fixed:
        if key in file.space.choices:
            raise MachineSearchError(
                f"--set {key}: {file.path.name} has it among its choices; remove it in one of them"
            )
    if not file.space.choices:
        with clock.stage("load"):
            problem = hardware_problem(file, scenario, fixed, layers)
        return replace(tune_hardware(problem, report, clock), present=present_machine(problem)), []
    tried: list[TriedChoice] = []
    found: list[tuple[HardwareProblem, ShortSearch]] = []
    refused: list[InputError] = []
    combinations = [dict(zip(file.space.choices, each, strict=True)) for each in _products(file)]
    with clock.stage(TRYING):
        for at, values in enumerate(combinations):
            now = (TRYING, at, len(combinations))
            report(*now)
            try:
                problem = hardware_problem(file, scenario, {**fixed, **values}, layers)
                found.append((problem, short_search(problem, lambda *_, now=now: report(*now))))
                tried.append(TriedChoice(values, problem.metric(found[-1][1].value)))
            except InputError as error:
                refused.append(error)
                tried.append(TriedChoice(values, None, str(error)))
        report(TRYING, len(combinations), len(combinations))
    if not found:
        raise refused[0]
    best, short = min(found, key=lambda each: each[1].value)
    result = tune_hardware(best, report, clock, short.position)
    timed = {TRYING: sum(each.evaluations for _, each in found)}
    present = _without_choices(file, scenario, fixed, layers)
    return replace(result, evaluations=timed | result.evaluations, present=present), tried


def _without_choices(
    file: SpaceFile, scenario: Path, fixed: Mapping[str, Any], layers: Sequence[int] | None
) -> PresentMachine | None:
    """The scenario's own machine; `None` where it is none without a choice."""
    plain = replace(file, space=file.space.model_copy(update={"choices": {}}))
    try:
        return present_machine(hardware_problem(plain, scenario, fixed, layers))
    except InputError:
        return None


def _products(file: SpaceFile) -> list[tuple[Any, ...]]:
    return list(itertools.product(*file.space.choices.values()))


def short_search(problem: HardwareProblem, report: Progress) -> ShortSearch:
    """The best machine of all strategies from few starts.

    Raises `MachineSearchError` where none meets the constraints.
    """
    exact = ExactObjective(problem, problem.groups)
    starts = feasible_starts(problem, STARTS)
    first, _ = best_starts(exact, np.stack([starts] * len(exact.names)))
    best = min(local_optima(exact, first, report, ROUNDS), key=lambda optimum: optimum.value)
    if not np.isfinite(best.value):
        raise MachineSearchError(f"{problem.label}: no machine was found that meets the constraints; relax one")
    return ShortSearch(best.value, best.position, exact.evaluations)
