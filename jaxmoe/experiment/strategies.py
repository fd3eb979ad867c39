"""What is compared: a name, and a placement with the exchange of each of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Array

from jaxmoe.experiment.inputs import Inputs, OptionError
from jaxmoe.hardware.cuts import square_cut
from jaxmoe.latency import LayerModel, is_tensor_parallel
from jaxmoe.placement import (
    Placement,
    PlanError,
    check_fits,
    expert_parallel_balanced,
    expert_parallel_random,
    read_plan,
    tensor_parallel,
)
from jaxmoe.placement.exchange import ALONE, ExchangeError, Rings
from jaxmoe.placement.placement import Mode
from jaxmoe.placement.strategies import expert_parallel, groups_of, in_groups
from jaxmoe.traces import GatingTrace
from jaxmoe.traces.statistics import expert_runs

TUNED = "tuned"
GATHERED = "tuned_gathered"  # what the search itself ended with, before the comparison with shipped strategies
STANDARD = ("tp", "tp_both_ways", "ep_random", "ep_balanced", "ep", "hybrid", "hybrid_ring", "hybrid_complete")

PLACEMENT_KEYS = ("seed", "strategies")  # of a scenario, on which the standard placements depend beside trace and nodes

RUNS = "ep_runs"  # whole experts in equal runs by number, as engines place them that do not look at loads


@dataclass(frozen=True)
class Strategy:
    """A named placement of the layers of a run, which names the exchange of every layer.

    `comparable` is false where the accounting leaves something out, or the placement does not fit the memory. `note`
    is what a reader of its figures has to know.
    """

    name: str
    placement: Placement
    fits: bool = True
    comparable: bool = True
    note: str = ""


def standard_strategies(inputs: Inputs) -> list[Strategy]:
    """The usual placements. Those that do not fit the memory are kept, and marked."""
    layers, experts, nodes = len(inputs.layer_ids), inputs.moe.num_experts, inputs.num_nodes
    counts, topology = _choice_counts(inputs.trace), inputs.model.machine.topology
    regions = region_rings(inputs)
    spread, regional = tensor_parallel(layers, experts, nodes), in_groups(counts, groups_of(regions, topology))
    alone = replace(regions, between=False)
    return [
        strategy(inputs, "tp", spread, "ring"),  # hd_moe Eq. 4: one way round
        strategy(inputs, "tp_both_ways", spread, "ring_both_ways"),
        strategy(inputs, "ep_random", expert_parallel_random(layers, experts, nodes, inputs.scenario.seed)),
        strategy(inputs, "ep_balanced", expert_parallel_balanced(counts, nodes)),
        strategy(inputs, "ep", expert_parallel(counts, topology)),
        strategy(inputs, "hybrid", regional),
        strategy(inputs, "hybrid_ring", regional, alone.name),
        strategy(inputs, "hybrid_complete", regional, replace(regions, both_ways=True).name),
    ]


def region_rings(inputs: Inputs) -> Rings:
    """Rings inside `strategies.hybrid_regions` equal groups: rectangles of a mesh, else successive nodes."""
    count = inputs.scenario.strategies.hybrid_regions
    return Rings((count,) if inputs.shape is None else square_cut(inputs.shape, count))


def strategy(
    inputs: Inputs,
    name: str,
    share: np.ndarray,
    exchange: str | Sequence[str] | None = None,
    mode: Mode = "sharded",
) -> Strategy:
    """Name shares of this run's layers, and say whether they fit.

    `exchange` is of all layers or of each, by default the scenario's.
    """
    chosen = inputs.scenario.costs.exchange if exchange is None else exchange
    names = (chosen,) * len(share) if isinstance(chosen, str) else tuple(chosen)
    placement = Placement(share.astype(np.float32), inputs.shape, mode, inputs.layer_ids, exchange=names)
    capacity = inputs.capacity(len(inputs.layer_ids))
    try:
        if capacity is not None:
            check_fits(placement, float(inputs.model.costs.expert_bytes), capacity)
    except PlanError as error:
        return Strategy(name, placement, fits=False, comparable=False, note=f"does not fit: {error}")
    if any(name.endswith(ALONE) for name in names):
        note = "rings inside groups as hd_moe counts them, without what the groups send each other"
        return Strategy(name, placement, comparable=False, note=note)
    return Strategy(name, placement)


def decides_fit(model: LayerModel) -> tuple[Array, ...]:
    """Numbers of the model that say whether a placement fits; none where memory holds whatever is asked of it."""
    capacity = model.machine.capacity
    return () if capacity is None else (model.costs.expert_bytes, capacity)


def given_plans(
    texts: Sequence[str] | None, inputs: Inputs, taken: Sequence[str] = STANDARD, compared: Sequence[str] = STANDARD
) -> list[Strategy]:
    """Read and check plans, none by a name that is `taken`. Raises `PlanError` or `OptionError`.

    The name of a standard strategy may stand for a file, if there is none of that name: one that is `compared` is
    there anyway.
    """
    plans: list[Strategy] = []
    for text in texts or ():
        if text in STANDARD and not Path(text).exists():
            if text not in {*compared, *(plan.name for plan in plans)}:
                plans += [usual for usual in standard_strategies(inputs) if usual.name == text]
            continue
        if text == RUNS and not Path(text).exists():
            runs = expert_runs(len(inputs.layer_ids), inputs.moe.num_experts, inputs.num_nodes)
            plans.append(strategy(inputs, RUNS, runs))
            continue
        name, path = _name_and_path(text)
        if name in {*taken, *(plan.name for plan in plans)}:
            raise OptionError(f"--plan {text}: the name {name!r} is taken; give another one as --plan NAME={path}")
        if not path.exists():
            raise PlanError(f"{path}: no such plan file; strategies that need no file: {', '.join((*STANDARD, RUNS))}")
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
        check_fits(plan, float(inputs.model.costs.expert_bytes), inputs.capacity(len(plan.layer_ids)))
        chosen = _with_exchange(plan, inputs.scenario.costs.exchange)
        rows = [plan.layer_ids.index(layer) for layer in inputs.layer_ids]
        names = tuple(chosen.exchange[row] for row in rows)
        for name in dict.fromkeys(names):
            inputs.exchange(name)
    except (PlanError, ExchangeError) as error:
        raise PlanError(f"{path}: {error}") from None
    return replace(plan, share=plan.share[rows], layer_ids=inputs.layer_ids, exchange=names)


def _with_exchange(plan: Placement, default: str) -> Placement:
    """A plan that states no exchange has the default one, but for tensor parallel layers: a ring serves those."""
    if plan.exchange:
        return plan
    ring = [plan.mode == "sharded" and is_tensor_parallel(share) for share in plan.share]
    return replace(plan, exchange=tuple("ring_both_ways" if round_it else default for round_it in ring))


def _check_sizes(plan: Placement, inputs: Inputs) -> None:
    mine, theirs = inputs.shape, plan.mesh_shape
    if mine is not None and theirs is not None and mine != theirs:
        raise PlanError(
            f"mesh_shape is {list(theirs)}, but hardware.mesh_shape is {list(mine)}; use a plan for this mesh"
        )
    if plan.share.shape[2] != inputs.num_nodes:
        raise PlanError(
            f"places experts on {plan.share.shape[2]} nodes, but the machine has {inputs.num_nodes}; "
            "use a plan for this machine"
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
