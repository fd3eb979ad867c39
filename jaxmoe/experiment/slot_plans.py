"""Reports on plans of expert slots: balance of given loads, memory, and the traffic of changing plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmoe.experiment.inputs import OptionError, hints_of, read_file
from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.models import MoEModel
from jaxmoe.network import link_loads
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.slots import SlotPlan, loads_of_slots, max_over_mean, moved
from jaxmoe.traces import GatingTrace
from jaxmoe.traces.statistics.counting import count_pairs
from jaxmoe.tune.replica_windows import steady_slots
from jaxmoe.tune.replicas import balanced_slots
from jaxmoe.units import GIGA


def loads_for(plan: SlotPlan, path: Path, model: str | None) -> Float[np.ndarray, "layer expert"]:
    """Choices of every expert in a trace or in load counts, for the layers of a plan, by layer number or position.

    Raises `OptionError` where the file lacks a layer of the plan, or its choices, or has another number of experts.
    """
    content = read_file(path, model)
    counts = count_pairs(content).load if isinstance(content, GatingTrace) else content.counts.sum(axis=0)
    ids = content.layer_ids.tolist()
    if ids == [*range(len(plan.layer_ids))]:  # files that do not state layers number those with experts from 0
        ids = list(plan.layer_ids)
    missing = sorted({*plan.layer_ids} - {*ids})
    if missing:
        raise OptionError(f"--loads {path} has no layer {missing[0]}, which the plan has; give loads of all its layers")
    if counts.shape[1] != plan.num_experts:
        raise OptionError(f"--loads {path} is of {counts.shape[1]} experts, the plan of {plan.num_experts}")
    counts = np.asarray(counts, float)[[ids.index(layer) for layer in plan.layer_ids]]
    _check_counted(counts, plan.layer_ids, path)
    return counts


def windows_of(path: Path, model: str | None) -> tuple[Float[np.ndarray, "window layer expert"], tuple[int, ...]]:
    """Choices of every expert in each window of load counts, or in 16 successive parts of a trace; and its layers.

    Windows without any choice are left out. Raises `OptionError` for layers without any.
    """
    content = read_file(path, model)
    ids = tuple(int(layer) for layer in content.layer_ids)
    if isinstance(content, GatingTrace):
        _check_top_k(content, model, path)
        parts = np.array_split(np.arange(content.num_tokens), min(16, content.num_tokens))
        windows = np.stack([np.asarray(count_pairs(content.select_tokens(part)).load, float) for part in parts])
    else:
        windows = np.asarray(content.counts, float)
    _check_counted(windows.sum(axis=0), ids, path)
    return windows[windows.any(axis=(1, 2))], ids


def _check_top_k(trace: GatingTrace, model: str | None, path: Path) -> None:
    top_k = hints_of(model).top_k
    if top_k is not None and trace.top_k != top_k:
        raise OptionError(
            f"{path}: tokens chose {trace.top_k} experts, but --model has top_k {top_k}; use a trace of it"
        )


def layers_in(moe: MoEModel, ids: tuple[int, ...], num_experts: int, path: Path) -> tuple[int, ...]:
    """Layers of loads as numbered in the model, where positions among those with experts were given in their place.

    Raises `OptionError` for loads of another model.
    """
    if num_experts != moe.num_experts:
        raise OptionError(f"{path} is of {num_experts} experts, --model has {moe.num_experts}; use loads of it")
    if len(ids) == len(moe.moe_layer_ids) and ids == tuple(range(len(ids))):
        return moe.moe_layer_ids
    if not {*ids} <= {*moe.moe_layer_ids}:
        raise OptionError(
            f"{path} is of the layers {list(ids)}, --model has experts in {list(moe.moe_layer_ids)}; use loads of it, "
            "or state their layer_ids"
        )
    return ids


def check_slots(slots: int, ranks: int, experts: int, repeats: bool) -> None:
    """Raise `OptionError` for more slots than there are different copies to put in them."""
    if slots > experts * ranks and not repeats:
        raise OptionError(
            f"--slots is {slots}; expected at most {experts * ranks}, with which each of {ranks} ranks has all "
            f"{experts} experts. Lower it, or give --repeats"
        )


def check_room(slots: int, ranks: int, experts: int, layers: int, machine: Machine, expert_bytes: float) -> None:
    """Raise `OptionError` where the slots of a rank in all layers are more than its memory, B."""
    if machine.capacity is None:
        return
    room, each = float(np.min(np.asarray(machine.capacity))), layers * expert_bytes
    needed, most = -(-slots // ranks) * each, int(room // each) * ranks
    if needed > room:
        lower = f"give at most {most}" if most >= experts else "use more or larger ranks"
        raise OptionError(
            f"--slots is {slots}; those of a rank in {layers} layers need {needed / GIGA:.4g} GB, and --machine has "
            f"{room / GIGA:.4g} GB; {lower}, or weights of fewer bytes (--weight-bytes)"
        )


def _check_counted(counts: Float[np.ndarray, "layer expert"], layer_ids: Sequence[int], path: Path) -> None:
    """Raise `OptionError` where layers have no choice of any expert: no placement is better than another for them."""
    empty = [layer for layer, row in zip(layer_ids, counts, strict=True) if not row.any()]
    if len(empty) == len(counts):
        raise OptionError(f"{path} counts no token in any layer; record again while the engine serves requests")
    if empty:
        raise OptionError(
            f"{path} counts no token in the layers {empty}; leave them out where they have no experts, else record "
            "again"
        )


@dataclass(frozen=True)
class EvaluatedSlotPlan:
    """A plan of slots for given loads, with its load imbalance beside EPLB's and that of experts in order.

    Imbalance: load of the busiest rank over the mean, averaged over layers and windows, by name. `fitted`: on all
    windows. `later`: on the second half, of plans made for the first; `None` for a single window.
    """

    plan: SlotPlan
    fitted: dict[str, float]
    later: dict[str, float] | None


def placed_for(
    windows: Float[np.ndarray, "window layer expert"],
    layer_ids: tuple[int, ...],
    moe: MoEModel | None,
    slots: int,
    ranks: int,
    nodes: int,
    repeats: bool,
    fast: bool,
) -> EvaluatedSlotPlan:
    """Place copies of experts for loads, and evaluate the plan beside EPLB and experts in order.

    Raises `PlanError` for numbers that do not divide each other, or fewer slots than experts.
    """
    groups = moe.expert_groups if moe is not None else 1

    def made(windows: Float[np.ndarray, "window layer expert"]) -> dict[str, np.ndarray]:
        loads = windows.sum(axis=0)
        if fast or nodes > 1 or len(windows) == 1:
            own = balanced_slots(loads, slots, ranks, groups, nodes, repeats, fast)
        else:
            own = steady_slots(windows, slots, ranks, repeats)
        order = np.tile(np.arange(slots) * loads.shape[1] // slots, (len(loads), 1))
        return {"placed": own, "eplb": eplb(loads, slots, ranks, groups, nodes), "in_order": order}

    def told(chosen: dict[str, np.ndarray], judged: Float[np.ndarray, "window layer expert"]) -> dict[str, float]:
        ratio = {
            name: np.mean([max_over_mean(loads_of_slots(held, window, ranks)).mean() for window in judged])
            for name, held in chosen.items()
        }
        return {name: float(value) for name, value in ratio.items()}

    all_of_it, half = made(windows), len(windows) // 2
    plan = SlotPlan(all_of_it["placed"], ranks, windows.shape[2], layer_ids, None if moe is None else moe.num_layers)
    later = told(made(windows[:half]), windows[half:]) if half else None
    return EvaluatedSlotPlan(plan, told(all_of_it, windows), later)


def balance(loads: Float[np.ndarray, "layer rank"]) -> dict[str, float]:
    """The field's three figures of imbalance, as means over layers; layers without any load are left out."""
    used = loads[loads.sum(axis=1) > 0]
    if not len(used):
        return {"max_over_mean": 1.0, "mean_over_max": 1.0, "excess_over_mean": 0.0}
    ratio = used.max(axis=1) / used.mean(axis=1)
    return {
        "max_over_mean": float(ratio.mean()),
        "mean_over_max": float((1 / ratio).mean()),
        "excess_over_mean": float((ratio - 1).mean()),
    }


