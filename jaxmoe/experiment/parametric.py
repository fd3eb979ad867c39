"""A run as a function of numbers of its model: trace, batches and placements stay, rates and latencies may be any.

A key of the scenario is such a number where it changes leaves of the layer model and nothing else. Which leaves it
changes follows from how the model is built (`tune.machine.model_numbers`); on which keys and leaves all else of a run
depends is declared where that is made: `TRACE_KEYS`, `BATCH_KEYS`, `PLACEMENT_KEYS`, `decides_fit`.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config import Scenario, build_layer_model, number_at, with_numbers
from jaxmoe.engine import Layer, evaluate
from jaxmoe.experiment.inputs import BATCH_KEYS, TRACE_KEYS, Inputs, inputs_of
from jaxmoe.experiment.metrics import Outcome
from jaxmoe.experiment.strategies import PLACEMENT_KEYS, Strategy, decides_fit, standard_strategies
from jaxmoe.network import Congestion
from jaxmoe.relax import AbstractReduction
from jaxmoe.traces import Batch
from jaxmoe.tune.machine.designs import EvaluationArguments
from jaxmoe.tune.machine.model_numbers import Build, ModelNumbers, StructuralNumberError, leaves_of, model_numbers

DECLARED = (
    (TRACE_KEYS, "the trace depends on it"),
    (BATCH_KEYS, "the batches depend on it"),
    (PLACEMENT_KEYS, "placements depend on it"),
)


@dataclass(frozen=True, eq=False)
class ParametricRun:
    """All of a run but the values of some numbers of its model."""

    inputs: Inputs  # at the values that the scenario has
    batches: Batch  # that plans are evaluated on, leaves [layer, batch, ...]
    strategies: dict[str, Strategy]
    numbers: ModelNumbers  # by key of the scenario

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the scenario, in the order that values are given in."""
        return self.numbers.names

    def model(self, values: Float[Array, " key"], fixed: Layer) -> Layer:
        """The model at these values in the scenario's units; leaves that no key changes are those of `fixed`."""
        return self.numbers.model(values, fixed)

    def at(self, values: Float[np.ndarray, " key"]) -> Inputs:
        """The inputs at other values."""
        scenario = with_numbers(self.inputs.scenario, dict(zip(self.keys, values.tolist(), strict=True)))
        return replace(
            self.inputs, scenario=scenario, model=self.model(jnp.asarray(values, jnp.float32), self.inputs.model)
        )


def parametric_run(scenario: Scenario, keys: tuple[str, ...], layers: str | None) -> ParametricRun:
    """The run of a scenario as a function of the numbers at these dotted keys, none of them structural.

    Raises `InputError` where the scenario has no run.
    """
    inputs = inputs_of(scenario, layers=layers)
    strategies = {strategy.name: strategy for strategy in standard_strategies(inputs)}
    numbers = model_numbers(_build(scenario), {key: number_at(scenario, key) for key in keys})
    return ParametricRun(inputs, inputs.evaluation_batches, strategies, numbers)


def structural_keys(scenario: Scenario, keys: tuple[str, ...]) -> dict[str, str]:
    """Those of these keys that are more than a number of the model, and why.

    Raises `InputError` where the scenario has no model.
    """
    found = {key: _structural(scenario, key) for key in keys}
    return {key: reason for key, reason in found.items() if reason}


def _structural(scenario: Scenario, key: str) -> str:
    """Why a key is no number of the model; nothing where it is one."""
    for sections, reason in DECLARED:
        if any(key == section or key.startswith(f"{section}.") for section in sections):
            return reason
    build, value = _build(scenario), number_at(scenario, key)
    try:
        leaves_of(build, key, value)
        fits_by_it = leaves_of(lambda numbers: decides_fit(build(numbers)), key, value)
    except StructuralNumberError as error:
        return str(error)
    return "whether placements fit the memory depends on it" if fits_by_it else ""


def _build(scenario: Scenario) -> Build:
    return lambda numbers: build_layer_model(with_numbers(scenario, numbers), "sharded")


def outcome_at(
    run: ParametricRun,
    values: Float[Array, " key"],
    arguments: EvaluationArguments,
    reduction: AbstractReduction | None = None,
) -> Outcome:
    """Times of one point, [layer, batch] and [layer, resource], exact without a `reduction`; and its machine."""
    model = run.model(values, arguments.model)
    if reduction is None:
        assert isinstance(model.time_model, Congestion)
        # Points of a group share their flows: pairs of nodes that they use are found once for all.
        model = replace(model, time_model=replace(model.time_model, pair_by_pair=True))
    times = evaluate(model, arguments.share, arguments.batches, arguments.exchange, reduction=reduction)
    return Outcome(times, model.machine, arguments.batches.weight.sum(axis=-1).mean())
