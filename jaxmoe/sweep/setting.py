"""What points have in common that differ in plain numbers alone, found by trying, and scenarios at those numbers.

A key is a number of the model where everything else about a run is the same whatever its value: the trace, the
batches, the placements. The run is set up with the key's value traced by JAX. Whatever uses it as a size, as a seed or
to decide something fails at once, and the key then defines groups.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config import Scenario, build_layer_model, number_at, with_numbers
from jaxmoe.engine import LayerModel
from jaxmoe.errors import InputError
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.strategies import Strategy, standard_strategies
from jaxmoe.traces import Batch

Numbers = Float[Array, " key"]


@dataclass(frozen=True, eq=False)
class Setting:
    """What points have in common that differ in numbers, strategy and exchange alone."""

    inputs: Inputs  # at the first of these points
    batches: Batch  # [layer, batch, ...]
    strategies: dict[str, Strategy]
    keys: tuple[str, ...]  # the numbers
    traced: tuple[bool, ...]  # which leaves of the model depend on them

    def model(self, numbers: Numbers, fixed: LayerModel) -> LayerModel:
        """The model as a function of the numbers; mode and leaves that do not depend on them are those of `fixed`."""
        scenario = with_numbers(self.inputs.scenario, dict(zip(self.keys, numbers, strict=True)))
        leaves, structure = jax.tree.flatten(build_layer_model(scenario, fixed.mode))
        pairs = zip(self.traced, leaves, jax.tree.leaves(fixed), strict=True)
        return jax.tree.unflatten(structure, [own if traced else given for traced, own, given in pairs])

    def at(self, numbers: Float[np.ndarray, " key"]) -> Inputs:
        """The inputs at other numbers."""
        scenario = with_numbers(self.inputs.scenario, dict(zip(self.keys, numbers.tolist(), strict=True)))
        return replace(
            self.inputs, scenario=scenario, model=self.model(jnp.asarray(numbers, jnp.float32), self.inputs.model)
        )


def setting_of(scenario: Scenario, keys: tuple[str, ...], layers: str | None) -> Setting | None:
    """The setting, `None` where it depends on these keys. Raises `InputError` where there is none at all."""
    if not keys:
        inputs = inputs_of(scenario, layers=layers)
        strategies = {strategy.name: strategy for strategy in standard_strategies(inputs)}
        nothing = (False,) * len(jax.tree.leaves(inputs.model))
        return Setting(inputs, inputs.evaluation_batches, strategies, (), nothing)
    kept: list[tuple[Inputs, dict[str, Strategy]]] = []

    def draw(numbers: Numbers) -> Float[Array, ""]:
        inputs = inputs_of(with_numbers(scenario, dict(zip(keys, numbers, strict=True))), layers=layers)
        strategies = {strategy.name: strategy for strategy in standard_strategies(inputs)}
        _ = inputs.evaluation_batches
        kept.append((inputs, strategies))
        return jnp.zeros(())

    values = jnp.asarray([number_at(scenario, key) for key in keys], jnp.float32)
    # `vmap` traces what depends on the numbers and nothing else: all the rest is computed here and now.
    try:
        with warnings.catch_warnings(action="ignore"):  # pydantic's, of what is no plain number any more
            jax.vmap(draw)(jnp.stack([values, values]))
    except Exception as error:  # whatever it is that a traced number cannot do; without one, it is raised
        if isinstance(error, InputError):
            setting_of(scenario, (), layers)  # raises the same where the number itself is not to blame
        return None
    ((inputs, strategies),) = kept
    drawn = jax.tree.leaves((inputs.evaluation_batches, [s.placement.share for s in strategies.values()]))
    if any(map(_is_traced, drawn)):
        return None
    traced = tuple(map(_is_traced, jax.tree.leaves(inputs.model)))
    batches = inputs.evaluation_batches
    # From here on without a trace of how the numbers were found.
    setting = Setting(inputs, batches, strategies, keys, traced)
    numbers = jnp.asarray([number_at(scenario, key) for key in keys], jnp.float32)
    return replace(setting, inputs=replace(inputs, scenario=scenario, model=setting.model(numbers, inputs.model)))


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)
