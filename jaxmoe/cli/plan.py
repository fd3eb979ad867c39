"""`jaxmoe plan`: placement files of serving engines converted, shown, compared and checked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.plan_advise import Asked, check_target, file_of, place_for_time
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import ModelConfig, build_machine, build_model, build_topology, load_hardware, load_model
from jaxmoe.experiment.inputs import OptionError, hints_of
from jaxmoe.experiment.slot_plans import (
    balance,
    check_slots,
    checks,
    layers_in,
    loads_for,
    moves,
    placed_for,
    plan_report,
    windows_of,
)
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.hardware import AbstractTopology
from jaxmoe.models import MoEModel
from jaxmoe.placement.engine_files import ReadPlan, numbers_layers, read_slot_plan, write_slot_plan
from jaxmoe.report.mesh_loads import plot_slots
from jaxmoe.report.style import byte_unit, time_unit


def place(
    folder: OutputFolder,
    interrupts: Interrupts,
    loads: Path,
    to: str,
    slots: int,
    placed_ranks: int,
    model: str | None,
    nodes: int,
    repeats: bool,
    fast: bool,
    machine: Path | None,
    choice: str,
    tokens: int,
    before: Path | None,
    steps: int,
    weight_bytes: float | None,
) -> None:
    """Place copies of experts for recorded loads, and write a file that an engine loads."""
    if machine is not None:
        asked = Asked(loads, to, slots, placed_ranks, model, nodes, repeats, machine, choice, tokens, before, steps)
        place_for_time(folder, asked, weight_bytes)
        return
    with StageTimer() as clock:
        check_target(folder, to)
        with clock.stage("load"):
            windows, ids = windows_of(loads, model)
            moe = None if model is None else build_model(load_model(model, "--model"))
            ids = ids if moe is None else layers_in(moe, ids, windows.shape[2], loads)
            check_slots(slots, placed_ranks, windows.shape[2], repeats)
        with clock.stage("place"):
            placed = placed_for(windows, ids, moe, slots, placed_ranks, nodes, repeats, fast)
        target = folder.target(file_of(to))
        notes = write_slot_plan(target, to, placed.plan)
        if moe is None and numbers_layers(to) and ids == tuple(range(len(ids))):
            notes.append(f"layers are taken for 0 to {ids[-1]} of the model; if it has dense ones, give --model")
        report: dict[str, Any] = {
            "command": "plan place",
            **surroundings(),
            "source": {"path": str(loads), "windows": len(windows)},
            "plan": plan_report(placed.plan, windows.sum(axis=0)),
            "written": {"format": to, "path": str(target)},
            "max_over_mean": {"same_loads": placed.fitted, "later_loads": placed.later},
            "notes": notes,
        }
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        _print_placed(report["max_over_mean"], f"{loads.name}: {slots} slots on {placed_ranks} ranks, as {to}")
        print_warnings(notes)


def _print_placed(ratios: dict[str, Any], title: str) -> None:
    """Busiest rank over the mean, as means over layers and windows."""
    table = new_table(
        f"{title}: busiest rank over the mean, mean over layers and windows",
        "evaluated on",
        (name.replace("_", " ") for name in ratios["same_loads"]),
    )
    labels = {"same_loads": "the windows it was made for", "later_loads": "the second half, made for the first"}
    for key, label in labels.items():
        if ratios[key] is not None:
            table.add_row(label, *(f"{value:.4f}" for value in ratios[key].values()))
    print_table(table)


def convert(
    folder: OutputFolder, interrupts: Interrupts, source: Path, to: str, model: str | None, ranks: int | None
) -> None:
    """Write a placement of any format in another one."""
    with StageTimer() as clock:
        check_target(folder, to)
        read = read_slot_plan(source, hints_of(model), ranks)
        target = folder.target(file_of(to))
        notes = [*read.notes, *write_slot_plan(target, to, read.plan)]
        written = {"format": to, "path": str(target)}
        report = _report("convert", source, read) | {"written": written, "notes": notes}
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        _print(report["plan"], f"{source.name} ({read.format}) as {to}")
        print_warnings(notes)


def show(
    folder: OutputFolder,
    interrupts: Interrupts,
    source: Path,
    model: str | None,
    ranks: int | None,
    loads: Path | None,
) -> None:
    """Tell what a placement holds, and how it balances given loads, with a picture."""
    with StageTimer() as clock:
        read = read_slot_plan(source, hints_of(model), ranks)
        counts = None if loads is None else loads_for(read.plan, loads, model)
        report = _report("show", source, read, counts)
        _draw(folder, read, counts, source.name)
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        _print(report["plan"], f"{source.name} ({read.format})")
        print_warnings(read.notes)


def diff(
    folder: OutputFolder,
    interrupts: Interrupts,
    first: Path,
    second: Path,
    model: str | None,
    ranks: int | None,
    machine: Path | None,
    weight_bytes: float | None,
) -> None:
    """Tell what has to move from one placement to another: copies, bytes, and over which links."""
    with StageTimer() as clock:
        hints = hints_of(model)
        before, after = (read_slot_plan(path, hints, ranks) for path in (first, second))
        if model is None:
            raise OptionError("--model is not given, and bytes of an expert are not known without; give the model")
        moe = _weighing(load_model(model, "--model"), weight_bytes)
        size = moe.expert_parameters * moe.bytes.experts
        topology = None if machine is None else build_topology(load_hardware(machine))
        found = moves(before.plan, after.plan, size, topology)
        total = float(found.copies.sum())
        report: dict[str, Any] = {
            "command": "plan diff",
            **surroundings(),
            "copies": total,
            "copies_by_layer": dict(zip(map(str, before.plan.layer_ids), found.copies.tolist(), strict=True)),
            "bytes": total * size,
            "busiest_link_bytes": None if found.link_bytes is None else float(found.link_bytes.max(initial=0)),
            "busiest_link": _busiest(found.link_bytes, topology),
            "at_least_s": found.seconds,
        }
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        _print_moves(report, f"{first.name} to {second.name}, bytes of a weight: {moe.bytes.experts:g}")
        print_warnings([*before.notes, *after.notes])


def check(
    folder: OutputFolder,
    interrupts: Interrupts,
    source: Path,
    model: str,
    machine: Path,
    ranks: int | None,
    weight_bytes: float | None,
) -> None:
    """Tell whether a placement is whole and fits a machine. Raises `OptionError` where it does not."""
    with StageTimer() as clock:
        moe = _weighing(load_model(model, "--model"), weight_bytes)
        built = build_machine(load_hardware(machine), 1, moe.expert_size)
        read = read_slot_plan(source, hints_of(model), ranks or built.num_nodes)
        found = checks(read.plan, moe, built, moe.expert_parameters * moe.bytes.experts)
        title = f"{source.name} ({read.format}) on {machine.stem}, bytes of a weight: {moe.bytes.experts:g}"
        table = Table(title=escape(title))
        table.add_column("check", no_wrap=True)
        table.add_column("")
        table.add_column("found")
        for one in found:
            table.add_row(one.name, "yes" if one.holds else "NO", escape(one.found))
        told = {one.name: {"holds": one.holds, "found": one.found} for one in found}
        report = _report("check", source, read) | {"checks": told}
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        print_table(table)
        print_warnings(read.notes)
        failed = [f"{one.name} ({one.found})" for one in found if not one.holds]
        if failed:
            raise OptionError(f"{source} does not suit {machine}: {'; '.join(failed)}")


def _report(verb: str, source: Path, read: ReadPlan, loads: np.ndarray | None = None) -> dict[str, Any]:
    about = {"path": str(source), "format": read.format}
    plan = plan_report(read.plan, loads)
    return {"command": f"plan {verb}", **surroundings(), "source": about, "plan": plan, "notes": read.notes}


def _weighing(model: ModelConfig, weight_bytes: float | None) -> MoEModel:
    """The model, whose experts have so many bytes a weight, or those that it states."""
    built = build_model(model)
    return built if weight_bytes is None else replace(built, bytes=replace(built.bytes, experts=weight_bytes))


def _busiest(carried: np.ndarray | None, topology: AbstractTopology | None) -> list[int] | None:
    """The vertices at both ends of the link that carries most."""
    if carried is None or topology is None or not carried.any():
        return None
    return [int(end) for end in np.asarray(topology.link_ends)[int(carried.argmax())]]


def _draw(folder: OutputFolder, read: ReadPlan, counts: np.ndarray | None, name: str) -> None:
    plan = read.plan
    if counts is None:
        amount, measure = (plan.copies > 0).sum(axis=1), "different experts"
    else:
        loads = plan.loads(counts)
        amount, measure = (
            loads / np.maximum(loads.mean(axis=1, keepdims=True), 1e-30),
            "load over the mean of the layer",
        )
    title = f"{name}: {plan.num_experts} experts in {plan.slots.shape[1]} slots on {plan.ranks} ranks"
    plot_slots(folder.target("slots.png"), plan.layer_ids, amount, measure, plan.copies.sum(axis=2), title)


def _print(plan: dict[str, Any], title: str) -> None:
    table = new_table(title, "what was read", ("",))
    for name, value in plan.items():
        if isinstance(value, dict):
            for figure in balance(np.ones((1, 1))):
                table.add_row(f"{name}: {figure}".replace("_", " "), f"{value[figure]:.4f}")
        elif name != "layer_ids":
            table.add_row(name.replace("_", " "), str(value))
    print_table(table)


def _print_moves(report: dict[str, Any], title: str) -> None:
    factor, unit = byte_unit(max(report["bytes"], 1.0))
    table = new_table(title, "what has to move", ("",))
    table.add_row("copies of experts", f"{report['copies']:.0f}")
    table.add_row("layers with any", str(sum(count > 0 for count in report["copies_by_layer"].values())))
    table.add_row(f"weights [{unit}]", f"{report['bytes'] * factor:.4g}")
    if report["at_least_s"] is not None:
        seconds, time = time_unit(max(report["at_least_s"], 1e-12))
        table.add_row(f"over the busiest link [{unit}]", f"{report['busiest_link_bytes'] * factor:.4g}")
        table.add_row(
            "that link", "-" if report["busiest_link"] is None else "{} to {}".format(*report["busiest_link"])
        )
        alone = escape(f"at least, with the network to itself [{time}]")
        table.add_row(alone, f"{report['at_least_s'] * seconds:.4g}")
    print_table(table)
