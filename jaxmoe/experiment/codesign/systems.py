"""Times of a scenario's system on a machine of any numbers, where every layer can be timed alone."""

from dataclasses import replace

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
from jaxmoe.tune.machine.designs import EvaluationArguments


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
