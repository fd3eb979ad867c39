"""From a space file and a scenario to a search over the machine's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config import ConfigSource, Scenario
from jaxmoe.config.expressions import Expression, ExpressionError, in_order
from jaxmoe.config.hardware_space import (
    PLAN,
    SYSTEM,
    ExpressionConstraint,
    HardwareSpace,
    SpaceFile,
    read_constraint,
)
from jaxmoe.config.keys import RangeConfig, ScenarioFile, is_of_system, is_parameter, takes_whole_numbers
from jaxmoe.config.loader import label_of
from jaxmoe.engine import Layer, LayerTime
from jaxmoe.experiment.codesign.designs import design_group, system_outcome
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.metrics import unstated
from jaxmoe.experiment.parametric import ParametricRun, outcome_at, parametric_run, structural_keys
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.placement.named import compared_strategies
from jaxmoe.registry import METRICS
from jaxmoe.relax import AbstractReduction
from jaxmoe.traces.logits import recorded_logits
from jaxmoe.tune.machine.designs import Arguments, DesignGroup
from jaxmoe.tune.machine.problem import AbstractMachineProblem, MachineSearchError, Position

BATCH_TOKENS = "workload.batch_tokens"
DIGITS = 7  # of the numbers that are reported: those that are scored


@dataclass(frozen=True, eq=False)
class HardwareProblem(AbstractMachineProblem):
    """A space on a scenario, with every key known to be a number of the layer model."""

    file: SpaceFile
    scenario: ScenarioFile  # with the values that are fixed
    layers: str | None  # as `--layers` has them
    runs: tuple[ParametricRun, ...]  # one for every size of batch
    strategies: tuple[Strategy, ...]

    @property
    def space(self) -> HardwareSpace:
        return self.file.space

    @property
    def label(self) -> str:
        return self.scenario.source.label

    @property
    def bounds(self) -> dict[str, RangeConfig]:
        return self.space.variables

    @property
    def integers(self) -> tuple[str, ...]:
        return self.space.whole

    @property
    def num_sizes(self) -> int:
        return len(self.runs)

    @property
    def steps(self) -> int:
        return self.space.steps

    @property
    def seed(self) -> int:
        return self.space.seed

    @property
    def lower_is_better(self) -> bool:
        return METRICS[self.space.objective].lower_is_better

    @cached_property
    def constraints(self) -> tuple[ExpressionConstraint, ...]:
        return tuple(read_constraint(text) for text in self.space.constraints)

    @cached_property
    def derived(self) -> dict[str, Expression]:
        """Derived keys, each after those that it needs."""
        return {key: Expression(str(self.space.derived[key])) for key in in_order(self.space.derived)}

    @cached_property
    def groups(self) -> list[DesignGroup]:
        """The strategies, by exchange."""
        by_exchange: dict[tuple[str, ...], list[Strategy]] = {}
        for strategy in self.strategies:
            by_exchange.setdefault(strategy.placement.exchange, []).append(strategy)
        return [design_group(alike, self.runs) for alike in by_exchange.values()]

    def scenario_at(self, numbers: Mapping[str, Any]) -> Scenario:
        """The scenario with these numbers, by key; those that are no keys of it, as derived ones, are left out."""
        return self.scenario.at(_scenario_values(numbers))

    def reported_numbers(self, position: Float[np.ndarray, " variable"]) -> dict[str, float]:
        """Variables with as many digits as are reported, and numbers that are derived from them."""
        plain = self.numbers([float(part) for part in position])
        integers = {key: float(round(plain[key])) for key in self.integers}
        rounded = {key: float(f"{plain[key]:.{DIGITS}g}") for key in self.keys}
        return self.with_derived(rounded | integers)

    def inputs_at(self, numbers: Mapping[str, float]) -> list[Inputs]:
        """A run on the machine of these numbers, for every size of batch; without numbers on that of the scenario."""
        sizes = [{BATCH_TOKENS: tokens} for tokens in self.space.batch_tokens or ()] or [{}]
        return [inputs_of(self.scenario_at({**numbers, **size}), layers=self.layers) for size in sizes]

    @cached_property
    def present_numbers(self) -> dict[str, float]:
        """Variables and derived numbers as the scenario has them, by key, where it has such a number."""
        keys = [key for key in (*self.keys, *self.derived) if not is_parameter(key)]
        found = {key: self._fixed(key) for key in keys}
        return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}

    def with_constraints(self, texts: Sequence[str]) -> "HardwareProblem":
        space = self.space.model_copy(update={"constraints": (*self.space.constraints, *texts)})
        return replace(self, file=replace(self.file, space=space))

    def with_derived(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of the variables, and those that are derived from them, in the scenario's units."""
        known = dict(values)
        for key, expression in self.derived.items():
            known[key] = self.value(expression, known)
        return known

    def value(self, expression: Expression, numbers: Mapping[str, Any]) -> Any:
        """An expression at numbers by key, which JAX may trace; other keys have their values in the scenario.

        Raises `MachineSearchError` where it decides by the numbers, and where it comes to no number.
        """
        own = {key: self._fixed(key) for key in expression.keys if key not in numbers}
        try:
            found = expression({**own, **numbers})
        except ExpressionError as error:
            if isinstance(error.__context__, jax.errors.ConcretizationTypeError):
                raise MachineSearchError(
                    f"{self.label}: {expression.text!r} decides by numbers that descend, so it has no slope; "
                    "write it without comparisons, and, or, not"
                ) from None
            raise MachineSearchError(f"{self.label}: {error}") from None
        if isinstance(found, str | bool) or found is None:
            raise MachineSearchError(
                f"{self.label}: {expression.text!r} is {found!r}, no number; state it, or leave it out"
            )
        return found

    def _fixed(self, key: str) -> Any:
        """The value of a key that is the same for all machines; of several sizes of batch the first."""
        if key == BATCH_TOKENS and self.space.batch_tokens:
            return self.space.batch_tokens[0]
        return self.scenario.value(key, {}, (*self.space.variables, *self.space.derived))

    def sides(self, constraint: ExpressionConstraint, numbers: Mapping[str, Any]) -> tuple[Any, Any]:
        return self.value(constraint.left, numbers), self.value(constraint.right, numbers)

    def limit(self, constraint: ExpressionConstraint) -> float | None:
        for side in (constraint.right, constraint.left):
            if not self._varies(side):
                return float(self.value(side, self._constants))
        return None

    def limit_is_left(self, constraint: ExpressionConstraint) -> bool:
        return self._varies(constraint.right) and not self._varies(constraint.left)

    def _varies(self, side: Expression) -> bool:
        """Whether an expression names a variable, itself or in what is derived."""
        return any(key in self.keys or (key in self.derived and self._varies(self.derived[key])) for key in side.keys)

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """Derived numbers that are the same for all machines, by key."""
        known: dict[str, Any] = {}
        for key, expression in self.derived.items():
            if not self._varies(expression):
                known[key] = self.value(expression, known)
        return known

    def model(self, numbers: Mapping[str, Any], fixed: Layer) -> Layer:
        run = self.runs[0]
        return run.model(values_of(run, numbers), fixed)

    def objective(
        self, static: Any, arguments: Arguments, position: Position, reduction: AbstractReduction | None
    ) -> Float[Array, ""]:
        metric, numbers = METRICS[self.space.objective], self.numbers(position)
        timed = system_outcome if self.space.placement == SYSTEM else outcome_at
        logs = []
        for runs, parts in zip(static, arguments, strict=True):
            pairs = zip(runs, parts, strict=True)
            seen = [timed(run, values_of(run, numbers), part, reduction) for run, part in pairs]
            together = seen[0]._replace(times=_all_layers([one.times for one in seen]))
            logs.append(jnp.log(metric(together)))
        mean = jnp.stack(logs).mean()
        return mean if self.lower_is_better else -mean


