"""One step for rows of several layouts: their numbers are arrays, so that all layouts of a kind are priced at once."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.gating import ExpertLoadTable
from jaxmoe.serving.step import ModelStep


class MergedStep(ModelStep):
    """A step whose rows have layouts of their own, each of which was checked when its own step was made."""

    def __post_init__(self) -> None:
        pass


def kind_of(deployment: Deployment) -> Hashable:
    """A key that layouts share which can be merged: they have the same stages, and kernels of the same names."""
    return replace(deployment, tensor=1, data=1, expert_ranks=1), _fixed(deployment)


def merged(steps: Sequence[ModelStep], of_row: Int[np.ndarray, " row"]) -> ModelStep:
    """A step for rows of these ones, which differ in layout and gating alone, of one kind (`kind_of`).

    A batch has the shape of `of_row`, the place in `steps` of each row.
    """
    first = steps[0]
    layouts: dict[str, Any] = _fixed(first.deployment)._asdict()
    for name in (name for name, fixed in layouts.items() if fixed is None):
        numbers = np.array([getattr(step.deployment, name) for step in steps])
        layouts[name] = jnp.asarray(numbers[of_row], jnp.float32)
    logs = np.stack([np.asarray(step.gating.logs) for step in steps])[of_row]
    gating = ExpertLoadTable(jnp.asarray(logs))
    return MergedStep(first.model, replace(first.deployment, **layouts), first.kernels, gating, first.deepep)


class _Fixed(NamedTuple):
    """Numbers of a layout that stages or names of kernels hang on; `None` for those that do not matter there."""

    tensor: int | None
    data: int | None
    expert_ranks: int | None


def _fixed(deployment: Deployment) -> _Fixed:
    """DeepEP counts the GPUs and nodes that a token reaches beforehand, so all its numbers are fixed.

    Two batches take turns, and a sum over one GPU has no turn; elsewhere it is a stage of no time.
    """
    numbers = _Fixed(deployment.tensor, deployment.data, deployment.expert_ranks)
    if deployment.exchange != "collectives":
        return numbers
    ones = _Fixed(*(number if number == 1 else None for number in numbers))
    return ones if deployment.overlap == "two_batches" else ones._replace(tensor=None)
