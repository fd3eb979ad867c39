"""The cross table: every strategy, exchange and system on every shipped machine, for three models; see README.md.

    python studies/dse/cross.py --work FOLDER
    python studies/dse/cross.py --work FOLDER --machines nmp_4x4 nvl72 --models mixtral-8x7b
    python studies/dse/cross.py --work FOLDER --tables-only

Ways and machines are those that there are: one that is added later makes a row or a column of its own. A cell is
written when it is known, and a run that was stopped goes on. Cells are of a version, a digest of the code and of the
scenario: those of another are computed anew. With --again so are cells whose reason was that something cannot be.

Takes about 40 minutes of one core.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cross_cells import CONFIGS, HERE, PHASES, Cell, Column, Way

from jaxmoe.errors import InputError
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.experiment.validation import agreement
from jaxmoe.files import atomic_write, write_table

MODELS = ("deepseek-v3", "mixtral-8x7b", "qwen3-235b-a22b")
# The fastest to compile: cells are compiled once and run a few times.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
# One machine of each kind first. Those that differ in numbers alone follow each other, and share what is compiled.
FIRST = (
    *("nmp_4x8", "dojo_5x5", "dojo_enhanced_5x5", "moentwine_4x4", "chiplets_2x2", "dgx_b200_4x8", "camoe_4nodes"),
    *("nvl72", "moentwine_8x8", "tsmc_sow_3x8", "chiplets_4x4", "torus_8x8", "nmp_4x4", "nmp_8x8", "moentwine_4x8x8"),
)
Cells = dict[Way, Cell]
NUMBERS = {"energy_J": "energy_uJ", "model_s": "model_us", "simulated_s": "simulated_us"}
COLUMNS = ("machine", "model", "phase", "kind", "name", "total_us", "bottleneck", *NUMBERS.values())
ERRORS = ("mean_abs_error_percent", "max_abs_error_percent")


def ordered(machines: Sequence[str]) -> list[str]:
    """Those of FIRST with their variants, then all others."""

    def place(machine: str) -> int:
        return next((at for at, first in enumerate(FIRST) if f"{machine}_".startswith(f"{first}_")), len(FIRST))

    return sorted(machines, key=place)


def kind_of(machine: str) -> str:
    return machine.partition("_")[0]


def known_cells(path: Path, version: str) -> Cells:
    """The cells of a file, none where it is not of this version."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("version") != version:
        return {}
    return {tuple(name.split(" ", 2)): cell for name, cell in known["cells"].items()}


