"""Strategies of a comparison: named placements with the exchange of each layer, shipped, tuned or from files."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from jaxmoe.engine import Layer, is_tensor_parallel
from jaxmoe.experiment.inputs import Inputs, OptionError
from jaxmoe.placement import (
    Placement,
    PlanError,
    check_fits,
    read_plan,
)
from jaxmoe.placement.copies import Copies
from jaxmoe.placement.exchange import ExchangeError
from jaxmoe.placement.named import StrategySettings, compared_strategies, strategy_named
from jaxmoe.placement.placement import Mode
from jaxmoe.registry import STRATEGIES
from jaxmoe.traces import GatingTrace
from jaxmoe.units import GIGA

TUNED = "tuned"
GATHERED = "tuned_gathered"  # what the search itself ended with, before the comparison with shipped strategies
REGIONS = "regions"  # the best plan of regions that the machine is cut into, before any search
PLACEMENT_KEYS = ("seed", "strategies")  # of a scenario, on which the standard placements depend beside trace and nodes


@dataclass(frozen=True)
class Strategy:
    """A named placement of the layers of a run, which names the exchange of every layer.

    `comparable` is false where the exchange leaves traffic out, or the placement does not fit the memory. `note` is for
    readers of its times.
    """

    name: str
    placement: Placement
    fits: bool = True
    comparable: bool = True
    note: str = ""


def standard_strategies(inputs: Inputs) -> list[Strategy]:
    """The placements that every comparison has. Those that do not fit the memory are kept, and marked."""
    return list(named_strategies(inputs, compared_strategies()))


def named_strategies(inputs: Inputs, names: Iterable[str]) -> Iterator[Strategy]:
    """Placement strategies of these names on the layers of this run. Raises `PlanError` for a wrong shape."""
    counts, topology = _choice_counts(inputs.trace), inputs.model.machine.topology
    settings = strategy_settings(inputs)
    shape = (len(inputs.layer_ids), inputs.moe.num_experts, inputs.num_nodes)
    for name in names:
        of = strategy_named(name)
        share = of.share(counts, topology, settings)
        if not isinstance(share, Copies) and np.shape(share) != shape:
            raise PlanError(
                f"strategy {name} has shares of shape {np.shape(share)}, expected [layer, expert, node], {shape}"
            )
        made = strategy(inputs, name, share, of.exchange_on(topology, settings), of.mode)
        yield made if not made.fits or not of.note else replace(made, note=of.note)


def strategy_settings(inputs: Inputs) -> StrategySettings:
    """Settings of placement strategies from the scenario: its seed, and the number of groups of a hybrid."""
    return StrategySettings(inputs.scenario.seed, inputs.scenario.strategies.hybrid_regions)


def strategy(
    inputs: Inputs,
    name: str,
    share: np.ndarray | Copies,
    exchange: str | Sequence[str] | None = None,
    mode: Mode = "sharded",
) -> Strategy:
    """Name shares of this run's layers, or copies, and say whether they fit.

    `exchange` is of all layers or of each, by default the scenario's.
    """
    chosen = inputs.scenario.costs.exchange if exchange is None else exchange
    names = (chosen,) * len(inputs.layer_ids) if isinstance(chosen, str) else tuple(chosen)
    placement = placed(inputs, share, names, mode)
    capacity = inputs.capacity(len(inputs.layer_ids))
    try:
        if capacity is not None:
            check_fits(placement, float(inputs.model.costs.expert_bytes), capacity)
    except PlanError as error:
        return Strategy(name, placement, fits=False, comparable=False, note=f"does not fit: {error}")
    partial = [each for each in dict.fromkeys(names) if not inputs.exchange(each).complete]
    if partial:
        note = inputs.exchange(partial[0]).note or f"the exchange {partial[0]} leaves traffic out"
        return Strategy(name, placement, comparable=False, note=note)
    return Strategy(name, placement)


def placed(inputs: Inputs, share: np.ndarray | Copies, exchange: Sequence[str], mode: Mode = "sharded") -> Placement:
    """The placement of shares of this run's layers, or of copies, under an exchange for each."""
    if isinstance(share, Copies):
        return Placement.of_copies(share, inputs.shape, inputs.layer_ids, exchange=tuple(exchange))
    return Placement(np.asarray(share, np.float32), inputs.shape, mode, inputs.layer_ids, exchange=tuple(exchange))


