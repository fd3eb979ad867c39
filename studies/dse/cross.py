"""The cross table: every strategy, exchange and system on every shipped machine, for three models; see README.md.

    python studies/dse/cross.py --out FOLDER
    python studies/dse/cross.py --out FOLDER --machines nmp_4x4 nvl72 --models mixtral-8x7b

Ways and machines are those that there are: one that is added later makes a row or a column of its own. A cell is
written when it is known, and a run that was stopped goes on. Cells are of a version, a digest of the code and of the
scenario: those of another are computed anew. With --again so are cells whose reason was that something cannot be.
"""

import argparse
import ast
import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.config import Scenario, build_model, load_scenario_with, resolved
from jaxmoe.config.explain import Source
from jaxmoe.errors import InputError
from jaxmoe.experiment import score, standard_strategies
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.simulation import iterations_of, setting_of
from jaxmoe.experiment.strategies import STANDARD, Strategy, strategy
from jaxmoe.files import atomic_write
from jaxmoe.placement.exchange import exchange_names
from jaxmoe.systems import SYSTEMS, system_of
from jaxmoe.traces.synthesis import PRESETS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIGS = ROOT / "configs"
MODELS = ("mixtral-8x7b", "deepseek-v3", "qwen3-235b-a22b")
PLACEMENT = "ep_balanced"  # under exchanges and systems
STEPS = 4  # iterations of a system
COMMON = {
    "workload.batch_tokens": 128,
    "costs.bytes_per_element": 2,
    "costs.weight_bytes_per_element": 1,
    "strategies.hybrid_regions": 4,
    "evaluation.batches": 4,
    "validation.batches": 1,
}
Cell = dict[str, Any]  # `total_s`, or the `reason` why there is none


