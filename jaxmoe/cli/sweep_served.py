"""`jaxmoe sweep` over requests and engines: all points of a study of serving, the best of them, and a front."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.markup import escape

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.session import OutputFolder
from jaxmoe.cli.sweep_deployments import WIDEST, Bar, differs, evenly, reasons_told, short_name
from jaxmoe.cli.sweep_tables import MOST_ROWS
from jaxmoe.experiment.metrics import Row
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import write_table
from jaxmoe.report import plot_front
from jaxmoe.report.style import aligned
from jaxmoe.sweep.chunks import MANIFEST, POINTS, STUDY, writing
from jaxmoe.sweep.served import DEVICE, LEFT_OUT, MEASURES, USER, VERSION, ServedSweep, sweep_served
from jaxmoe.sweep.study import Study

FIRST, LATER = "first_token_p99_s", "per_token_p99_s"
NO_FRONT = "no point keeps its limits at all"
TABLE, PICTURE = "served.csv", "front.png"


def run(folder: OutputFolder, study: Study, bar: Bar) -> None:
    """Serve the points that the folder lacks; write all of them, their front and a picture, and print the front."""
    for name in (POINTS, MANIFEST, STUDY):
        folder.target(name)
    folder.to_go_on = "run again to go on"
    with bar() as report:
        sweep = sweep_served(study, folder.path, report)
    with writing(folder.path):
        write_table(folder.target(TABLE), [_told(row) for row in sweep.rows], digits=6)
        (folder.path / PICTURE).unlink(missing_ok=True)  # of an earlier run, whose points were others
        if sweep.front:
            title = f"{study.config.name}: {len(sweep.served):,} points, those on the front keep their limits"
            plot_front(folder.target(PICTURE), _plane(sweep.served), {"front": _plane(sweep.front)}, title)
        folder.write_json("summary.json", _summary(study, sweep))
    _print_front(study, sweep)
    damaged = [f"{name} could not be read and was set aside; its points were served anew" for name in sweep.damaged]
    none = [] if sweep.front else [NO_FRONT]
    print_warnings([*none, *reasons_told(sweep.left_out, TABLE), *damaged])


def _told(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("hash", "point", VERSION)}


def _plane(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens/s of a user and of a GPU."""
    user, device = np.array([(row[USER] or np.nan, row[DEVICE]) for row in rows]).T
    return user, device


def _summary(study: Study, sweep: ServedSweep) -> dict[str, Any]:
    """For programs; times are seconds."""
    return {
        "command": "sweep",
        "study": study.config.model_dump(mode="json", by_alias=True),
        **surroundings(),
        "points": len(sweep.rows),
        "computed": sweep.computed,
        LEFT_OUT: sweep.left_out,
        "front": [_told(row) for row in sweep.front],
        "wall_s": {"setup": sweep.setup_s, "evaluate": sweep.seconds},
    }


def _print_front(study: Study, sweep: ServedSweep) -> None:
    """The front, or where there is none the points that serve most within limits, with the axes that differ."""
    rows = sweep.front or sorted(sweep.served, key=lambda row: -row["goodput_per_s"])
    shown = [rows[at] for at in evenly(len(rows), MOST_ROWS)]
    axes = [key for key in rows[0] if key not in (*MEASURES, LEFT_OUT, "hash", "point", VERSION)]
    keys = [key for key in axes if differs(key, sweep.served)]
    heads = ("tok/s\na user", "tok/s\na GPU", "within\nlimits/s", "first token\np99, ms", "per token\np99, ms")
    title = f"{study.config.name}: {'front' if sweep.front else 'points'}, {len(shown)} of {len(rows)}"
    went = f"{sweep.computed} of {len(sweep.rows)} points served now, in {sweep.seconds:.0f} s"
    table = new_table(title, heads[0], heads[1:], went)
    table.columns[0].justify = "right"
    for key in keys:
        table.add_column(escape(short_name(key, "\n")), justify="right", max_width=WIDEST)
    scales = {USER: 1.0, DEVICE: 1.0, "goodput_per_s": 1.0, FIRST: 1e3, LATER: 1e3}
    cells = [aligned([(row[name] or 0.0) * scale for row in shown]) for name, scale in scales.items()]
    for row, *numbers in zip(shown, *cells, strict=True):
        table.add_row(*numbers, *(escape(str(row[key])) for key in keys))
    print_table(table)
