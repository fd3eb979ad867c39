"""Integer variables: they descend as real numbers, then the integers on both sides of the result are tried.

So a ceiling, such as that of links per module, is relaxed in descent, and exact in all machines that are compared.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from jaxmoe.tune.machine.problem import AbstractMachineProblem, Progress
from jaxmoe.tune.machine.trust_region import DesignOptimum, ExactObjective, local_optima

NEAR = 1  # to each side
EQUAL = 5e-4  # of the objective, a logarithm: a trust region ends no nearer


class IntegerOptimum(NamedTuple):
    """The problem with its integers held, and the optimum of every design there."""

    problem: AbstractMachineProblem
    exacts: list[ExactObjective]
    optima: list[DesignOptimum]

    @property
    def value(self) -> float:
        return min(each.value for each in self.optima)


def best_integers(
    exacts: Sequence[ExactObjective], optima: Sequence[DesignOptimum], report: Progress
) -> tuple[IntegerOptimum, int]:
    """The best integers next to the best relaxed optimum, and how many machines were timed for the others."""
    problem, relaxed, found = exacts[0].problem, min(optima, key=lambda each: each.value), list[IntegerOptimum]()
    numbers, keys = problem.numbers(relaxed.position.tolist()), problem.integers
    for near in product(*(_around(problem, key, numbers[key]) for key in keys)):
        held, start = _with_integers(problem, dict(zip(keys, near, strict=True))), relaxed.position.copy()
        for key, number in zip(keys, near, strict=True):
            start[problem.keys.index(key)] = problem.bounds[key].parts(np.array([float(number)]))[0]
        under = [exact.under(held) for exact in exacts]
        ends = [local_optima(exact, np.tile(start, (len(exact.names), 1)), report) for exact in under]
        found.append(IntegerOptimum(held, under, [optimum for each in ends for optimum in each]))
    least = min(each.value for each in found)
    best = next(each for each in found if each.value <= least + EQUAL)  # of equals the least numbers
    others = [*exacts, *(exact for each in found if each is not best for exact in each.exacts)]
    return best, sum(exact.evaluations for exact in others)


def _with_integers(problem: AbstractMachineProblem, numbers: Mapping[str, int]) -> AbstractMachineProblem:
    """The problem with constraints that variables have these integers."""
    return problem.with_constraints([f"{key} == {number}" for key, number in numbers.items()])


def _around(problem: AbstractMachineProblem, key: str, value: float) -> range:
    """Integers within the bounds of a variable, some to each side of a value."""
    bounds = problem.bounds[key]
    first, last = math.ceil(bounds.start), math.floor(bounds.stop)
    low = min(max(math.ceil(value) - NEAR, first), last)
    return range(low, max(min(math.floor(value) + NEAR, last), low) + 1)