def values_of(run: ParametricRun, numbers: Mapping[str, Any]) -> Float[Array, " key"]:
    """Numbers by key, in the order that a run takes them."""
    return jnp.stack([jnp.asarray(numbers[key], jnp.float32) for key in run.keys])


def _all_layers(times: list[LayerTime]) -> LayerTime:
    return times[0] if len(times) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *times)


def _scenario_values(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Those of these numbers that are keys of a scenario."""
    return {key: value for key, value in numbers.items() if not is_parameter(key)}


def hardware_problem(
    file: SpaceFile, path: Path, fixed: Mapping[str, Any], layers: Sequence[int] | None
) -> HardwareProblem:
    """The problem of a space on the scenario at a path, with fixed values by dotted key.

    Raises `InputError` for keys that are unknown or no numbers of the model, and for values that no scenario may have.
    """
    space = file.space
    _check_fixed(file, fixed)
    scenario = ScenarioFile(path.absolute(), ConfigSource(label_of(file.path), file.path.parent), fixed)
    _check_keys(space, scenario)
    chosen = None if layers is None else ",".join(map(str, layers))
    problem = HardwareProblem(file, scenario, chosen, (), ())
    runs = _runs(problem)
    problem = replace(problem, runs=runs, strategies=_strategies(problem, runs[0]))
    jax.eval_shape(problem.excess, jnp.zeros(len(problem.keys)))  # wrong keys, and what has no slope
    if space.gate_loss is not None:
        for trace in (runs[0].inputs.trace, *runs[0].inputs.topics.values()):
            recorded_logits(trace)
    return problem


def _check_fixed(file: SpaceFile, fixed: Mapping[str, Any]) -> None:
    for key in fixed:
        if is_of_system(key) and file.space.placement != SYSTEM:
            raise MachineSearchError(
                f"--set {key}: {file.path.name} times strategies; write placement: {SYSTEM}, or leave it out"
            )
        if key in file.space.variables or key in file.space.derived:
            raise MachineSearchError(
                f"--set {key}: {file.path.name} has it as a variable or derived; remove it in one of them"
            )


def _check_keys(space: HardwareSpace, scenario: ScenarioFile) -> None:
    """Raise `MachineSearchError` for a key that is a whole number, and for a strategy that is not known."""
    base, label = scenario.at({}), scenario.source.label
    for key in _scenario_values({**space.variables, **space.derived}):
        if takes_whole_numbers(base, key):
            raise MachineSearchError(
                f"{label}: {key} is a whole number, and descent needs what may take any value in between; set it "
                "with --set, or compare its values with jaxmoe sweep"
            )
    for name in space.strategies or ():
        known = compared_strategies()
        if name not in known:
            close = get_close_matches(name, known, n=1)
            guess = f"; did you mean {close[0]}?" if close else ""
            raise MachineSearchError(f"{label}: placement has {name!r}; expected one of {', '.join(known)}{guess}")


def _runs(problem: HardwareProblem) -> tuple[ParametricRun, ...]:
    """The run of every size of batch as a function of the machine's numbers. Raises `InputError`, as above."""
    space, made = problem.space, []
    low, high = (
        _scenario_values(problem.with_derived({key: getattr(bounds, end) for key, bounds in space.variables.items()}))
        for end in ("start", "stop")
    )
    scenarios = []
    for tokens in space.batch_tokens or (None,):
        sized = {} if tokens is None else {BATCH_TOKENS: tokens}
        scenarios.append(problem.scenario.at(low | sized))
        problem.scenario.at(high | sized)  # limits of a key are intervals: both ends have to be able
    if reason := unstated([space.objective], [scenarios[0].hardware]):
        raise MachineSearchError(f"{problem.label}: {reason}")
    for scenario in scenarios:
        for key, reason in structural_keys(scenario, tuple(low)).items():
            raise MachineSearchError(
                f"{problem.label}: {key} decides the form of the run ({reason}), so times have no slope in it; vary a "
                "rate, a bandwidth or a latency, or compare its values with jaxmoe sweep"
            )
        made.append(parametric_run(scenario, tuple(low), problem.layers))
    return tuple(made)


def _strategies(problem: HardwareProblem, run: ParametricRun) -> tuple[Strategy, ...]:
    """The strategies that are timed: those that can be compared, or a system's plan by the system's name."""
    space = problem.space
    if space.placement == SYSTEM:
        return (replace(run.strategies[PLAN], name=run.inputs.scenario.system.name),)
    usable = []
    for strategy in (run.strategies[name] for name in space.strategies or compared_strategies()):
        if strategy.comparable:
            usable.append(strategy)
        elif space.strategies is not None:
            raise MachineSearchError(
                f"{problem.label}: placement names {strategy.name}, which is not comparable ({strategy.note})"
            )
    if not usable:
        raise MachineSearchError(
            f"{problem.label}: no usual strategy fits the memory; raise hardware.die.memory_capacity_GB"
        )
    return tuple(usable)
