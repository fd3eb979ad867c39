"""`jaxmoe serve rates`: the same requests at several rates, kept as they come, so that a run that is killed goes on."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import load_scenario, resolved
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.metrics import Row
from jaxmoe.experiment.serving import COLUMNS, Serving, answers, ends_late, row_of
from jaxmoe.experiment.serving_inputs import serving_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.extras import check_parquet
from jaxmoe.files import write_table
from jaxmoe.report import plot_rates
from jaxmoe.report.style import digits
from jaxmoe.sweep.chunks import MANIFEST, POINTS, ChunkFiles
from jaxmoe.sweep.served import written

MILLI = 1e-3
RATE = "rate_per_s"


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    rates: str,
    overrides: list[str] | None,
    profile: Path | None,
) -> None:
    """Serve the scenario's requests at each rate that the folder does not have yet."""
    check_parquet("jaxmoe serve rates")
    if (folder.path / MANIFEST).exists():  # whose files would count as damaged
        raise OptionError(f"--out: {folder.path} holds results of a sweep; give another folder")
    wanted = _rates(rates)
    folder.to_go_on = "the same command goes on from there"
    with StageTimer() as clock:
        with clock.stage("load"):
            scenario = load_scenario(config, overrides or ())
            serving = serving_of(scenario, profile)
            if serving.rate is None:
                raise OptionError("--rates is given, but requests do not come at a rate; take arrivals that do")
        with clock.stage("serve"):
            files, rows = _served(folder, serving, wanted, interrupts)
        with clock.stage("draw and write"):
            write_table(folder.target("rates.csv"), rows)
            _draw(folder, scenario.name, serving, rows)
        summary = {"command": "serve rates", "scenario": resolved(scenario), **surroundings(), "rates": rows}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
    _print(scenario.name, serving, rows)
    print_warnings([f"{name} could not be read: it was set aside, and run anew" for name in files.damaged])


def _rates(text: str) -> list[float]:
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = []
    if not rates or rates[0] <= 0 or not np.isfinite(rates).all():
        raise OptionError(f"--rates is {text!r}; expected numbers above 0, as in 1,2,4")
    return rates


def _served(
    folder: OutputFolder, serving: Serving, rates: Sequence[float], interrupts: Interrupts
) -> tuple[ChunkFiles, list[Row]]:
    """Rows of these rates: those of the folder, where the same was run there before. Each is kept as it comes."""
    folder.target(POINTS)
    hashes = {rate: sha256(f"{serving.identity} {rate!r}".encode()).hexdigest()[:16] for rate in rates}
    files = ChunkFiles(folder.path, ("hash", RATE, *COLUMNS))
    found = files.read()
    files.conform(["hash", RATE, *COLUMNS], {"hash"})

    def row(rate: float) -> Row:
        return {"hash": hashes[rate], RATE: rate, **row_of(answers(serving, *serving.at(rate)))}

    for chunk in written(files, row, [rate for rate in rates if hashes[rate] not in found]):
        found |= {each["hash"]: each for each in chunk}
        interrupts.check()
    return files, [{name: found[hashes[rate]][name] for name in (RATE, *COLUMNS)} for rate in rates]


def _draw(folder: OutputFolder, name: str, serving: Serving, rows: Sequence[Row]) -> None:
    rates = np.array([row[RATE] for row in rows])
    waits = {
        label: {
            statistic: np.array([row[f"{wait}_{statistic}_s"] or np.nan for row in rows])
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
    late = "served/s are over the time until the last answer: with few requests below the rate"
    told = {
        "rates that do not drain have a star": not all(row["drains"] for row in rows),
        late: any(map(ends_late, rows)),
    }
    caption = "; ".join(note for note, holds in told.items() if holds) or None
    table = new_table(f"{name}: {len(serving.requests)} requests", "rate\n/s", heads, caption)
    for row in rows:
        waits = [row[f"{wait}_{at}_s"] for wait in ("first_token", "per_token") for at in ("p50", "p99")]
        shown = ["-" if each is None else digits(each / MILLI) for each in waits]
        rate = digits(row[RATE]) + ("" if row["drains"] else " *")
        table.add_row(rate, digits(row["requests_per_s"]), digits(row["goodput_per_s"]), *shown)
    print_table(table)
