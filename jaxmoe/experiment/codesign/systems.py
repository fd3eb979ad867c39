"""What a scenario's system takes on a machine of any numbers, where every layer can be timed alone."""

from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config.hardware_space import PLAN
from jaxmoe.compiling import SOONER
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.simulation import setting_of
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.latency import LayerModel, LayerTime
from jaxmoe.relax import AbstractReduction
from jaxmoe.sweep.evaluation import Given
from jaxmoe.experiment.metrics import Outcome
from jaxmoe.systems import system_of
from jaxmoe.traces import Batch


def system_outcome(
    setting: ParametricRun, numbers: Float[Array, " key"], common: Given, reduction: AbstractReduction | None
) -> Outcome:
    """Times of the scenario's system at these numbers, [layer, batch], exact without a `reduction`.

    Raises `UnsuitableSystemError` for a system whose steps depend on those before.
    """
    model = setting.model(numbers, common.model)
    times = _times(setting.inputs, setting.strategies[PLAN], model, common.batches, reduction)
    return Outcome(times, model.machine, common.batches.weight.sum(axis=-1).mean())


def system_times(inputs: Inputs, plan: Strategy) -> LayerTime:
    """Exact times on the evaluation batches as NumPy, [layer, batch]."""
    run = jax.jit(lambda batches: _times(inputs, plan, inputs.model, batches, None), compiler_options=SOONER)
    times = run(inputs.evaluation_batches)
    return jax.tree.map(np.asarray, times)


def _times(
    inputs: Inputs, plan: Strategy, model: LayerModel, batches: Batch, reduction: AbstractReduction | None
) -> LayerTime:
    section = inputs.scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    made = setting_of(inputs, plan, inputs.trace)
    return system.layer_times(replace(made, model=replace(model, mode=made.mode)), batches, reduction)
