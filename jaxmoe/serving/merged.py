"""One step for rows of several layouts: their numbers are arrays, so that all layouts of a kind are priced at once."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxmoe.hardware.gpu.terms import ExpertLoads, Numbers
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.gating import ExpertLoadTable
from jaxmoe.serving.step import ModelStep

LAYOUT = ("tensor", "data", "expert_ranks")


class LoadsByRow(eqx.Module):
    """Loads of experts by the table of each row; leaves of `tables` are [row, ...]."""

    tables: ExpertLoadTable

    @eqx.filter_jit
    def __call__(self, tokens: Numbers) -> ExpertLoads:
        """Loads for so many tokens of each row."""
        rows = jnp.broadcast_to(tokens, len(self.tables.logs))
        return jax.vmap(lambda table, count: table(count))(self.tables, rows)


class MergedStep(ModelStep):
    """A step whose rows have layouts of their own, each of which was checked when its own step was made."""

    def __post_init__(self) -> None:
        pass


def kind_of(deployment: Deployment) -> Hashable:
    """What layouts have to have in common to be merged: the same stages, and kernels of the same names.

    DeepEP's exchanges count the GPUs and nodes that a token reaches beforehand, so each layout is a kind of its own.
    """
    numbers = tuple(getattr(deployment, name) for name in LAYOUT)
    shared = replace(deployment, **dict.fromkeys(LAYOUT, 1))
    return shared, numbers if deployment.exchange != "collectives" else tuple(number == 1 for number in numbers)


def merged(steps: Sequence[ModelStep], of_row: Int[np.ndarray, " row"]) -> ModelStep:
    """A step for rows of these ones, which differ in layout and gating alone, of one kind (`kind_of`).

    A batch has the shape of `of_row`, the place in `steps` of each row.
    """
    first = steps[0]
    layouts: dict[str, Any] = {}
    for name in LAYOUT:
        numbers = np.array([getattr(step.deployment, name) for step in steps])
        same = (numbers == numbers[0]).all() and (numbers[0] == 1 or first.deployment.exchange != "collectives")
        layouts[name] = int(numbers[0]) if same else jnp.asarray(numbers[of_row], jnp.float32)
    logs = np.stack([np.asarray(step.gating.logs) for step in steps])[of_row]
    gating: Any = LoadsByRow(ExpertLoadTable(jnp.asarray(logs)))
    return MergedStep(first.model, replace(first.deployment, **layouts), first.kernels, gating, first.deepep)
