"""Tables of points of a sweep: the best one, and those of a Pareto front, within the width of a terminal."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.markup import escape

from jaxmoe.cli.comparison_output import new_table, print_table
from jaxmoe.cli.sweep_answers import label_of
from jaxmoe.experiment.limits import resource_name
from jaxmoe.experiment.metrics import Row, column_of
from jaxmoe.report.style import aligned, energy_unit, time_unit
from jaxmoe.sweep.analysis import METHOD
from jaxmoe.sweep.run import Sweep
from jaxmoe.sweep.study import Study

MOST_ROWS = 20  # of a table; the files have all
SHOWN_OF_HASH = 8  # as many as --explain takes


def print_best(study: Study, sweep: Sweep, bytes_told: str) -> None:
    """The best point by the first metric, a line for each of its values, and how the sweep went."""
    first, points = study.config.metrics[0], len(sweep.points)
    rate = f", {sweep.computed / sweep.seconds:.0f} a second" if sweep.computed else ""
    made = f"{_counted(sweep.groups, 'group')}, {_counted(sweep.compiles, 'compilation')}"
    went = f"{sweep.computed} of {points} points computed now{rate}; {made}"
    went += f", {sweep.too_large} again with fewer points at once" if sweep.too_large else ""
    best = sweep.best(first)
    table = new_table(f"{study.config.name}: best by {first} of {points} points; {bytes_told}", "key", (), went)
    table.add_column("value")
    table.show_header = False  # CSV and LaTeX have heads
    for name, value in _told(study, sweep, best) if best else [("none can be compared", "")]:
        table.add_row(escape(name), escape(value))
    print_table(table)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _told(study: Study, sweep: Sweep, best: Row) -> Iterator[tuple[str, str]]:
    """Names and values of a point: which it is, its axes, its metrics, and what is busy longest."""
    for key in ("hash", *sweep.points[0].values):
        if best.get(key) is not None:
            yield _name(study, key), _whole(best[key])
    for metric in study.config.metrics:
        heading, (cell,) = metric_column(metric, [best])
        yield heading, cell
    if best["busiest_kind"] is not None:
        yield "busy longest", resource_name(best["busiest_kind"])


def print_front(study: Study, rows: Sequence[Row], names: Sequence[str]) -> None:
    """The Pareto front: a row for each point, whole mappings and lists of an axis by their number there."""
    shown = rows[:MOST_ROWS]
    more = f", the first {MOST_ROWS}" if len(rows) > MOST_ROWS else ""
    axes = [key for key in study.config.axes if key not in METHOD]
    numbered = {key: values for key in axes if (values := _whole_values(study, key))}
    notes = [f"{label_of(key)} #{at}: {_whole(each)}" for key, known in numbered.items() for at, each in known.items()]
    metrics = [metric_column(name, shown) for name in names]
    title = f"Pareto front of {' and '.join(names)}: {_counted(len(rows), 'point')}{more}"
    table = new_table(title, "point", [escape(heading) for heading, _ in metrics], "\n".join(notes) or None)
    table.add_column("strategy", overflow="fold")
    for key in axes:
        table.add_column(escape(label_of(key)), justify="right", overflow="fold")
    for row, *cells in zip(shown, *(cells for _, cells in metrics), strict=True):
        places = [_cell(row.get(key), numbered.get(key, {})) for key in axes]
        method = f"{row['strategy']} under {row['exchange']}"
        table.add_row(row["hash"][:SHOWN_OF_HASH], *cells, *(escape(text) for text in (method, *places)))
    print_table(table)


def point_rows(study: Study, sweep: Sweep) -> Iterator[Row]:
    """A row for each point, for spreadsheets: its values, the study's metrics, and what limits it."""
    metrics = [column_of(name) for name in study.config.metrics]
    for point, row in zip(sweep.points, sweep.rows, strict=True):
        kind = row["busiest_kind"]
        limit = {"limit": None if kind is None else resource_name(kind), "note": row["note"]}
        yield {key: row.get(key) for key in ("hash", *point.values, *metrics)} | limit


def metric_column(name: str, rows: Iterable[Row]) -> tuple[str, list[str]]:
    """The heading of a metric with its unit, and a cell for each row; seconds and joules in handy units."""
    column = column_of(name)
    values = [row[column] for row in rows]
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    unit_of = {"s": time_unit, "J": energy_unit}.get(column.rpartition("_")[2])
    factor, unit = unit_of(largest) if unit_of else (1.0, "")
    cells = aligned(None if value is None else value * factor for value in values)
    return (f"{name} [{unit}]" if unit else label_of(column)), cells


def _name(study: Study, key: str) -> str:
    """A number of the machine with its unit, all else by its key."""
    return label_of(key) if key in study.config.axes and key not in METHOD else key


def _whole_values(study: Study, key: str) -> dict[int, Any]:
    """Mappings and lists among the values of an axis, by their number there, from 1."""
    values = study.config.axes[key]
    listed = values if isinstance(values, list) else []
    return {at: value for at, value in enumerate(listed, start=1) if isinstance(value, dict | list)}


def _cell(value: object, numbered: dict[int, Any]) -> str:
    """A value of a row; results have mappings and lists as text."""
    known = {json.dumps(each): f"#{at}" for at, each in numbered.items()}
    return known.get(str(value), _whole(value))


def _whole(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
