"""Plans given on the command line as `--plan FILE` or `--plan NAME=FILE`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxmoe.cli.inputs import Inputs
from jaxmoe.cli.session import OptionError
from jaxmoe.cli.strategies import STANDARD, Strategy
from jaxmoe.placement import Placement, PlanError, check_fits, read_plan


def given_plans(texts: Sequence[str] | None, inputs: Inputs, taken: Sequence[str] = STANDARD) -> list[Strategy]:
    """Read and check plans, none by a name that is `taken`. Raises `PlanError` or `OptionError`."""
    plans: list[Strategy] = []
    for text in texts or ():
        name, path = _split(text)
        if name in {*taken, *(plan.name for plan in plans)}:
            raise OptionError(f"--plan {text}: the name {name!r} is taken; give another one as --plan NAME={path}")
        plans.append(Strategy(name, _checked(path, inputs)))
    return plans


def _split(text: str) -> tuple[str, Path]:
    """Name and path; an equals sign after a slash belongs to the path."""
    name, equals, path = text.partition("=")
    if equals and name and path and "/" not in name:
        return name, Path(path)
    return Path(text).stem, Path(text)


def _checked(path: Path, inputs: Inputs) -> Placement:
    """The part of a plan that places the layers of this run."""
    plan = read_plan(path, inputs.moe.moe_layer_ids)
    try:
        _check_sizes(plan, inputs)
        # All its layers count, chosen or not: a plan may give one layer more of a node than another.
        check_fits(plan, float(inputs.model.expert_bytes), inputs.capacity(len(plan.layer_ids)))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    row = {layer: i for i, layer in enumerate(plan.layer_ids)}
    share = np.stack([plan.share[row[layer]] for layer in inputs.layer_ids])
    return replace(plan, share=share, layer_ids=inputs.layer_ids)


def _check_sizes(plan: Placement, inputs: Inputs) -> None:
    if plan.mesh_shape != inputs.shape:
        raise PlanError(
            f"mesh_shape is {list(plan.mesh_shape)}, but hardware.mesh_shape is {list(inputs.shape)}; "
            "use a plan for this mesh"
        )
    if plan.share.shape[1] != inputs.moe.num_experts:
        raise PlanError(
            f"places {plan.share.shape[1]} experts, but model.num_experts is {inputs.moe.num_experts}; "
            "use a plan for this model"
        )
    if not set(inputs.layer_ids) <= set(plan.layer_ids):
        raise PlanError(
            f"places the layers {list(plan.layer_ids)}, but this run needs {list(inputs.layer_ids)}; "
            "use a plan for this model, or choose layers with --layers"
        )