class NodeMemory(NamedTuple):
    """Bytes of expert weights on nodes, of all layers of a run: the mean and the most; and the least left for KV."""

    mean: float
    most: float
    left: float | None  # where a capacity is known


def weights_on_nodes(inputs: Inputs, placement: Placement) -> NodeMemory:
    """Memory of nodes that the weights of a placement take, copies included."""
    held, capacity = placement.memory(float(inputs.model.costs.expert_bytes)), inputs.capacity(len(inputs.layer_ids))
    left = None if capacity is None else float((capacity - held).min())
    return NodeMemory(float(held.mean()), float(held.max()), left)


def check_capacity(inputs: Inputs) -> None:
    """Raise `OptionError` where no plan can fit: where all nodes together have no room for each expert once."""
    capacity = inputs.capacity(1)
    needed = inputs.moe.num_experts * float(inputs.model.costs.expert_bytes)
    if capacity is not None and capacity.sum() < needed * (1 - 1e-6):  # capacities are float32
        raise OptionError(
            f"the {inputs.moe.num_experts} experts of a layer need {needed / GIGA:.4g} GB, and all {inputs.num_nodes} "
            f"nodes together have {capacity.sum() / GIGA:.4g} GB for each layer; raise "
            "hardware.die.memory_capacity_GB, or capacity_GB of the last level of hardware.memory, or use more nodes "
            "or weights of fewer bytes"
        )


def decides_fit(model: Layer) -> tuple[Array, ...]:
    """Numbers of the model that decide whether a placement fits the memory; none where capacity is unlimited."""
    capacity = model.machine.capacity
    return () if capacity is None else (model.costs.expert_bytes, capacity)


def given_plans(
    texts: Sequence[str] | None,
    inputs: Inputs,
    taken: Sequence[str] | None = None,
    compared: Sequence[str] | None = None,
) -> list[Strategy]:
    """Read and check plans, none by a name that is `taken`. Raises `PlanError` or `OptionError`.

    The name of a strategy may stand for a file, if there is none of that name: one that is `compared` is there anyway.
    Both are by default those that every comparison has.
    """
    usual = compared_strategies()
    taken, compared = usual if taken is None else taken, usual if compared is None else compared
    plans: list[Strategy] = []
    for text in texts or ():
        if text in STRATEGIES and not Path(text).exists():
            if text not in {*compared, *(plan.name for plan in plans)}:
                plans += named_strategies(inputs, [text])
            continue
        name, path = _name_and_path(text)
        if name in {*taken, *(plan.name for plan in plans)}:
            raise OptionError(f"--plan {text}: the name {name!r} is taken; give another one as --plan NAME={path}")
        if not path.exists():
            raise PlanError(f"{path}: no such plan file; strategies that need no file: {STRATEGIES.shown()}")
        plans.append(Strategy(name, _checked_plan(path, inputs)))
    return plans


def plan_of_system(inputs: Inputs, plan: str, history: GatingTrace) -> Strategy:
    """The plan that a system starts from: of a file, or a strategy that places experts by their loads in the history.

    Raises `PlanError` or `OptionError`.
    """
    seen = Inputs(inputs.scenario, inputs.moe, inputs.model, history, inputs.trace_path)
    return given_plans([plan], seen, taken=(), compared=())[0]


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
        placed = chosen.of_layers(rows)
        for described in dict.fromkeys(placed.exchanges()):
            inputs.exchange(described)
    except (PlanError, ExchangeError) as error:
        raise PlanError(f"{path}: {error}") from None
    return placed


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
