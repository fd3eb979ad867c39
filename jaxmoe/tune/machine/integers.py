"""Whole numbers: variables that descend as others do, and of which the whole numbers around where that ends are tried.

So a ceiling such as that of links per module is relaxed, and every machine that is compared in the end has it exactly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from jaxmoe.tune.machine.augmented_lagrangian import Progress
from jaxmoe.tune.machine.trust_region import Exact, Optimum, polish
from jaxmoe.experiment.codesign.problem import HardwareProblem

NEAR = 1  # to each side
EQUAL = 5e-4  # of what is minimised, a logarithm: where polishing ends is no nearer


class Held(NamedTuple):
    """The problem with its whole numbers held, and the optimum of every design there."""

    problem: HardwareProblem
    exacts: list[Exact]
    optima: list[Optimum]

    @property
    def value(self) -> float:
        return min(each.value for each in self.optima)


def best_whole(exacts: Sequence[Exact], optima: Sequence[Optimum], report: Progress) -> tuple[Held, int]:
    """The best whole numbers around the best relaxed optimum, and how many machines were timed for the others."""
    problem, relaxed, found = exacts[0].problem, min(optima, key=lambda each: each.value), list[Held]()
    numbers, keys = problem.numbers(relaxed.position.tolist()), problem.space.whole
    for near in product(*(_around(problem, key, numbers[key]) for key in keys)):
        held, start = _with_whole(problem, dict(zip(keys, near, strict=True))), relaxed.position.copy()
        for key, number in zip(keys, near, strict=True):
            start[problem.keys.index(key)] = problem.space.variables[key].parts(np.array([float(number)]))[0]
        under = [exact.under(held) for exact in exacts]
        ends = [polish(exact, np.tile(start, (len(exact.names), 1)), report) for exact in under]
        found.append(Held(held, under, [optimum for each in ends for optimum in each]))
    least = min(each.value for each in found)
    best = next(each for each in found if each.value <= least + EQUAL)  # of equals the least numbers
    others = [*exacts, *(exact for each in found if each is not best for exact in each.exacts)]
    return best, sum(exact.evaluations for exact in others)


def _with_whole(problem: HardwareProblem, numbers: Mapping[str, int]) -> HardwareProblem:
    """The same problem with constraints that variables have these whole numbers."""
    held = (*problem.space.constraints, *(f"{key} == {number}" for key, number in numbers.items()))
    space = problem.space.model_copy(update={"constraints": held})
    return replace(problem, file=replace(problem.file, space=space))


def _around(problem: HardwareProblem, key: str, value: float) -> range:
    """Whole numbers within the bounds of a variable, some to each side of a value."""
    bounds = problem.space.variables[key]
    first, last = math.ceil(bounds.start), math.floor(bounds.stop)
    low = min(max(math.ceil(value) - NEAR, first), last)
    return range(low, max(min(math.floor(value) + NEAR, last), low) + 1)