def plan_report(plan: SlotPlan, loads: Float[np.ndarray, "layer expert"] | None) -> dict[str, Any]:
    """Sizes of a plan, its copies, and the balance of given loads under equal split."""
    copies = plan.copies.sum(axis=2)
    report: dict[str, Any] = {
        "layers": len(plan.layer_ids),
        "layer_ids": list(plan.layer_ids),
        "num_experts": plan.num_experts,
        "ranks": plan.ranks,
        "slots_per_rank": plan.slots_per_rank,
        "redundant_slots": plan.redundant,
        "most_copies": int(copies.max()),
        "experts_with_copies": int((copies > 1).sum()),
        "repeated_on_a_rank": int(plan.repeated.sum()),
    }
    if loads is None:
        return report
    alone = np.arange(plan.num_experts) * plan.ranks // plan.num_experts
    without = np.stack([np.bincount(alone, row, plan.ranks) for row in loads])
    return report | {"balance": balance(plan.loads(loads)), "balance_of_experts_in_order": balance(without)}


@dataclass(frozen=True)
class Check:
    """A requirement of a plan on a machine, whether it holds, and the numbers compared."""

    name: str
    holds: bool
    found: str


def checks(plan: SlotPlan, moe: MoEModel, machine: Machine, expert_bytes: float) -> list[Check]:
    """Check that a plan has the model's layers and experts and fits the machine's ranks and memory."""
    made = [
        Check("ranks", plan.ranks == machine.num_nodes, f"{plan.ranks} ranks, {machine.num_nodes} nodes"),
        Check("layers", plan.layer_ids == moe.moe_layer_ids, f"{len(plan.layer_ids)} of {len(moe.moe_layer_ids)}"),
        Check("experts", plan.num_experts == moe.num_experts, f"{plan.num_experts}, model {moe.num_experts}"),
        Check("once on a rank", not plan.repeated.any(), f"{int(plan.repeated.sum())} times more than once"),
    ]
    needed = len(plan.layer_ids) * plan.slots_per_rank * expert_bytes
    room = None if machine.capacity is None else float(np.min(np.asarray(machine.capacity)))
    limit = "no limit stated" if room is None else f"{room / GIGA:.4g} GB of room"
    found = f"{needed / GIGA:.4g} GB of weights a rank, {limit}"
    made.append(Check("memory", room is None or needed <= room, found))
    if moe.expert_groups > 1:
        made.append(Check("expert groups", True, _groups(plan, moe)))
    return made


