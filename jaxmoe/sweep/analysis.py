"""Analysis of a sweep: Pareto fronts, the fastest strategy of every case, and elasticities by gradients."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmoe.config.expressions import ExpressionError
from jaxmoe.config.keys import PLAN, SYSTEM, is_number
from jaxmoe.errors import did_you_mean
from jaxmoe.experiment.metrics import SEARCHED, Row, column_of, cost, is_finite
from jaxmoe.sweep.compile_groups import Group, groups_of
from jaxmoe.sweep.evaluation import given, metrics_at
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import DEFAULTS, Space, SweepError
from jaxmoe.sweep.study import Study, known_metrics
from jaxmoe.tune.machine.designs import EvaluationArguments

# Pareto front: points that no other one is as good as in all metrics and better in one.


def pareto(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The Pareto front: rows that no other row dominates in these metrics, ordered by the first one.

    Rows without these metrics as finite numbers, or that cannot be compared, are left out. Raises `SweepError` for
    other than two or three known metrics.
    """
    check_metrics(names)
    columns = [column_of(name) for name in names]
    able = [row for row in rows if row["comparable"] and all(is_finite(row[column]) for column in columns)]
    if not able:
        return []
    costs = np.array([[cost(row, name) for name in names] for row in able])
    chosen = [able[index] for index in np.flatnonzero(is_efficient(costs))]
    return sorted(chosen, key=lambda row: cost(row, names[0]))


def check_metrics(names: Sequence[str]) -> None:
    """Raise `SweepError` for other than two or three different known metrics."""
    known = f"two or three of {', '.join(known_metrics())}"
    if not 2 <= len(names) <= 3 or len(set(names)) < len(names) or not set(names) <= {*known_metrics()}:
        guess = "".join(f". {did_you_mean(name, known_metrics())}" for name in names if name not in known_metrics())
        raise SweepError(f"--pareto is {','.join(names)!r}; expected {known}, separated by commas{guess.rstrip('. ')}")


def check_searched(study: Study, names: Sequence[str]) -> None:
    """Raise `SweepError` for a metric that takes a search and that the study does not name."""
    for name in names:
        if name in SEARCHED and name not in study.searched:
            raise SweepError(f"--pareto names {name}, which {study.path} does not ask for; add it to metrics there")


def best(rows: Sequence[Row], name: str) -> Row | None:
    """The best row by a metric among those that can be compared; `None` where there is none."""
    able = [row for row in rows if row["comparable"] and is_finite(row[column_of(name)])]
    return min(able, key=lambda row: cost(row, name), default=None)


def is_efficient(costs: Float[np.ndarray, "point metric"]) -> Bool[np.ndarray, " point"]:
    """Whether a point is Pareto efficient: no other one is at least as low in all metrics and lower in one.

    For two or three metrics. Equal points are all efficient or all not.
    """
    unique, which = np.unique(
        costs, axis=0, return_inverse=True
    )  # by the first metric: what beats a point is before it
    efficient = np.zeros(len(unique), bool)
    # Of what came before, the lowest by the two other metrics: stairs that rise in one and fall in the other.
    stairs: list[tuple[float, float]] = []
    for index, (_, second, *rest) in enumerate(unique.tolist()):
        third = rest[0] if rest else 0.0
        at = bisect_right(stairs, (second, np.inf))
        if at and stairs[at - 1][1] <= third:
            continue
        efficient[index] = True
        start = end = bisect_left(stairs, (second, third))
        while end < len(stairs) and stairs[end][1] >= third:
            end += 1
        stairs[start:end] = [(second, third)]
    return efficient[which.ravel()]


# The fastest strategy of every case: of points that are equal but for strategy and exchange.


@dataclass(frozen=True)
class Winner:
    """The fastest of the rows that differ in strategy and exchange alone, and how far the next strategy is behind."""

    row: Row
    behind: float  # 0.1: the best other strategy takes 10 % longer; infinite where there is none


METHOD = {*DEFAULTS, PLAN, SYSTEM}  # keys whose values compete


def winners(points: Sequence[Point], rows: Sequence[Row], name: str = "total") -> list[Winner]:
    """The winner of every combination of values but strategy and exchange, by a metric, in their order."""
    cases: dict[str, list[Row]] = {}
    for point, row in zip(points, rows, strict=True):
        if row["comparable"] and is_finite(row[column_of(name)]):
            case = repr(sorted((key, str(value)) for key, value in point.values.items() if key not in METHOD))
            cases.setdefault(case, []).append(row)
    return [_winner(case, name) for case in cases.values()]


def _winner(rows: list[Row], name: str) -> Winner:
    best = min(rows, key=lambda row: cost(row, name))
    others = [cost(row, name) for row in rows if row["strategy"] != best["strategy"]]
    own = cost(best, name)
    return Winner(best, abs(min(others) / own - 1) if others and own else np.inf)


