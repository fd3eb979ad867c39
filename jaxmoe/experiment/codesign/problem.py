"""What is descended on: objective and constraints as functions of a position inside the bounds of all variables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.tune.machine.designs import Arguments, Family, Settings, family_of
from jaxmoe.config.hardware_space import PLAN, SYSTEM, Constraint, HardwareSpace, SpaceFile, read_constraint
from jaxmoe.experiment.codesign.systems import system_outcome
from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.strategies import STANDARD, Strategy
from jaxmoe.latency import LayerTime
from jaxmoe.relax import AbstractReduction
from jaxmoe.sweep.evaluation import Given, outcome_at
from jaxmoe.config.expressions import Expression, ExpressionError
from jaxmoe.sweep.compile_groups import groups_of
from jaxmoe.experiment.metrics import METRICS, Outcome
from jaxmoe.sweep.points import Point, Space, SweepError, is_parameter, takes_whole_numbers
from jaxmoe.sweep.run import check_stated
from jaxmoe.sweep.study import Study, StudyConfig, in_order, is_of_system
from jaxmoe.traces.logits import with_logits

SIZES = "workload.batch_tokens"
Position = Float[Array, " variable"]  # 0 at the lower bound of a variable, 1 at the upper one


@dataclass(frozen=True, eq=False)
class HardwareProblem:
    """A space on a scenario, with every key known to be a plain number.

    `settings` has one entry for every size of batch.
    """

    file: SpaceFile
    sweep: Space
    base: Point  # at the lower bounds, whose values but for variables are those of all machines
    settings: tuple[ParametricRun, ...]
    strategies: tuple[Strategy, ...]

    @property
    def space(self) -> HardwareSpace:
        return self.file.space

    @property
    def keys(self) -> tuple[str, ...]:
        """The variables."""
        return tuple(self.space.variables)

    @cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(read_constraint(text) for text in self.space.constraints)

    @cached_property
    def derived(self) -> dict[str, Expression]:
        """Derived keys, each after those that it needs."""
        return {key: Expression(str(self.space.derived[key])) for key in in_order(self.space.derived)}

    @cached_property
    def families(self) -> list[Family]:
        """The strategies, by exchange."""
        by_exchange: dict[tuple[str, ...], list[Strategy]] = {}
        for strategy in self.strategies:
            by_exchange.setdefault(strategy.placement.exchange, []).append(strategy)
        return [family_of(alike, self.settings) for alike in by_exchange.values()]

    def numbers(self, position: Position | Sequence[float]) -> dict[str, Any]:
        """Variables and all that is derived from them, by key, in the scenario's units; plain where the position is."""
        values: dict[str, Any] = {}
        for (key, bounds), part in zip(self.space.variables.items(), position, strict=True):
            low, high = bounds.start, bounds.stop
            values[key] = low * (high / low) ** part if bounds.scale == "log" else low + (high - low) * part
        return self.with_derived(values)

    def with_derived(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of the variables, and those that are derived from them."""
        known = dict(values)
        for key, expression in self.derived.items():
            known[key] = self.value(expression, known)
        return known

    def value(self, expression: Expression, numbers: Mapping[str, Any]) -> Any:
        """An expression at numbers by key, which JAX may trace. Raises `SweepError` where it decides by them, and where
        it comes to no number.
        """
        try:
            found = expression(self.sweep.behind(self.base, numbers))
        except ExpressionError as error:
            if isinstance(error.__context__, jax.errors.ConcretizationTypeError):
                raise SweepError(
                    f"{self.sweep.label}: {expression.text!r} decides by numbers that descend, so it has no slope; "
                    "write it without comparisons, and, or, not"
                ) from None
            raise SweepError(f"{self.sweep.label}: {error}") from None
        if isinstance(found, str | bool) or found is None:
            raise SweepError(
                f"{self.sweep.label}: {expression.text!r} is {found!r}, no number; state it, or leave it out"
            )
        return found

    def sides(self, constraint: Constraint, numbers: Mapping[str, Any]) -> tuple[Any, Any]:
        """Both sides of a constraint at numbers by key."""
        return self.value(constraint.left, numbers), self.value(constraint.right, numbers)

    def scale(self, constraint: Constraint, left: Any, right: Any) -> Any:
        """What the excess of a constraint is relative to: its limit, or where that is no constant the larger side.

        Of a limit of 0 it is the larger side in the middle of the bounds.
        """
        limit = self.limit(constraint)
        if limit:
            return abs(limit)
        if limit is None:
            return jnp.maximum(jnp.maximum(jnp.abs(left), jnp.abs(right)), 1e-30)
        middle = self.sides(constraint, self.numbers([0.5] * len(self.keys)))
        return max(*(abs(float(side)) for side in middle), 1e-30)

    def limit(self, constraint: Constraint) -> float | None:
        """The side that is the same for all machines, the right one first; `None` where there is none."""
        for side in (constraint.right, constraint.left):
            if not self.varies(side):
                return float(self.value(side, self._constants))
        return None

    def varies(self, side: Expression) -> bool:
        """Whether an expression names a variable, itself or in what is derived."""
        return any(key in self.keys or (key in self.derived and self.varies(self.derived[key])) for key in side.keys)

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """What is derived and the same for all machines, by key."""
        known: dict[str, Any] = {}
        for key, expression in self.derived.items():
            if not self.varies(expression):
                known[key] = self.value(expression, known)
        return known

    def excess(self, position: Position) -> Float[Array, " constraint"]:
        """By how much every constraint is broken, relative to its `scale`: 0 where it holds just so, less where
        it has slack. Either sign breaks an equality.
        """
        numbers, made = self.numbers(position), []
        for constraint in self.constraints:
            left, right = (jnp.asarray(side, jnp.float32) for side in self.sides(constraint, numbers))
            gap = right - left if constraint.relation == ">=" else left - right
            made.append(gap / jax.lax.stop_gradient(self.scale(constraint, left, right)))
        return jnp.stack(made) if made else jnp.zeros(0)

    @cached_property
    def equal(self) -> np.ndarray:
        """Which constraints are equalities, bool [constraint]."""
        return np.array([constraint.relation == "==" for constraint in self.constraints], bool)

    @cached_property
    def excess_and_slope(self) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """The same for many positions, float64 [position, constraint], and slopes [position, constraint, variable]."""
        compiled = jax.jit(jax.vmap(lambda position: (self.excess(position), jax.jacfwd(self.excess)(position))))

        def both(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            excess, slope = compiled(jnp.asarray(positions, jnp.float32))
            shape = (len(positions), len(self.constraints))
            return np.asarray(excess, float).reshape(shape), np.asarray(slope, float).reshape(*shape, len(self.keys))

        return both

    def objective(
        self,
        settings: Settings,
        given: Arguments,
        position: Position,
        reduction: AbstractReduction | None,
    ) -> Float[Array, ""]:
        """What is minimised for one design of a family with the shares in `given`: the logarithm of the metric, mean
        over sizes of batch; negative where higher is better. Exact without a `reduction`.
        """
        metric, numbers = METRICS[self.space.objective], self.numbers(position)
        logs = []
        for parts, each in zip(settings, given, strict=True):
            seen = [self._outcome(setting, one, numbers, reduction) for setting, one in zip(parts, each, strict=True)]
            together = seen[0]._replace(times=_all_layers([one.times for one in seen]))
            logs.append(jnp.log(metric(together)))
        mean = jnp.stack(logs).mean()
        return mean if metric.lower_is_better else -mean

    def _outcome(
        self, setting: ParametricRun, given: Given, numbers: Mapping[str, Any], reduction: AbstractReduction | None
    ) -> Outcome:
        timed = system_outcome if self.space.placement == SYSTEM else outcome_at
        return timed(setting, model_numbers(setting, numbers), given, reduction)

    def metric(self, objective: float) -> float:
        """The metric itself, SI units, from what is minimised."""
        return float(np.exp(objective if METRICS[self.space.objective].lower_is_better else -objective))


def model_numbers(setting: ParametricRun, numbers: Mapping[str, Any]) -> Float[Array, " key"]:
    """The numbers that a setting's model is a function of."""
    return jnp.stack([jnp.asarray(numbers[key], jnp.float32) for key in setting.keys])


def _all_layers(times: list[LayerTime]) -> LayerTime:
    return times[0] if len(times) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *times)


