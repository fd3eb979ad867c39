"""What every constraint is at the best machine, and what one more of its limit is worth."""

from typing import NamedTuple

from jaxmoe.tune.machine.trust_region import Optimum
from jaxmoe.experiment.codesign.problem import HardwareProblem
from jaxmoe.config.hardware_space import Constraint
from jaxmoe.experiment.metrics import METRICS


class Met(NamedTuple):
    """A constraint at the best machine. `worth` is the change of the metric per unit of the limit."""

    constraint: Constraint
    left: float
    right: float
    excess: float  # relative; what an equality is off, at least 0
    worth: float
    elasticity: float | None  # % of the metric for 1 % of the limit; none where no side is constant

    @property
    def slack(self) -> float:
        """How far the left side may still move, in its unit."""
        return abs(self.right - self.left) * (1 if self.excess <= 0 else -1)


def met_constraints(problem: HardwareProblem, numbers: dict[str, float], optimum: Optimum, metric: float) -> list[Met]:
    """Every constraint at the numbers as written, with what its limit is worth."""
    met, sign = [], 1 if METRICS[problem.space.objective].lower_is_better else -1
    multipliers = optimum.stationarity.multipliers
    for constraint, multiplier in zip(problem.constraints, multipliers, strict=True):
        left, right = (float(side) for side in problem.sides(constraint, numbers))
        scale = float(problem.scale(constraint, left, right))
        gap = right - left if constraint.relation == ">=" else left - right
        limit = problem.limit(constraint)
        is_left = limit is not None and problem.varies(constraint.right)
        # Raising the right side of <= loosens it, as lowering that of >= does.
        worth = sign * metric * float(multiplier) / scale * (1 if constraint.relation == ">=" else -1)
        worth = -worth if is_left else worth
        elasticity = None if limit is None else worth * limit / metric
        excess = abs(gap) if constraint.relation == "==" else gap
        met.append(Met(constraint, left, right, float(excess / scale), worth, elasticity))
    return met