def limits(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """By strategy, at how many points each kind of resource is the busiest."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        if row["busiest_kind"] is not None:
            counts.setdefault(row["strategy"], Counter())[row["busiest_kind"]] += 1
    return {strategy: dict(of) for strategy, of in counts.items()}


# Elasticities: d log metric / d log number.

TOGETHER = 16  # points whose derivatives are worked out at once


@dataclass(frozen=True)
class Elasticities:
    """By point, metric and key: 1 % more of the number is so many per cent more of the metric.

    Metrics are in the order of `METRICS`; NaN where one is 0. Keys are the axes that are numbers of the model, or that
    such numbers are derived from.
    """

    points: list[Point]
    keys: tuple[str, ...]
    values: Float[np.ndarray, "point metric key"]


def elasticities(space: Space, points: Sequence[Point], progress: Callable[[int, int], None]) -> list[Elasticities]:
    """Elasticities of all metrics at these points, group by group.

    Raises `SweepError` where no axis is a number, a derived number has no slope, or points are systems.
    """
    if space.study.has_systems:
        raise SweepError(f"{space.label}: points are systems, which are rolled out, not differentiated; leave it out")
    done, answers = 0, []
    for group in groups_of(space, points, lambda done, total: progress(0, len(points))):
        if isinstance(group, Group) and _axes(space, group):
            answers.append(_of_group(space, group))
        done += len(group.points)
        progress(done, len(points))
    if not answers:
        raise SweepError(f"{space.label}: no axis is a number of the model; elasticities need one, as a bandwidth is")
    return answers


def _axes(space: Space, group: Group) -> tuple[str, ...]:
    """Axes that change numbers of the model and nothing else, be it through keys that are derived from them."""
    free = {*group.run.keys, *space.parameters}
    structural = set().union(*(_behind(space, key) for key in space.derived if key not in free))
    return tuple(key for key in _given(space, group) if key in free and key not in structural)


def _given(space: Space, group: Group) -> tuple[str, ...]:
    """Numbers of the group's points that are not derived from others."""
    return tuple(key for key, value in group.points[0].values.items() if key not in space.derived and is_number(value))


def _behind(space: Space, key: str) -> set[str]:
    """All keys that a derived key depends on."""
    found: set[str] = set()
    waiting = [key]
    while waiting:
        expression = space.derived.get(waiting.pop())
        new = set(expression.keys) - found if expression else set()
        found |= new
        waiting += new
    return found


def _of_group(space: Space, group: Group) -> Elasticities:
    run, axes = group.run, _axes(space, group)
    fixed = tuple(key for key in _given(space, group) if key not in axes)
    numbers_of_model = [key for key in space.derived if key in run.keys]
    needed = set(numbers_of_model).union(*(_behind(space, key) for key in numbers_of_model))

    def measured(
        values: Float[Array, " axis"], rest: Float[Array, " fixed"], common: EvaluationArguments
    ) -> tuple[Float[Array, " metric"], Float[Array, " metric"]]:
        numbers = dict(zip((*axes, *fixed), (*values, *rest), strict=True))
        for key in space.derived:
            if key in needed and is_number(group.points[0].values[key]):
                numbers[key] = _derived(space, group, key, numbers)
        metrics = jnp.asarray(metrics_at(run, jnp.stack([numbers[key] for key in run.keys]), common).metrics)
        return metrics, metrics

    @jax.jit
    def relative(
        values: Float[Array, "point axis"], rest: Float[Array, "point fixed"], common: EvaluationArguments
    ) -> Float[Array, "point metric axis"]:
        def one(given: tuple[Array, Array]) -> Float[Array, "metric axis"]:
            slopes, metrics = jax.jacfwd(measured, has_aux=True)(*given, common)
            return slopes * given[0] / jnp.where(metrics == 0, jnp.nan, metrics)[:, None]

        return jax.lax.map(one, (values, rest), batch_size=TOGETHER)

    values, rest = (_table(group.points, keys) for keys in (axes, fixed))
    return Elasticities(group.points, axes, np.asarray(relative(values, rest, given(group)), float))


def _derived(space: Space, group: Group, key: str, numbers: Mapping[str, Any]) -> Float[Array, ""]:
    """A derived number at traced ones. Raises `SweepError` where it compares them: then it may jump."""
    expression = space.derived[key]
    try:
        return jnp.asarray(expression(space.behind(group.points[0], numbers)), jnp.float32)
    except (ExpressionError, jax.errors.ConcretizationTypeError):
        raise SweepError(
            f"{space.label}: derived.{key} is {expression.text!r}, which decides by numbers and has no slope; for "
            "elasticities, write it without comparisons"
        ) from None


def _table(points: Sequence[Point], keys: Sequence[str]) -> Float[Array, "point key"]:
    rows = [[float(point.values[key]) for key in keys] for point in points]
    return jnp.asarray(np.array(rows, np.float32).reshape(len(rows), len(keys)))
