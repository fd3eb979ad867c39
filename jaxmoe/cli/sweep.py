"""`jaxmoe sweep`: all points of a study, and what they tell."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxmoe.cli.session import Interrupts, OutputFolder, messages
from jaxmoe.cli.show import print_table, print_warnings
from jaxmoe.experiment.summary import surroundings
from jaxmoe.sweep.metrics import METRICS
from jaxmoe.sweep.run import Progress as Report
from jaxmoe.sweep.run import Sweep, run_sweep
from jaxmoe.sweep.study import Study, read_study
from jaxmoe.units import GIGA


def run(folder: OutputFolder, interrupts: Interrupts, config: Path, memory: float | None) -> None:
    """Compute the points that the folder lacks, and tell what came out."""
    study = read_study(config)
    with _bar(interrupts) as report:
        sweep = run_sweep(study, folder.path, report, (memory or 0.0) * GIGA)
    _print_sweep(study, sweep)
    folder.write_json("summary.json", _summary(study, sweep))
    print_warnings(sweep.notes)


@contextmanager
def _bar(interrupts: Interrupts) -> Iterator[Report]:
    """Points done, their rate and the time left, on a terminal; every report checks for Ctrl-C."""
    console = messages()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("points", total=None, rate="")

        def report(done: int, total: int) -> None:
            interrupts.check()
            speed = bars.tasks[0].speed
            bars.update(task, completed=done, total=total, rate="" if not speed else f"{speed:.0f} points/s")

        yield report


def _print_sweep(study: Study, sweep: Sweep) -> None:
    """How it went, and the best point by the first metric."""
    first = study.config.metrics[0]
    table = Table(title=escape(f"{study.config.name}: {len(sweep.points)} points"))
    for column in ("computed now", "groups", "compiled", "of these too large", "points/s"):
        table.add_column(column, justify="right")
    table.add_column(f"best by {first}")
    rate = f"{sweep.computed / sweep.seconds:.0f}" if sweep.computed else "-"
    counts = (sweep.computed, sweep.groups, sweep.compiles, sweep.too_large)
    table.add_row(*map(str, counts), rate, _told(study, sweep, first))
    print_table(table)


def _told(study: Study, sweep: Sweep, name: str) -> str:
    """The best point: its hash, its values and its metrics."""
    best = sweep.best(name)
    if best is None:
        return "none can be compared"
    shown = ("hash", *sweep.points[0].values, *(METRICS[metric].column for metric in study.config.metrics))
    return escape("\n".join(f"{key} {_short(best.get(key))}" for key in shown if best.get(key) is not None))


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _summary(study: Study, sweep: Sweep) -> dict[str, Any]:
    """For programs; times are seconds."""
    return {
        "command": "sweep",
        "study": study.config.model_dump(mode="json", by_alias=True),
        **surroundings(),
        "points": len(sweep.points),
        "computed": sweep.computed,
        "groups": sweep.groups,
        "compiles": sweep.compiles,
        "compiles_too_large": sweep.too_large,
        "devices": sweep.devices,
        "wall_s": {"setup": sweep.setup_s, "evaluate": sweep.seconds},
        "best": {name: sweep.best(name) for name in study.config.metrics},
        "notes": sweep.notes,
    }
