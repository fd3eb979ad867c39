"""Metrics that take a search for every machine: the lower bound, and what a short tuning reaches."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.network import AbstractExchange
from jaxmoe.placement import PlanError
from jaxmoe.sweep.compile_groups import Group
from jaxmoe.sweep.short_tuning import tuned
from jaxmoe.traces import Batch
from jaxmoe.tune.bounds import bound_if_any


def bound_of(inputs: Inputs, strategy: Strategy, exchange: AbstractExchange, batches: Batch) -> float | None:
    """Lower bound on the time of any placement under this exchange or any that tuning may choose, s, mean over layers.

    `None` where no placement fits or nothing bounds it, and for exchanges that leave traffic out, to
    which the bound does not apply.
    """
    if strategy.fits and not strategy.comparable:
        return None
    try:
        problem = placement_problem(inputs).under(exchange)
    except PlanError:
        return None
    bound = bound_if_any(problem, batches)
    return None if bound is None else float(bound.mean())


@dataclass
class SearchMetrics:
    """Metrics by search, for points of one run after another; strategies share what does not depend on them."""

    _run: ParametricRun | None = None
    _kept: dict[tuple, float] = field(default_factory=dict)

    def found(
        self, group: Group, numbers: Float[np.ndarray, "point key"], names: tuple[str, ...]
    ) -> list[dict[str, float]]:
        """These metrics of points of a group, by name, s; NaN where there is none."""
        if group.run is not self._run:
            self._run = group.run
            self._kept.clear()
        if "tuned" in names:
            self._tune(group.run, numbers)
        return [{name: self._one(name, group, row) for name in names} for row in numbers]

    def _tune(self, run: ParametricRun | None, numbers: Float[np.ndarray, "point key"]) -> None:
        """Tune the machines of these numbers that have not been tuned yet, and keep their times."""
        assert run is not None
        new = numbers[np.array([("tuned", *row) not in self._kept for row in numbers], bool)]
        for row, seconds in zip(new, tuned(run, new), strict=True):
            self._kept["tuned", *row] = float(seconds)

    def _one(self, name: str, group: Group, numbers: Float[np.ndarray, " key"]) -> float:
        if name == "tuned":
            return self._kept["tuned", *numbers]
        run, strategy = group.run, group.strategy
        assert run is not None
        assert strategy is not None
        key = name, group.exchange, strategy.fits, strategy.comparable, *numbers
        if key not in self._kept:
            exchange = run.inputs.exchange(group.exchange)
            found = bound_of(run.at(numbers), strategy, exchange, run.batches)
            self._kept[key] = np.nan if found is None else found
        return self._kept[key]