class Column:
    """One model on one machine. What fails for all of it fails when it is first asked for."""

    def __init__(self, machine: str, model: str) -> None:
        self.machine, self.model = machine, model

    @cached_property
    def scenario(self) -> Scenario:
        """What is timed; tokens of presets have logits, which a biased gate needs."""
        preset = {"kind": "preset", "preset": self.model, "logits": 1.0}
        trace = preset if self.model in PRESETS else {"kind": "synthetic"}
        values = COMMON | {"hardware": self.machine, "model": self.model, "workload.trace": trace}
        return load_scenario_with(CONFIGS / "scenarios" / "quickstart.yaml", values, Source("cross.py", HERE))

    @property
    def version(self) -> str:
        """The same for the same code and scenario: what cells of this column depend on."""
        return _digest(code_version(), json.dumps(resolved(self.scenario), sort_keys=True))

    @cached_property
    def inputs(self) -> Inputs:
        """One layer in the middle of the model. Raises `InputError` where the machine computes nothing."""
        layers = build_model(self.scenario.model).moe_layer_ids
        return inputs_of(self.scenario, layers=str(layers[len(layers) // 2]))

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        return {usual.name: usual for usual in standard_strategies(self.inputs)}

    def of_strategy(self, name: str) -> Cell:
        """The strategy under its own exchange."""
        return self._scored(self.strategies[name])

    def of_exchange(self, name: str) -> Cell:
        """The exchange, with the same placement as all others."""
        self.inputs.exchange(name)
        return self._scored(strategy(self.inputs, PLACEMENT, self.strategies[PLACEMENT].placement.share, name))

    def of_system(self, name: str) -> Cell:
        """The system on the same placement, as a mean over iterations."""
        usual = self.strategies[PLACEMENT]
        if not usual.fits:
            return {"reason": usual.note}
        iterations, inputs = iterations_of(self.inputs, STEPS), self.inputs
        runs = system_of(name).runs(setting_of(inputs, usual, iterations.history))
        times = runs[name].rollout(iterations.batches).time
        return {"total_s": float(times.total.mean())}

    def _scored(self, chosen: Strategy) -> Cell:
        if not (chosen.fits and chosen.comparable):
            return {"reason": chosen.note}
        times = score(self.inputs, chosen, self.inputs.evaluation_batches)
        return {"total_s": float(times.total.mean()), "exchange": chosen.placement.exchange[0]}

    def ways(self) -> Iterator[tuple[str, Callable[[], Cell]]]:
        """All rows of the table, in order."""
        for kind, names, of in (
            ("strategy", STANDARD, self.of_strategy),
            ("exchange", exchange_names(), self.of_exchange),
            ("system", SYSTEMS, self.of_system),
        ):
            yield from ((f"{kind} {name}", partial(of, name)) for name in names)


@cache
def code_version() -> str:
    """A digest of all code that cells may depend on, whatever its comments and its format, and of what it runs on."""
    parts = [ROOT / "jaxmoe" / name for name in ("cli", "plotting")]  # these compute nothing
    files = [path for path in sorted((ROOT / "jaxmoe").rglob("*.py")) if not any(map(path.is_relative_to, parts))]
    trees = (ast.dump(ast.parse(path.read_bytes())) for path in (*files, Path(__file__)))
    return _digest(jax.__version__, np.__version__, *trees)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def known_cells(path: Path, version: str) -> dict[str, Cell]:
    """The cells of a file, none where it is not of this version."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return known["cells"] if known.get("version") == version else {}


def fill(column: Column, path: Path, again: bool) -> dict[str, Cell]:
    """Compute the cells that a file lacks, and write it after each."""
    cells = known_cells(path, column.version)
    for name, compute in column.ways():
        if name in cells and not (again and "reason" in cells[name]):
            continue
        try:
            cells[name] = compute()
        except InputError as error:
            cells[name] = {"reason": str(error).partition("\n")[0].replace(f"{ROOT}/", "")}
        if not np.isfinite(cells[name].get("total_s", 0.0)):
            cells[name] = {"reason": "the time is no finite number"}
        with atomic_write(path) as aside:
            told = {"version": column.version, "cells": cells}
            aside.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return cells


def table(
    found: dict[tuple[str, str], dict[str, Cell]], machines: Sequence[str], models: Sequence[str]
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows of ways and models with a column for each machine, in us or as the number of a reason; and the reasons."""
    numbers: dict[str, str] = {}
    rows = []
    for model in models:
        for way in found[machines[0], model]:
            kind, name = way.split(" ", 1)
            row = {"model": model, "kind": kind, "name": name}
            for machine in machines:
                cell = found[machine, model][way]
                if "total_s" in cell:
                    row[machine] = f"{cell['total_s'] * 1e6:.4g}"
                else:
                    row[machine] = numbers.setdefault(cell["reason"], f"R{len(numbers) + 1}")
            rows.append(row)
    return rows, [{"number": number, "reason": reason} for reason, number in numbers.items()]


def write(path: Path, rows: Sequence[dict[str, str]], columns: Sequence[str]) -> None:
    """A table in place of an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as aside, aside.open("w", newline="") as file:
        written = csv.DictWriter(file, columns, lineterminator="\n")
        written.writeheader()
        written.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the cells, one file a machine and model")
    parser.add_argument("--machines", nargs="+", default=shipped, choices=shipped, help="all unless said")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names in configs/models")
    parser.add_argument("--again", action="store_true", help="compute cells again that have a reason")
    parser.add_argument("--tables", type=Path, default=HERE, help="folder for the tables, that of the study")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for model in options.models:
        for machine in options.machines:
            path = options.out / f"{machine}_{model}.json"
            cells = found[machine, model] = fill(Column(machine, model), path, options.again)
            known = sum("total_s" in cell for cell in cells.values())
            print(f"{model} on {machine}: {known} times, {len(cells) - known} reasons", flush=True)
        jax.clear_caches()
    rows, reasons = table(found, options.machines, options.models)
    write(options.tables / "cross.csv", rows, ["model", "kind", "name", *options.machines])
    write(options.tables / "cross_reasons.csv", reasons, ["number", "reason"])
    print(f"{len(rows)} rows x {len(options.machines)} machines, {len(reasons)} different reasons")


if __name__ == "__main__":
    main()
