"""`jaxmoe plan advise`, and `jaxmoe plan place --machine`: placements by the time they take on a machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.markup import escape

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import build_layer_model, build_model, element_bytes
from jaxmoe.engine.copies import replica_model
from jaxmoe.experiment.advice import Advice, Case, advice_report, alternatives
from jaxmoe.experiment.advice import advise as advised
from jaxmoe.experiment.confidence import whole_steps
from jaxmoe.experiment.inputs import OptionError, hints_of
from jaxmoe.experiment.replica_plans import placed_for_time, serving_scenario
from jaxmoe.experiment.slot_plans import plan_report, windows_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.models import MoEModel
from jaxmoe.placement.engine_files import formats, read_slot_plan, suffix_of_engine, write_slot_plan
from jaxmoe.placement.replica_choice import choice_of
from jaxmoe.placement.slots import SlotPlan
from jaxmoe.report.style import time_unit
from jaxmoe.tune.replica_placement import ReplicaProblem


@dataclass(frozen=True)
class Asked:
    """The options of `jaxmoe plan place --machine`."""

    loads: Path
    to: str
    slots: int
    ranks: int
    model: str | None
    nodes: int
    repeats: bool
    machine: Path
    choice: str
    tokens: int
    before: Path | None
    steps: int


def place_for_time(folder: OutputFolder, asked: Asked, weight_bytes: float | None) -> None:
    """Place copies for the time of a layer on a machine."""
    with StageTimer() as clock:
        if asked.model is None:
            raise OptionError("--machine needs --model, which tells what a token and an expert cost; give the model")
        check_format(asked.to)
        with clock.stage("load"):
            windows, ids = windows_of(asked.loads, asked.model)
            scenario = serving_scenario(asked.machine, asked.model, asked.tokens, costs=_costs(weight_bytes))
            moe, layer = build_model(scenario.model), build_layer_model(scenario, "sharded")
            if layer.machine.num_nodes != asked.ranks:
                raise OptionError(f"--ranks is {asked.ranks}, but --machine has {layer.machine.num_nodes} nodes")
            ids = _layer_ids(ids, windows, moe, asked.loads)
            before = None if asked.before is None else _before(asked, asked.before, ids)
        with clock.stage("place"):
            problem = ReplicaProblem(
                replica_model(layer, asked.choice),
                np.swapaxes(windows, 0, 1),
                asked.slots,
                before=before,
                horizon=np.inf if before is None else float(asked.steps),
                groups=moe.expert_groups,
                nodes=asked.nodes,
                repeats=asked.repeats,
            )
            placed = placed_for_time(problem, windows, asked.tokens * moe.top_k)
        plan = SlotPlan(placed.slots, asked.ranks, moe.num_experts, ids, moe.num_layers)
        target = folder.target("placement" + suffix_of_engine(asked.to))
        notes = write_slot_plan(target, asked.to, plan)
        seconds = {"same_loads": placed.fitted, "later_loads": placed.later}
        report: dict[str, Any] = {
            "command": "plan place",
            **surroundings(),
            "source": {"path": str(asked.loads), "windows": len(windows)},
            "plan": plan_report(plan, windows.sum(axis=0)),
            "written": {"format": asked.to, "path": str(target)},
            "bytes_per_element": vars(element_bytes(scenario)),
            "layer_s": seconds,
            "choice": asked.choice,
            "notes": notes,
        }
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        title = f"{scenario.name}: {asked.slots} slots, copies picked {asked.choice}"
        _print_seconds(seconds, f"{title}; {element_bytes(scenario).told()}")
        print_warnings(notes)


def _costs(weight_bytes: float | None) -> dict[str, float]:
    return {} if weight_bytes is None else {"weight_bytes_per_element": weight_bytes}


def check_format(to: str) -> None:
    """Raise `OptionError` for a format that is not known."""
    if to not in formats():
        raise OptionError(f"--to is {to!r}, expected one of {', '.join(formats())}")


def _before(asked: Asked, path: Path, ids: tuple[int, ...]) -> np.ndarray:
    plan = read_slot_plan(path, hints_of(asked.model), asked.ranks).plan
    if plan.layer_ids != ids:
        raise OptionError(f"--before {path} is of the layers {list(plan.layer_ids)}, the loads {list(ids)}")
    return plan.slots


def _layer_ids(ids: tuple[int, ...], windows: np.ndarray, moe: MoEModel, path: Path) -> tuple[int, ...]:
    """Layers as numbered in the model. Raises `OptionError` for loads of another model."""
    if windows.shape[2] != moe.num_experts:
        raise OptionError(f"{path} is of {windows.shape[2]} experts, --model has {moe.num_experts}; use loads of it")
    if len(ids) == len(moe.moe_layer_ids) and ids == tuple(range(len(ids))):
        return moe.moe_layer_ids
    if not {*ids} <= {*moe.moe_layer_ids}:
        raise OptionError(f"{path} is of the layers {list(ids)}, --model has experts in {list(moe.moe_layer_ids)}")
    return ids


def _print_seconds(seconds: dict[str, Any], title: str) -> None:
    """Mean time of a layer, by candidate."""
    known = [value for row in seconds.values() if row for value in row.values()]
    factor, unit = time_unit(max(known))
    table = new_table(
        f"{title}: mean time of a layer [{unit}]",
        "slots",
        ("loads they were made for", "second half, made for the first"),
    )
    for name, value in seconds["same_loads"].items():
        later = (seconds["later_loads"] or {}).get(name)
        table.add_row(name, f"{value * factor:.4g}", "-" if later is None else f"{later * factor:.4g}")
    print_table(table)


def advise(
    folder: OutputFolder,
    interrupts: Interrupts,
    trace: Path,
    model: str,
    machine: Path,
    to: str,
    choice: str,
    tokens: int,
    steps: int,
    context: int,
    weight_bytes: float | None,
) -> None:
    """Tell whether placing experts anew pays, and write the placement to deploy."""
    with StageTimer() as clock:
        check_format(to)
        with clock.stage("load"):
            windows, ids = windows_of(trace, model)
            scenario = serving_scenario(machine, model, tokens, context, _costs(weight_bytes))
            moe = build_model(scenario.model)
            ids = _layer_ids(ids, windows, moe, trace)
            windows = whole_steps(windows, float(tokens * moe.top_k))
            case = Case(scenario, tokens, steps, choice_of(choice))
        with clock.stage("compare"):
            advice = advised(case, windows)
            others = alternatives(case, advice.deployed, windows)
        ranks = case.layer().machine.num_nodes
        target = folder.target("placement" + suffix_of_engine(to))
        notes = write_slot_plan(target, to, SlotPlan(advice.deployed, ranks, moe.num_experts, ids, moe.num_layers))
        report: dict[str, Any] = {
            "command": "plan advise",
            **surroundings(),
            "source": {"path": str(trace), "windows": len(windows)},
            "bytes_per_element": vars(element_bytes(scenario)),
            **advice_report(advice),
            "alternatives_token_s": others,
            "written": {"format": to, "path": str(target)},
            "notes": notes,
        }
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        _print_actions(advice, f"{scenario.name}; {element_bytes(scenario).told()}")
        _print_alternatives(others)
        typer.echo(advice.sentence)
        print_warnings(notes)


def _print_actions(advice: Advice, title: str) -> None:
    base = advice.outcomes[0]
    factor, unit = time_unit(max(float(each.seconds.mean()) for each in advice.outcomes))
    table = new_table(
        f"{title}: made for the first half of the trace, evaluated on the second",
        "action",
        (escape(f"step [{unit}]"), "tokens", "gain %", "max/mean", "mean/max", "(max-mean)/mean", "GB a rank"),
    )
    for each in advice.outcomes:
        gain = float((1 - each.per_token / base.per_token).mean())
        table.add_row(
            each.action.name,
            f"{each.seconds.mean() * factor:.4g}",
            str(each.tokens),
            f"{gain * 100:.1f}",
            *(f"{value:.3f}" for value in each.balance.values()),
            f"{each.rank_bytes / 1e9:.3g}",
        )
    print_table(table)


def _print_alternatives(others: dict[str, float]) -> None:
    factor, unit = time_unit(max(others.values()))
    table = new_table(f"beside placement: time of a token in the first layer's experts [{unit}]", "what", ("",))
    for name, value in others.items():
        table.add_row(name, f"{value * factor:.4g}")
    print_table(table)
