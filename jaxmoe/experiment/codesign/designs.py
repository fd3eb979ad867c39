"""Designs: a placement, its exchanges and a bias of the gate, on a machine; and times of a scenario's system there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.compiling import SOONER
from jaxmoe.config.hardware_space import PLAN
from jaxmoe.engine import Layer, LayerTime
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.metrics import Outcome
from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.simulation import setting_of
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.methods import system_of
from jaxmoe.relax import AbstractReduction
from jaxmoe.traces import Batch
from jaxmoe.tune.machine.designs import DesignGroup, EvaluationArguments
from jaxmoe.tune.machine.gate_table import Table, gated


class Design(NamedTuple):
    """A placement, and the bias of the gate, [layer, node, expert], where it has one."""

    strategy: Strategy
    table: Table | None = None


def design_group(strategies: Sequence[Strategy], runs: Sequence[ParametricRun]) -> DesignGroup:
    """Strategies of one mode whose layers have equal exchanges; layers that share an exchange are timed together."""
    exchanges = strategies[0].placement.exchange
    rows = {name: np.flatnonzero([name == other for other in exchanges]) for name in dict.fromkeys(exchanges)}
    return DesignGroup(
        names=tuple(strategy.name for strategy in strategies),
        static=tuple((run,) * len(rows) for run in runs),
        arguments=tuple(tuple(_arguments(run, strategies, name, rows[name]) for name in rows) for run in runs),
    )


def _arguments(
    run: ParametricRun, strategies: Sequence[Strategy], exchange: str, rows: np.ndarray
) -> EvaluationArguments:
    share = jax.device_put(np.stack([strategy.placement.share[rows] for strategy in strategies]))
    batches = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[rows]), run.batches)
    model = replace(run.inputs.model, mode=strategies[0].placement.computed_mode)
    return EvaluationArguments(model, share, batches, run.inputs.exchange(exchange))


def biased_group(design: Design, runs: Sequence[ParametricRun]) -> DesignGroup:
    """A group of one design, whose tokens choose experts by logits with the design's bias."""
    if design.table is None:
        return design_group([design.strategy], runs)
    biased = [replace(run, batches=gated(design.table, run.inputs.routed_batches)) for run in runs]
    return design_group([design.strategy], biased)


# Times of a scenario's system, where every layer can be timed alone.


def system_outcome(
    run: ParametricRun,
    values: Float[Array, " key"],
    arguments: EvaluationArguments,
    reduction: AbstractReduction | None,
) -> Outcome:
    """Times of the scenario's system at these values, [layer, batch], exact without a `reduction`.

    Raises `UnsuitableSystemError` for a system whose steps depend on those before.
    """
    model = run.model(values, arguments.model)
    times = _times(run.inputs, run.strategies[PLAN], model, arguments.batches, reduction)
    return Outcome(times, model.machine, arguments.batches.weight.sum(axis=-1).mean())


def system_times(inputs: Inputs, plan: Strategy) -> LayerTime:
    """Exact times on the evaluation batches as NumPy, [layer, batch]."""
    run = jax.jit(lambda batches: _times(inputs, plan, inputs.model, batches, None), compiler_options=SOONER)
    times = run(inputs.evaluation_batches)
    return jax.tree.map(np.asarray, times)


def _times(
    inputs: Inputs, plan: Strategy, model: Layer, batches: Batch, reduction: AbstractReduction | None
) -> LayerTime:
    section = inputs.scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    made = setting_of(inputs, plan, inputs.trace)
    return system.layer_times(replace(made, model=replace(model, mode=made.mode)), batches, reduction)