def fill(column: Any, path: Path, again: bool) -> Cells:
    """Compute the cells that a file lacks, and write it after each."""
    version = column.version
    cells = known_cells(path, version)
    for way, compute in column.ways():
        if way in cells and not (again and "reason" in cells[way]):
            continue
        try:
            cells[way] = compute()
        except InputError as error:
            cells[way] = {"reason": str(error).partition("\n")[0].replace(f"{CONFIGS.parent}/", "")}
        except Exception as error:  # a fault of ours, which has to be seen and must not stop a long run
            cells[way] = {"reason": f"fault: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}
            print(*way, cells[way]["reason"], file=sys.stderr, flush=True)
        if not np.isfinite(cells[way].get("total_s", 0.0)):
            cells[way] = {"reason": "the time is no finite number"}
        with atomic_write(path) as aside:
            told = {"version": version, "cells": {" ".join(way): cell for way, cell in cells.items()}}
            aside.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return cells


def table(
    found: dict[tuple[str, str], Cells], machines: Sequence[str], models: Sequence[str]
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows of ways and models with a column for each machine, in µs or as the number of a reason; and the reasons."""
    numbers: dict[str, str] = {}
    rows = []
    for model in models:
        for way in dict.fromkeys(way for machine in machines for way in found.get((machine, model), ())):
            row = {"model": model, **dict(zip(("phase", "kind", "name"), way, strict=True))}
            for machine in machines:
                cell = found.get((machine, model), {}).get(way, {"reason": "not computed yet"})
                if "total_s" in cell:
                    row[machine] = f"{cell['total_s'] * 1e6:.4g}"
                else:
                    row[machine] = numbers.setdefault(cell["reason"], f"R{len(numbers) + 1}")
            rows.append(row)
    return rows, [{"number": number, "reason": reason} for reason, number in numbers.items()]


def long_table(found: dict[tuple[str, str], Cells]) -> list[dict[str, str]]:
    """A row for each cell with a time: what it waits for, its energy where known, and what the simulator says."""
    rows = []
    for (machine, model), cells in found.items():
        for way, cell in cells.items():
            if "total_s" not in cell:
                continue
            values = [f"{cell[key] * 1e6:.5g}" if key in cell else "" for key in NUMBERS]
            told = [machine, model, *way, f"{cell['total_s'] * 1e6:.5g}", cell["bottleneck"], *values]
            rows.append(dict(zip(COLUMNS, told, strict=True)))
    return rows


def fastest(found: dict[tuple[str, str], Cells]) -> list[dict[str, str]]:
    """The fastest strategy of every machine, model and phase, what it waits for, and how far the next one is behind."""
    rows = []
    for (machine, model), cells in found.items():
        for phase in PHASES:
            timed = {
                way[2]: cell for way, cell in cells.items() if way[:2] == (phase, "strategy") and "total_s" in cell
            }
            order = sorted(timed, key=lambda name: timed[name]["total_s"])
            if len(order) < 2:
                continue
            first, second = (timed[name] for name in order[:2])
            told = {"machine": machine, "model": model, "phase": phase, "strategy": order[0]}
            told |= {"total_us": f"{first['total_s'] * 1e6:.5g}", "bottleneck": first["bottleneck"]}
            rows.append(told | {"next_behind_percent": f"{100 * (second['total_s'] / first['total_s'] - 1):.2f}"})
    return rows


def agreements(found: dict[tuple[str, str], Cells]) -> list[dict[str, str]]:
    """How model and simulator agree, over all cells and by their parts. R2 is of the times themselves."""
    parts = ("all", "phase", "kind", "way", "machine", "model")
    rows = [
        (dict(zip(parts, ("all", *way[:2], " ".join(way[1:]), machine, model), strict=True)), cell)
        for (machine, model), cells in found.items()
        for way, cell in cells.items()
        if "simulated_s" in cell
    ]
    told = []
    for by in parts:
        for value in dict.fromkeys(part[by] for part, _ in rows):
            pairs = np.array([[cell["model_s"], cell["simulated_s"]] for part, cell in rows if part[by] == value])
            figures, of_log = agreement(*pairs.T), agreement(*np.log(pairs.T))
            row = {"by": by, "value": value, "cells": str(len(pairs)), "r2": _short(figures["r2"])}
            row |= {"r2_of_log": _short(of_log["r2"])} | {name: _short(figures[name]) for name in ERRORS}
            told.append(row)
    return told


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def main() -> None:
    parser = script_options(__doc__, writes=True)
    shipped = sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))
    parser.add_argument("--work", type=Path, required=True, help="folder for the cells, one file a machine and model")
    parser.add_argument("--machines", nargs="+", default=shipped, choices=shipped, help="all unless said")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names in configs/models")
    parser.add_argument("--again", action="store_true", help="compute cells again that have a reason")
    parser.add_argument("--tables-only", action="store_true", help="write the tables of the cells that there are")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", QUICK)
    options.work.mkdir(parents=True, exist_ok=True)
    found = {}
    for number, machine in enumerate(machines := ordered(options.machines)):
        if number and kind_of(machine) != kind_of(machines[number - 1]):
            jax.clear_caches()
        for model in options.models:
            path = options.work / f"{machine}_{model}.json"
            column = Column(machine, model, options.work)
            known = known_cells(path, column.version) if options.tables_only else fill(column, path, options.again)
            found[machine, model] = known
            times = sum("total_s" in cell for cell in known.values())
            print(f"{model} on {machine}: {times} times, {len(known) - times} reasons", flush=True)
    to = folder_of_tables(HERE, options)
    rows, reasons = table(found, options.machines, options.models)
    write_table(to / "cross.csv", rows, ["model", "phase", "kind", "name", *options.machines])
    write_table(to / "cross_reasons.csv", reasons, ["number", "reason"])
    write_table(to / "cross_cells.csv", long_table(found), COLUMNS)
    for name, told in (("cross_fastest", fastest(found)), ("cross_agreement", agreements(found))):
        write_table(to / f"{name}.csv", told, [*told[0]] if told else ["none"])
    print(f"{len(rows)} rows x {len(options.machines)} machines, {len(reasons)} different reasons")


if __name__ == "__main__":
    main()
