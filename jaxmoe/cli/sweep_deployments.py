"""`jaxmoe sweep` of a study with axes of a deployment: all points, and the front of a user's and a GPU's tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.session import OutputFolder
from jaxmoe.cli.sweep_tables import MOST_ROWS
from jaxmoe.experiment.metrics import Row
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import write_table
from jaxmoe.report import plot_front
from jaxmoe.report.style import aligned
from jaxmoe.run_folders import locked
from jaxmoe.sweep.chunks import MANIFEST, writing
from jaxmoe.sweep.deployment_chunks import CHUNKS
from jaxmoe.sweep.deployments import LEFT_OUT, MEASURES, Case, DeploymentSweep, sweep_deployments
from jaxmoe.sweep.points import SweepError
from jaxmoe.sweep.run import Progress
from jaxmoe.sweep.study import Study

MILLI = 1e-3
MOST_REASONS = 6
WIDEST = 11  # column of an axis
MOST_TABLES = 3
SERIES = 6  # of a picture
Bar = Callable[[], AbstractContextManager[Progress]]


def run(folder: OutputFolder, study: Study, bar: Bar) -> None:
    """Price all deployments of a study; write them, their front and a picture, and print the front."""
    if (folder.path / MANIFEST).exists():
        raise SweepError(f"--out: {folder.path} holds results of a sweep of layers; give another folder")
    folder.target(CHUNKS)
    folder.to_go_on = "run again to go on"
    with locked(folder.path), bar() as report:
        sweep = sweep_deployments(study, report, folder.path)
    with writing(folder.path):
        write_table(folder.target("deployments.csv"), sweep.rows, digits=6)
        _draw(folder, study, sweep)
        folder.write_json("summary.json", _summary(study, sweep))
    _print_fronts(study, sweep)
    print_warnings([*reasons_told(sweep.left_out, "deployments.csv"), *sweep.notes])


def reasons_told(left_out: Mapping[str, int], table: str) -> list[str]:
    """Lines on how many points are left out, by the reason; `table` has them all."""
    told = [f"{count} left out: {reason}" for reason, count in left_out.items()]
    more = [f"{len(told) - MOST_REASONS} more reasons are in {table}"] * (len(told) > MOST_REASONS)
    return [*told[:MOST_REASONS], *more]


def _summary(study: Study, sweep: DeploymentSweep) -> dict[str, Any]:
    """For programs; times are seconds."""
    return {
        "command": "sweep",
        "study": study.config.model_dump(mode="json", by_alias=True),
        **surroundings(),
        "deployments": len(sweep.rows),
        "priced": len(sweep.priced),
        "kinds": sweep.kinds,
        "chunks_that_were_there": sweep.known_chunks,
        LEFT_OUT: sweep.left_out,
        "fronts": [{"case": dict(case), "deployments": rows} for case, rows in sweep.fronts.items()],
        "stand_ins": sweep.notes,
        "wall_s": {"setup": sweep.setup_s, "evaluate": sweep.seconds},
    }


def _axes(sweep: DeploymentSweep) -> list[str]:
    """Keys of the points whose values differ among those that are priced."""
    keys = [key for key in sweep.rows[0] if key not in (*MEASURES, LEFT_OUT)]
    return [key for key in keys if differs(key, sweep.priced)]


def differs(key: str, rows: Sequence[Row]) -> bool:
    return len({str(row[key]) for row in rows}) > 1


def _told(case: Case) -> str:
    return ", ".join(f"{short_name(key, ' ')} {value}" for key, value in case)


def _draw(folder: OutputFolder, study: Study, sweep: DeploymentSweep) -> None:
    """All deployments and the front of each of the first cases."""
    fronts = list(sweep.fronts.items())
    thinned = [fronts[at] for at in evenly(len(fronts), SERIES)]
    title = f"{study.config.name}: {len(sweep.priced):,} deployments"
    planes = {_told(case) or "front": _plane(rows) for case, rows in thinned}
    plot_front(folder.target("front.png"), _plane(sweep.priced), planes, title)


def _plane(rows: Iterable[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens/s of a user and of a GPU."""
    user, device = np.array([(row["tokens_per_s_user"], row["tokens_per_s_device"]) for row in rows]).T
    return user, device


def _print_fronts(study: Study, sweep: DeploymentSweep) -> None:
    """A table for each of a few cases, evenly taken."""
    fronts, axes = list(sweep.fronts.items()), _axes(sweep)
    shown = evenly(len(fronts), MOST_TABLES)
    for at in shown:
        case, rows = fronts[at]
        keys = [key for key in axes if key not in dict(case)]
        _print_front(f"{study.config.name}{': ' if case else ''}{_told(case)}", rows, keys, MOST_ROWS // len(shown))
    rate = len(sweep.priced) / sweep.seconds
    went = f"{len(sweep.priced)} of {len(sweep.rows)} deployments priced, {rate:.0f} a second with compilation"
    if sweep.known_chunks:
        went += f"\n{sweep.known_chunks} chunks of them were in the folder, of an earlier run"
    if len(shown) < len(fronts):
        went += f"\nshown are fronts of {len(shown)} of {len(fronts)} cases; deployments.csv has all"
    Console(highlight=False, emoji=False).print(went, soft_wrap=True)


def _print_front(title: str, front: Sequence[Row], axes: Sequence[str], most: int) -> None:
    """The front of a case, evenly thinned to the rows of a table, with the axes that differ on it."""
    shown = [front[at] for at in evenly(len(front), most)]
    differ = [key for key in axes if differs(key, front)]
    alike = ", ".join(f"{short_name(key, ' ')} {front[0][key]}" for key in axes if key not in differ)
    thinned = f", {len(shown)} of {len(front)}" if len(shown) < len(front) else ""
    heads = ("tok/s\na user", "tok/s\na GPU", "first\ntoken\nms")
    table = new_table(f"front of {title}{thinned}", heads[0], heads[1:], alike or None)
    table.columns[0].justify = "right"
    for key in differ:
        table.add_column(escape(short_name(key, "\n")), justify="right", max_width=WIDEST)
    table.add_column("limit")
    scales = {"tokens_per_s_user": 1, "tokens_per_s_device": 1, "first_token_s": 1 / MILLI}
    cells = [aligned([row[name] * scale for row in shown]) for name, scale in scales.items()]
    for row, *numbers in zip(shown, *cells, strict=True):
        limit = row["limited_by"].removeprefix("the ").split()[0]
        table.add_row(*numbers, *(escape(str(row[key])) for key in differ), limit)
    print_table(table)


def evenly(count: int, most: int) -> list[int]:
    """Places of at most so many of them, the first and the last among these."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def short_name(key: str, space: str) -> str:
    """The last part of a key, its words apart."""
    return key.rpartition(".")[2].replace("_", space)