def _groups(plan: SlotPlan, moe: MoEModel) -> str:
    """The mean number of ranks that hold experts of one group, as text; with group-limited gating fewer is better."""
    group = np.arange(plan.num_experts) * moe.expert_groups // plan.num_experts
    held = plan.copies > 0
    spread = [held[:, group == index].any(axis=1).sum(axis=1).mean() for index in range(moe.expert_groups)]
    return f"a group of {plan.num_experts // moe.expert_groups} experts is on {np.mean(spread):.3g} ranks"


@dataclass(frozen=True)
class PlanMoves:
    """Expert copies that travel when one plan replaces another, each from the nearest rank that holds the expert."""

    copies: Float[np.ndarray, " layer"]
    traffic: Float[np.ndarray, "rank rank2"] | None  # B, where the machine is known
    link_bytes: Float[np.ndarray, " link"] | None
    seconds: float | None  # of the busiest link, with the network to itself


def moves(before: SlotPlan, after: SlotPlan, expert_bytes: float, topology: AbstractTopology | None) -> PlanMoves:
    """Copies, traffic and link bytes of changing from one plan to another; only copies without a topology.

    `expert_bytes`: weights of an expert, B. Raises `PlanError` for plans of different models, and `OptionError` for a
    machine with another number of ranks.
    """
    needed = moved(before, after)
    copies = needed.sum(axis=(1, 2)).astype(float)
    if topology is None:
        return PlanMoves(copies, None, None, None)
    if topology.num_nodes != before.ranks:
        raise OptionError(f"--machine has {topology.num_nodes} nodes, the plans {before.ranks} ranks; give theirs")
    hops, held = np.asarray(topology.hop_counts()), before.copies > 0
    layer, expert, rank = np.nonzero(needed)
    far = np.where(held[layer, expert], hops[:, rank].T, np.iinfo(np.int64).max)
    traffic = np.zeros((before.ranks, before.ranks), np.float32)
    np.add.at(traffic, (far.argmin(axis=1), rank), expert_bytes)
    carried = np.asarray(link_loads(topology, jnp.asarray(traffic)), np.float64)
    seconds = carried / np.asarray(topology.link_rate, np.float64)
    return PlanMoves(copies, traffic, carried, float(seconds.max(initial=0.0)))
