"""`jaxmoe plan advise`, and `jaxmoe plan place --machine`: placements by the time they take on a machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import build_layer_model, build_model, element_bytes
from jaxmoe.engine.copies import replica_model
from jaxmoe.experiment.advice import Advice, Case, advice_report
from jaxmoe.experiment.advice import advise as advised
from jaxmoe.experiment.advice_alternatives import alternatives
from jaxmoe.experiment.confidence import whole_steps
from jaxmoe.experiment.inputs import OptionError, hints_of
from jaxmoe.experiment.replica_plans import placed_for_time, serving_scenario
from jaxmoe.experiment.slot_plans import check_room, check_slots, layers_in, plan_report, windows_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.experiment.whole_model import counted
from jaxmoe.placement.engine_files import formats, read_slot_plan, suffix_of_engine, write_slot_plan
from jaxmoe.placement.replica_choice import choice_of
from jaxmoe.placement.slots import SlotPlan
from jaxmoe.report.style import aligned, time_unit
from jaxmoe.tune.replica_placement import ReplicaProblem
from jaxmoe.units import GIGA

BALANCE = "balance of ranks, mean over layers and later windows, and memory"


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
        check_target(folder, asked.to)
        with clock.stage("load"):
            windows, ids = windows_of(asked.loads, asked.model)
            scenario = serving_scenario(asked.machine, asked.model, asked.tokens, costs=_costs(weight_bytes))
            moe, layer = build_model(scenario.model), build_layer_model(scenario, "sharded")
            if layer.machine.num_nodes != asked.ranks:
                raise OptionError(f"--ranks is {asked.ranks}, but --machine has {layer.machine.num_nodes} nodes")
            ids = layers_in(moe, ids, windows.shape[2], asked.loads)
            check_slots(asked.slots, asked.ranks, moe.num_experts, asked.repeats)
            expert_bytes = float(layer.costs.expert_bytes)
            check_room(asked.slots, asked.ranks, moe.num_experts, len(ids), layer.machine, expert_bytes)
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
        target = folder.target(file_of(asked.to))
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


def check_target(folder: OutputFolder, to: str) -> None:
    """Raise `InputError` for a format that is not known, and where its file would take the place of a user's."""
    if to not in formats():
        raise OptionError(f"--to is {to!r}, expected one of {', '.join(formats())}")
    folder.check(file_of(to))


def file_of(to: str) -> str:
    """The name of the file that is written in a format."""
    return "placement" + suffix_of_engine(to)


def _before(asked: Asked, path: Path, ids: tuple[int, ...]) -> np.ndarray:
    plan = read_slot_plan(path, hints_of(asked.model), asked.ranks).plan
    if plan.layer_ids != ids:
        raise OptionError(f"--before {path} is of the layers {list(plan.layer_ids)}, the loads {list(ids)}")
    return plan.slots


def _print_seconds(seconds: dict[str, Any], title: str) -> None:
    """Mean time of a layer, by candidate."""
    known = [value for row in seconds.values() if row for value in row.values()]
    factor, unit = time_unit(max(known))
    table = new_table(
        f"{title}: mean time of a layer [{unit}]",
        "slots",
        ("loads they were made for", "second half, made for the first"),
    )
    rows = {name: (value, (seconds["later_loads"] or {}).get(name)) for name, value in seconds["same_loads"].items()}
    columns = [
        aligned(None if value is None else value * factor for value in column)
        for column in zip(*rows.values(), strict=True)
    ]
    for name, row in zip(rows, zip(*columns, strict=True), strict=True):
        table.add_row(name, *row)
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
        check_target(folder, to)
        with clock.stage("load"):
            windows, ids = windows_of(trace, model)
            scenario = serving_scenario(machine, model, tokens, context, _costs(weight_bytes))
            moe = build_model(scenario.model)
            ids = layers_in(moe, ids, windows.shape[2], trace)
            windows = whole_steps(windows, float(tokens * moe.top_k))
            case = Case(scenario, tokens, steps, choice_of(choice))
        with clock.stage("compare"):
            advice = advised(case, windows)
            others, layers = alternatives(case, advice.deployed, windows)
        ranks = case.layer().machine.num_nodes
        missing = "" if case.beside() is not None else "the model states no attention"
        told = counted(f"the {windows.shape[1]} MoE layers of the trace", context, missing)
        target = folder.target(file_of(to))
        notes = write_slot_plan(target, to, SlotPlan(advice.deployed, ranks, moe.num_experts, ids, moe.num_layers))
        report: dict[str, Any] = {
            "command": "plan advise",
            **surroundings(),
            "source": {"path": str(trace), "windows": len(windows)},
            "bytes_per_element": vars(element_bytes(scenario)),
            **advice_report(advice, ranks),
            "counted": told,
            "alternatives_token_s": others,
            "alternatives_layers": layers,
            "written": {"format": to, "path": str(target)},
            "notes": notes,
        }
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        _print_actions(advice, f"{scenario.name}; {element_bytes(scenario).told()}", ranks, told)
        _print_balance(advice)
        _print_alternatives(others, layers)
        typer.echo(advice.sentence)
        print_warnings(notes)


def _print_actions(advice: Advice, title: str, ranks: int, told: str) -> None:
    """A step of every action on later loads, and the tokens that it comes to."""
    outcomes, base = advice.outcomes, advice.outcomes[0]
    steps = [each.step(ranks) for each in outcomes]
    factor, unit = time_unit(max(step.seconds for step in steps))
    gains = [float((1 - each.per_token / base.per_token).mean()) for each in outcomes]
    columns = {
        f"step\n{unit}": aligned(step.seconds * factor for step in steps),
        "tokens": [str(each.tokens) for each in outcomes],
        "tokens/s": aligned(step.tokens_per_s for step in steps),
        "tokens/s\na rank": aligned(step.tokens_per_s_device for step in steps),
        "less time\na token": [f"{100 * gain:.1f} %" for gain in gains],
    }
    made = f"{title}: made for the first half of the trace, evaluated on the second"
    _print_columns(made, "action", [each.action.name for each in outcomes], columns, told)


def _print_balance(advice: Advice) -> None:
    """How even the ranks are, and the memory that experts take."""
    outcomes = advice.outcomes
    measures = {"max/mean": "max_over_mean", "mean/max": "mean_over_max", "(max-mean)/mean": "excess_over_mean"}
    columns = {told: [f"{each.balance[key]:.3f}" for each in outcomes] for told, key in measures.items()}
    columns["GB a rank"] = aligned((each.rank_bytes / GIGA for each in outcomes), 3)
    _print_columns(BALANCE, "action", [each.action.name for each in outcomes], columns)


def _print_alternatives(others: dict[str, float], layers: int) -> None:
    factor, unit = time_unit(max(others.values()))
    columns = {f"a token\n{unit}": aligned(value * factor for value in others.values())}
    title = f"beside placement: a token in the experts of a layer, mean over {layers} layers"
    _print_columns(title, "what", [*others], columns)


def _print_columns(
    title: str, heading: str, names: list[str], columns: dict[str, list[str]], caption: str | None = None
) -> None:
    """A table of long names, which may be folded, and of numbers."""
    table = new_table(title, heading, columns, caption)
    table.columns[0].no_wrap = False
    for name, row in zip(names, zip(*columns.values(), strict=True), strict=True):
        table.add_row(name, *row)
    print_table(table)
