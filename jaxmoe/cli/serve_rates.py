"""`jaxmoe serve rates`: the same requests at several rates, a file each, so that a run that was stopped goes on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.cli.comparison_output import new_table, print_table
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import load_scenario, resolved
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.serving import Serving, answers, serving_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import atomic_write, write_table
from jaxmoe.report import plot_rates
from jaxmoe.report.style import digits
from jaxmoe.serving.online.arrivals import mean_rate

MILLI = 1e-3
Row = dict[str, Any]


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    rates: str,
    overrides: list[str] | None,
    profile: Path | None,
) -> None:
    """Serve the scenario's requests at each rate that the folder does not have yet."""
    wanted = _rates(rates)
    folder.to_go_on = "the same command goes on from there"
    with StageTimer() as clock:
        with clock.stage("load"):
            scenario = load_scenario(config, overrides or ())
            serving = serving_of(scenario, profile)
            if serving.fleet.users is not None or not np.isfinite(mean_rate(serving.requests)):
                raise OptionError("--rates is given, but requests do not come at a rate; take arrivals that do")
        with clock.stage("serve"):
            rows = []
            for rate in wanted:
                rows.append(_row(folder, serving, rate))
                interrupts.check()
        with clock.stage("draw and write"):
            write_table(folder.target("rates.csv"), map(_flat, rows))
            _draw(folder, scenario.name, serving, rows)
        summary = {"command": "serve rates", "scenario": resolved(scenario), **surroundings(), "rates": rows}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
    _print(scenario.name, serving, rows)


def _rates(text: str) -> list[float]:
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = []
    if not rates or rates[0] <= 0 or not np.isfinite(rates).all():
        raise OptionError(f"--rates is {text!r}; expected numbers above 0, as in 1,2,4")
    return rates


def _row(folder: OutputFolder, serving: Serving, rate: float) -> Row:
    """Answers at a rate: those of the folder, where the same was run there before."""
    name = f"rate_{rate:g}.json"
    path, known = folder.path / name, {"identity": serving.identity, "rate_per_s": rate}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if known.items() <= found.items():
            return found
    row = known | answers(serving, *serving.at(rate))
    with atomic_write(folder.target(name)) as aside:
        aside.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return row


def _flat(row: Row) -> Row:
    """A row of the table, with a column for each statistic of each wait."""
    waits = {
        f"{name}_{statistic}_s": value
        for name, values in row["waits_s"].items()
        for statistic, value in (values or {}).items()
    }
    told = {name: value for name, value in row.items() if name not in ("identity", "waits_s")}
    return told | {"drains": int(row["drains"])} | waits


def _draw(folder: OutputFolder, name: str, serving: Serving, rows: Sequence[Row]) -> None:
    rates = np.array([row["rate_per_s"] for row in rows])
    waits = {
        label: {
            statistic: np.array([(row["waits_s"][wait] or {}).get(statistic, np.nan) for row in rows])
            for statistic in ("p50", "p99")
        }
        for label, wait in (("time to first token", "first_token"), ("time per token", "per_token"))
    }
    served = {
        "served": np.array([row["requests_per_s"] for row in rows]),
        "within limits": np.array([row["goodput_per_s"] for row in rows]),
    }
    plot_rates(folder.target("rates.png"), rates, served, waits, f"{name}: {len(serving.requests)} requests by rate")


def _print(name: str, serving: Serving, rows: Sequence[Row]) -> None:
    heads = ("served\n/s", "in limits\n/s", "first token\np50, ms", "\np99, ms", "per token\np50, ms", "\np99, ms")
    caption = "rates that do not drain have a star" if not all(row["drains"] for row in rows) else None
    table = new_table(f"{name}: {len(serving.requests)} requests", "rate\n/s", heads, caption)
    for row in rows:
        waits = [row["waits_s"][wait] for wait in ("first_token", "per_token")]
        told = [digits(each[at] / MILLI) if each else "-" for each in waits for at in ("p50", "p99")]
        rate = digits(row["rate_per_s"]) + ("" if row["drains"] else " *")
        table.add_row(rate, digits(row["requests_per_s"]), digits(row["goodput_per_s"]), *told)
    print_table(table)
