"""What is compared: a name, a placement, and how its partial results come together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxmoe.experiment.inputs import Inputs, OptionError
from jaxmoe.latency import is_tensor_parallel
from jaxmoe.placement import (
    Placement,
    PlanError,
    check_fits,
    expert_parallel_balanced,
    expert_parallel_random,
    hybrid,
    read_plan,
    tensor_parallel,
)
from jaxmoe.traces import GatingTrace

TUNED = "tuned"
GATHERED = "tuned_gathered"  # what tuning found before tensor parallelism took over some layers
STANDARD = ("tp", "tp_both_ways", "ep_random", "ep_balanced", "hybrid", "hybrid_ring")


@dataclass(frozen=True)
class Rings:
    """That many equal rectangles of the mesh reduce by ring, one way round or both."""

    count: int
    both_ways: bool = False


@dataclass(frozen=True)
class Strategy:
    """A named placement of the layers of a run.

    `forced_rings` reduce in every layer. Otherwise results gather by the scenario's rule, except in layers that
    are tensor parallel: one ring over the whole mesh, both ways round, serves those. `comparable` is false where
    the accounting leaves something out. `note` is what a reader of its figures has to know.
    """

    name: str
    placement: Placement
    forced_rings: Rings | None = None
    fits: bool = True
    comparable: bool = True
    note: str = ""

    @property
    def rings(self) -> list[Rings | None]:
        """Rings of every layer; `None` where results gather."""
        if self.forced_rings is not None or self.placement.mode == "replicated":
            return [self.forced_rings] * len(self.placement.share)
        return [Rings(1, both_ways=True) if is_tensor_parallel(share) else None for share in self.placement.share]


def standard_strategies(inputs: Inputs) -> list[Strategy]:
    """The usual placements. Those that do not fit the memory are kept, and marked."""
    layers, experts, nodes = len(inputs.layer_ids), inputs.moe.num_experts, inputs.num_nodes
    counts = _choice_counts(inputs.trace)
    regions = inputs.scenario.strategies.hybrid_regions
    regional = hybrid(counts, inputs.shape, regions)
    spread = tensor_parallel(layers, experts, nodes)
    shares = {
        "ep_random": expert_parallel_random(layers, experts, nodes, inputs.scenario.seed),
        "ep_balanced": expert_parallel_balanced(counts, nodes),
        "hybrid": regional,
    }
    ring_note = "a ring inside each region as hd_moe counts it, without what the regions send each other"
    return [
        strategy(inputs, "tp", spread, Rings(1)),  # hd_moe Eq. 4: one way round
        strategy(inputs, "tp_both_ways", spread),
        *(strategy(inputs, name, share) for name, share in shares.items()),
        strategy(inputs, "hybrid_ring", regional, Rings(regions), ring_note),
    ]


def strategy(
    inputs: Inputs, name: str, share: np.ndarray, rings: Rings | None = None, leaves_out: str = ""
) -> Strategy:
    """Name sharded shares of this run's layers, and say whether they fit."""
    placement = Placement(share.astype(np.float32), inputs.shape, "sharded", inputs.layer_ids)
    try:
        check_fits(placement, float(inputs.model.expert_bytes), inputs.capacity(len(inputs.layer_ids)))
    except PlanError as error:
        return Strategy(name, placement, rings, fits=False, comparable=False, note=f"does not fit: {error}")
    return Strategy(name, placement, rings, comparable=not leaves_out, note=leaves_out)


def given_plans(texts: Sequence[str] | None, inputs: Inputs, taken: Sequence[str] = STANDARD) -> list[Strategy]:
    """Read and check plans, none by a name that is `taken`. Raises `PlanError` or `OptionError`."""
    plans: list[Strategy] = []
    for text in texts or ():
        name, path = _name_and_path(text)
        if name in {*taken, *(plan.name for plan in plans)}:
            raise OptionError(f"--plan {text}: the name {name!r} is taken; give another one as --plan NAME={path}")
        plans.append(Strategy(name, _checked_plan(path, inputs)))
    return plans


def _choice_counts(trace: GatingTrace) -> np.ndarray:
    """How often every expert was chosen, int [layer, expert]."""
    layers = np.moveaxis(trace.experts, 1, 0).reshape(len(trace.layer_ids), -1)
    return np.stack([np.bincount(layer, minlength=trace.num_experts) for layer in layers])


def _name_and_path(text: str) -> tuple[str, Path]:
    """Name and path; an equals sign after a slash belongs to the path."""
    name, equals, path = text.partition("=")
    if equals and name and path and "/" not in name:
        return name, Path(path)
    return Path(text).stem, Path(text)


def _checked_plan(path: Path, inputs: Inputs) -> Placement:
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
