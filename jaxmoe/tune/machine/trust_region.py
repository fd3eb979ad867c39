"""Exact local optima, of real and integer variables, by linear programmes in a trust region; and shadow prices there.

Times are maxima, so at an optimum there is often a kink: no single slope vanishes there, a mean of the slopes around it
does. The bundle keeps them as cuts; a linear programme finds the step that the highest of them promises most for, and
that is taken where the exact model confirms it (sequential linear programming with an exact penalty; bundle methods,
Lemarechal 1975). Where all is convex in the logarithms of the numbers, as for times and costs that are sums and maxima
of products of powers, the local optimum is the best of all machines.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import linprog

from jaxmoe.compiling import UNFUSED
from jaxmoe.tune.machine.augmented_lagrangian import MET, to_feasible, violation
from jaxmoe.tune.machine.designs import Arguments, DesignGroup, by_design
from jaxmoe.tune.machine.problem import AbstractMachineProblem, Progress

ROUNDS = 60  # at most
REGION = 0.1  # of a variable's range: the first trust region
LEAST_REGION = 5e-4
WEIGHT = 20.0  # of what constraints are broken by: above all multipliers, or it is raised
NEAR = 2e-3  # slopes so near, in parts of a variable's range, count for stationarity
STATIONARY = 2e-3  # what is left of the slope, per range of a variable, up to which a point is stationary
CONFIRMED = 0.1  # of what a step promises


class ExactObjective:
    """The exact objective of every design at a position of its own, and its slope; compiled once for groups alike.

    `evaluations` counts machines timed, forward and backward each as one.
    """

    def __init__(self, problem: AbstractMachineProblem, groups: Sequence[DesignGroup]) -> None:
        self.problem, self.groups, self.evaluations = problem, groups, 0
        self.names = [name for group in groups for name in group.names]
        self._timed = jax.jit(partial(_timed, problem), static_argnums=0, compiler_options=UNFUSED)

    def under(self, problem: AbstractMachineProblem) -> "ExactObjective":
        """Returns the objective of these designs under another problem's constraints."""
        other = copy(self)
        other.problem, other.evaluations = problem, 0
        return other

    def of(self, groups: Sequence[DesignGroup]) -> "ExactObjective":
        """Returns the objective of other designs of this problem."""
        other = copy(self)
        other.groups, other.evaluations = groups, 0
        other.names = [name for group in groups for name in group.names]
        return other

    def __call__(self, positions: Float[np.ndarray, "design variable"]) -> tuple[np.ndarray, np.ndarray]:
        """Objectives float64 [design] and slopes [design, variable]; a design that has none has infinity."""
        ends = np.cumsum([len(group.names) for group in self.groups])[:-1]
        parts = np.split(positions.astype(np.float32), ends)
        found = [self._timed(each.static, at, each.arguments) for each, at in zip(self.groups, parts, strict=True)]
        self.evaluations += 2 * len(positions) * self.problem.num_sizes
        value, slope = (np.concatenate([np.asarray(each, float) for each in both]) for both in zip(*found, strict=True))
        return np.where(np.isfinite(value), value, np.inf), np.nan_to_num(slope)


def _timed(problem: AbstractMachineProblem, static: Any, positions: Array, arguments: Arguments) -> tuple[Array, Array]:
    """Objectives [design] of a group and slopes [design, variable]."""

    def one(position: Array, arguments: Arguments) -> tuple[Array, Array]:
        return jax.value_and_grad(lambda at: problem.objective(static, arguments, at, None))(position)

    return jax.vmap(one, in_axes=(0, by_design(arguments)))(positions, arguments)


class Cut(NamedTuple):
    """The objective and its slope at a position."""

    at: Float[np.ndarray, " variable"]
    value: float
    slope: Float[np.ndarray, " variable"]


class Stationarity(NamedTuple):
    """How near a position is to the conditions of an optimum (Karush, Kuhn and Tucker).

    `residual` is what the best mean of near slopes leaves, with multipliers, per range of a variable: the largest
    entry of a vector. `multipliers` are the change of the objective per relative change of a limit.
    """

    residual: float
    multipliers: Float[np.ndarray, " constraint"]