# From files to the problem. A sweep of the two machines at the ends of the bounds tells what the keys are.


def hardware_problem(
    file: SpaceFile, scenario: Path, fixed: Mapping[str, Any], layers: Sequence[int] | None
) -> HardwareProblem:
    """The problem of a space on the scenario at a path, with fixed values by dotted key.

    Raises `InputError` for keys that are unknown or no plain numbers, and for values that no scenario may have.
    """
    names = file.space.strategies or STANDARD
    sweep = Space(_study(file, scenario, fixed, layers, names))
    _check_keys(file.space, sweep)
    points = sweep.points()
    check_stated(sweep, [file.space.objective], points)
    groups = groups_of(sweep, points, lambda done, total: None)
    settings: dict[Any, ParametricRun] = {}
    for group in groups:
        if group.run is None:
            raise SweepError(group.reason)
        size = group.points[0].values.get(SIZES)
        _check_numbers(file.space, sweep, group.run)
        settings.setdefault(size, group.run)
    first = next(iter(settings.values()))
    chosen = [_comparable(sweep, first.strategies[name], file.space.strategies is not None) for name in names]
    if file.space.placement == SYSTEM:
        chosen = [replace(first.strategies[PLAN], name=first.inputs.scenario.system.name)]
    varied = next(key for key in file.space.variables if key in sweep.study.config.axes)
    base = min(points, key=lambda point: point.values[varied])
    rest = {key: value for key, value in base.values.items() if key not in file.space.derived}
    usable = tuple(strategy for strategy in chosen if strategy is not None)
    if not usable:
        raise SweepError(f"{sweep.label}: no usual strategy fits the memory; raise hardware.die.memory_capacity_GB")
    problem = HardwareProblem(file, sweep, replace(base, values=rest), tuple(settings.values()), usable)
    jax.eval_shape(problem.excess, jnp.zeros(len(problem.keys)))  # wrong keys, and what has no slope
    if file.space.gate_loss is not None:
        for trace in (first.inputs.trace, *first.inputs.topics.values()):
            with_logits(trace)
    return problem


