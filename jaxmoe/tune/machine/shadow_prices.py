"""Shadow prices: by how much the metric of the best machine changes for one more of a constraint's limit."""

from typing import Any, NamedTuple

from jaxmoe.tune.machine.problem import AbstractMachineProblem
from jaxmoe.tune.machine.trust_region import DesignOptimum


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