@dataclass
class Bundle:
    """State of one design's search: position, exact slopes seen (cuts), trust region and penalty weight."""

    problem: AbstractMachineProblem
    at: Float[np.ndarray, " variable"]
    cuts: list[Cut] = field(default_factory=list)
    feasible: list[Cut] = field(default_factory=list)  # those that meet the constraints
    region: float = REGION
    weight: float = WEIGHT
    value: float = np.inf
    _promised: float = 0.0
    found: Stationarity | None = None

    def __post_init__(self) -> None:
        self.excess, self.slopes = self._constraints(self.at)

    def _constraints(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        excess, slopes = self.problem.excess_and_slope(at[None])
        return excess[0], slopes[0]

    @property
    def merit(self) -> float:
        return self.value + self.weight * violation(self.problem, self.excess).sum()

    @property
    def is_done(self) -> bool:
        met = violation(self.problem, self.excess).max(initial=0) < MET / 100
        return bool(met and self.found is not None and self.found.residual < STATIONARY)

    def seen(self, at: np.ndarray, value: float, slope: np.ndarray) -> None:
        """Records the exact objective at a tried position, and moves there where it is better."""
        excess, slopes = self._constraints(at)
        if np.isfinite(value):
            self.cuts.append(Cut(at, value, slope))
            if violation(self.problem, excess).max(initial=0) <= MET:
                self.feasible.append(self.cuts[-1])
        merit = value + self.weight * violation(self.problem, excess).sum()
        gain = self.merit - merit
        if not np.isfinite(self.value) or (gain > 0 and gain >= CONFIRMED * self._promised):
            self.at, self.value, self.excess, self.slopes = at, value, excess, slopes
            self.region = min(2 * self.region, 2 * REGION)
        else:
            self.region = max(self.region / 2, LEAST_REGION)
        self.found = stationarity(self.problem, self.at, self.near(NEAR), self.excess, self.slopes)
        if np.isfinite(self.found.residual):
            self.weight = max(self.weight, 2 * np.abs(self.found.multipliers).max(initial=0))

    def optimum(self, name: str) -> "DesignOptimum":
        """The last position, or where that breaks constraints, the best earlier one that meets them."""
        found = self.found or Stationarity(np.inf, np.zeros(len(self.excess)))
        if violation(self.problem, self.excess).max(initial=0) <= MET:
            return DesignOptimum(name, self.at, self.value, found)
        best = min(self.feasible, key=lambda cut: cut.value, default=None)
        if best is None:
            return DesignOptimum(name, self.at, np.inf, found)
        near = [cut for cut in self.cuts if np.abs(cut.at - best.at).max() <= NEAR]
        return DesignOptimum(
            name, best.at, best.value, stationarity(self.problem, best.at, near, *self._constraints(best.at))
        )

    def near(self, radius: float) -> list[Cut]:
        return [cut for cut in self.cuts if np.abs(cut.at - self.at).max() <= radius]

    def wanted(self) -> np.ndarray:
        """The position to try next: the step of the largest predicted gain, by the highest of all near cuts."""
        cuts = self.near(4 * self.region) or self.cuts[-1:]
        d, c = len(self.at), len(self.excess)
        # Columns: the step, the height of the cuts, and what each constraint is broken by.
        rows, limits = [[*np.zeros(d), -1.0, *np.zeros(c)]] if not cuts else [], [0.0] if not cuts else []
        for cut in cuts:
            height = min(cut.value + cut.slope @ (self.at - cut.at) - self.value, 0.0)
            rows.append([*cut.slope, -1.0, *np.zeros(c)])
            limits.append(-height)
        for index, (excess, slope) in enumerate(zip(self.excess, self.slopes, strict=True)):
            broken = -np.eye(c)[index]
            signs = (1, -1) if self.problem.equal[index] else (1,)
            rows += [[*(sign * slope), 0.0, *broken] for sign in signs]
            limits += [-sign * excess for sign in signs]
        low, high = np.maximum(-self.region, -self.at), np.minimum(self.region, 1 - self.at)
        bounds = [*zip(low, high, strict=True), (None, None), *[(0, None)] * c]
        found = linprog([*np.zeros(d), 1.0, *np.full(c, self.weight)], np.array(rows), limits, bounds=bounds)
        if found.x is None:  # only rounding can do that: a programme with slack is always feasible
            self._promised = 0.0
            return self.at
        self._promised = self.weight * violation(self.problem, self.excess).sum() - found.fun
        return np.clip(self.at + found.x[:d], 0, 1)


def stationarity(
    problem: AbstractMachineProblem, at: np.ndarray, cuts: Sequence[Cut], excess: np.ndarray, slopes: np.ndarray
) -> Stationarity:
    """The mean of slopes, multipliers of constraints and pushes of bounds that come nearest to adding up to zero."""
    d, c, n = len(at), len(excess), len(cuts)
    active = problem.equal | (excess > -NEAR)
    # Columns: weights of slopes, multipliers, pushes at lower and at upper bounds, the largest entry that is left.
    gradient = np.array([cut.slope for cut in cuts]).reshape(n, d).T
    left = np.concatenate([gradient, slopes.T, -np.eye(d), np.eye(d)], axis=1)
    rows = np.concatenate([np.c_[left, -np.ones(d)], np.c_[-left, -np.ones(d)]])
    ends = zip(problem.equal, active, strict=True)
    free = [(None if equal else 0, None if is_active else 0) for equal, is_active in ends]
    low, high = [(0, None if part <= NEAR else 0) for part in at], [(0, None if part >= 1 - NEAR else 0) for part in at]
    sums = np.concatenate([np.ones(n), np.zeros(c + 2 * d + 1)])[None]
    cost = np.concatenate([np.zeros(n + c + 2 * d), [1.0]])
    bounds = [*[(0, None)] * n, *free, *low, *high, (0, None)]
    found = linprog(cost, rows, np.zeros(2 * d), sums, [1.0], bounds)
    if found.x is None:
        return Stationarity(np.inf, np.full(c, np.nan))
    return Stationarity(float(found.fun), found.x[n : n + c])


class DesignOptimum(NamedTuple):
    """End of one design's search: its position between the bounds, the objective there, and how stationary it is.

    `value` is infinite where no machine was found that meets the constraints: such a design is never the best.
    """

    name: str
    position: Float[np.ndarray, " variable"]
    value: float
    stationarity: Stationarity


def local_optima(
    exact: ExactObjective, starts: Float[np.ndarray, "design variable"], report: Progress, rounds: int = ROUNDS
) -> list[DesignOptimum]:
    """The exact optimum of every design, from a start of its own; all are tried in step, at most so many rounds."""
    problem = exact.problem
    bundles = [Bundle(problem, to_feasible(problem, start)) for start in starts]
    tried = np.stack([bundle.at for bundle in bundles])
    for done in range(rounds):
        report("trust region", done, rounds)
        for bundle, at, value, slope in zip(bundles, tried, *exact(tried), strict=True):
            if not bundle.is_done:
                bundle.seen(at, value, slope)
        if all(bundle.is_done for bundle in bundles):
            break
        tried = np.stack([bundle.at if bundle.is_done else bundle.wanted() for bundle in bundles])
    report("trust region", rounds, rounds)
    return [bundle.optimum(name) for name, bundle in zip(exact.names, bundles, strict=True)]


def best_starts(
    exact: ExactObjective, positions: Float[np.ndarray, "design start variable"]
) -> tuple[Float[np.ndarray, "design variable"], Float[np.ndarray, "design start"]]:
    """The best start of every design, and the exact objectives of all."""
    values = np.stack([exact(positions[:, index])[0] for index in range(positions.shape[1])], axis=1)
    return positions[np.arange(len(positions)), values.argmin(axis=1)], values


# Integer variables descend as real numbers, then the integers on both sides of the result are tried.
#
# So a ceiling, such as that of links per module, is relaxed in descent, and exact in all machines that are compared.


BESIDE = 1  # integers to each side
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
    low = min(max(math.ceil(value) - BESIDE, first), last)
    return range(low, max(min(math.floor(value) + BESIDE, last), low) + 1)


# Shadow prices: by how much the metric of the best machine changes for one more of a constraint's limit.


class PricedConstraint(NamedTuple):
    """A constraint at the best machine. `shadow_price` is the change of the metric per unit of the limit."""

    constraint: Any
    left: float
    right: float
    excess: float  # relative; of an equality its size
    shadow_price: float
    elasticity: float | None  # % of the metric for 1 % of the limit; none where no side is constant

    @property
    def slack(self) -> float:
        """How far the left side may still move, in its unit."""
        return abs(self.right - self.left) * (1 if self.excess <= 0 else -1)


def shadow_prices(
    problem: AbstractMachineProblem, numbers: dict[str, float], optimum: DesignOptimum, metric: float
) -> list[PricedConstraint]:
    """Every constraint at the numbers as reported, with the shadow price of its limit."""
    priced, sign = [], 1 if problem.lower_is_better else -1
    multipliers = optimum.stationarity.multipliers
    for constraint, multiplier in zip(problem.constraints, multipliers, strict=True):
        left, right = (float(side) for side in problem.sides(constraint, numbers))
        scale, limit = float(problem.scale(constraint, left, right)), problem.limit(constraint)
        gap = right - left if constraint.relation == ">=" else left - right
        # Raising the right side of <= loosens it, as lowering that of >= does.
        price = sign * metric * float(multiplier) / scale * (1 if constraint.relation == ">=" else -1)
        price = -price if problem.limit_is_left(constraint) else price
        elasticity = None if limit is None else price * limit / metric
        excess = abs(gap) if constraint.relation == "==" else gap
        priced.append(PricedConstraint(constraint, left, right, float(excess / scale), price, elasticity))
    return priced