def _study(
    file: SpaceFile, scenario: Path, fixed: Mapping[str, Any], layers: Sequence[int] | None, names: Sequence[str]
) -> Study:
    """A study of the two machines at the ends of all bounds. What constraints alone need is left out."""
    space, needed = file.space, set[str]()
    waiting = [key for key in space.derived if not is_parameter(key)]
    while waiting:
        needed.add(key := waiting.pop())
        waiting += [other for other in Expression(str(space.derived[key])).keys if other in space.derived]
    used = {other for key in needed for other in Expression(str(space.derived[key])).keys}
    varied = {key: bounds for key, bounds in space.variables.items() if not is_parameter(key) or key in used}
    axes: dict[str, Any] = {key: [bounds.start, bounds.stop] for key, bounds in varied.items()}
    runs = {"plan": [PLAN]} if space.placement == SYSTEM else {"strategy": list(names)}
    axes |= runs | ({SIZES: list(space.batch_tokens)} if space.batch_tokens else {})
    for key in fixed:
        if is_of_system(key) and space.placement != SYSTEM:
            raise SweepError(
                f"--set {key}: {file.path.name} times strategies; write placement: {SYSTEM}, or leave it out"
            )
        if key in space.variables or key in space.derived:
            raise SweepError(f"--set {key}: {file.path.name} has it as a variable or derived; remove it in one of them")
    config = StudyConfig(
        name=space.name,
        scenario=str(scenario.absolute()),
        layers=None if layers is None else tuple(layers),
        set=dict(fixed),
        axes=axes,
        zip=(tuple(varied),),
        derived={key: text for key, text in space.derived.items() if key in needed},
    )
    return Study(file.path, config)


def _check_keys(space: HardwareSpace, sweep: Space) -> None:
    for key in (*space.variables, *space.derived):
        if not is_parameter(key) and takes_whole_numbers(sweep.base, key):
            raise SweepError(
                f"{sweep.label}: {key} is a whole number, and descent needs what may take any value in between; set it "
                "with --set, or compare its values with jaxmoe sweep"
            )


def _check_numbers(space: HardwareSpace, sweep: Space, setting: ParametricRun) -> None:
    """Raise `SweepError` for a key that is more than a number of the model: a size, a seed, what decides something."""
    for key in (*space.variables, *space.derived):
        if not is_parameter(key) and key not in setting.keys:
            raise SweepError(
                f"{sweep.label}: {key} decides the form of the run (a size, a seed, what fits), so times have no slope "
                "in it; vary a rate, a bandwidth or a latency, or compare its values with jaxmoe sweep"
            )


def _comparable(sweep: Space, strategy: Strategy, named: bool) -> Strategy | None:
    """The strategy, or none where a usual one cannot be compared. Raises `SweepError` for one that was named."""
    if strategy.comparable:
        return strategy
    if named:
        raise SweepError(f"{sweep.label}: placement names {strategy.name}, which is not comparable ({strategy.note})")
    return None
