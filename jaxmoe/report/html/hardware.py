"""Numbers of a machine by descent: what `tune --hardware` found, from its `summary.json`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.report.html.blocks import Block, Cell, Figure, Note, TableBlock, axis, figure, rounded, seconds_unit
from jaxmoe.report.style import PALETTE


def hardware_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading, of a summary of `tune --hardware`."""
    column = next(key for key in summary["objective"] if key != "metric")
    value = summary["objective"][column]
    factor, unit = seconds_unit([value]) if column.endswith("_s") else (1.0, column)
    notes: list[Block] = [Note(str(note)) for note in summary["notes"]]
    tried: list[Block] = [_choices(summary, column, factor, unit)] if summary.get("choices") else []
    return {
        "Best machine": [_numbers(summary, value * factor, unit), *notes, *tried],
        "Constraints": [_constraints(summary, column, factor, unit)],
        "Strategies": [_candidates(summary, column, factor, unit)],
        "Starts": [_starts(summary, column, factor, unit)],
    }


def _numbers(summary: Mapping[str, Any], best: float, unit: str) -> TableBlock:
    bounds = summary["space"]["variables"]
    rows: list[list[Cell]] = [
        [key, value, bounds[key]["from"], bounds[key]["to"]] for key, value in summary["numbers"].items()
    ]
    rows += [[key, value, None, None] for key, value in summary["derived"].items()]
    title = f"{summary['objective']['metric']} {best:.5g} {unit} with {summary['strategy']['name']}"
    return TableBlock(
        title, ["number", "best", "from", "to"], rows, "Numbers without bounds are derived from the others."
    )


def _choices(summary: Mapping[str, Any], column: str, factor: float, unit: str) -> TableBlock:
    rows: list[list[Cell]] = [
        [*map(str, each["values"].values()), _scaled(each[column], factor), each.get("reason", "")]
        for each in summary["choices"]
    ]
    columns = [*summary["choices"][0]["values"], f"{summary['objective']['metric']} [{unit}]", "why none"]
    return TableBlock("Choices", columns, rows, "Each after a short search; the best one was searched in full.")


def _constraints(summary: Mapping[str, Any], column: str, factor: float, unit: str) -> TableBlock:
    rows: list[list[Cell]] = [
        [
            each["constraint"],
            each["left"],
            each["right"],
            each["slack"],
            _scaled(each[f"{column}_per_unit_of_limit"], factor),
            each["percent_per_percent_of_limit"],
        ]
        for each in summary["constraints"]
    ]
    columns = ["constraint", "left", "right", "slack", f"1 more of the limit adds [{unit}]", "1 % more adds [%]"]
    return TableBlock(
        "What limits are worth", columns, rows, "Both sides of a constraint are in the units of its keys."
    )


def _candidates(summary: Mapping[str, Any], column: str, factor: float, unit: str) -> TableBlock:
    rows: list[list[Cell]] = [
        [each["name"], *(_scaled(each[f"{where}_{column}"], factor) for where in ("own", "here"))]
        for each in summary["candidates"]
    ]
    columns = ["strategy", f"on its own best machine [{unit}]", f"on the best of all [{unit}]"]
    return TableBlock(summary["objective"]["metric"], columns, rows, "Each strategy has a best machine of its own.")


def _starts(summary: Mapping[str, Any], column: str, factor: float, unit: str) -> Figure:
    """Where descent began and ended, start by start."""
    starts = summary["starts"]
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "y": rounded([_scaled(value, factor) for value in starts[f"{key}_{column}"]]),
            "marker": {"color": PALETTE[at], "symbol": ("circle-open", "circle")[at], "size": 8},
            "hovertemplate": f"start %{{x}}<br>%{{y:.5g}} {unit}<extra>{name}</extra>",
        }
        for at, (key, name) in enumerate((("first", "first"), ("last", "after descent")))
    ]
    values = [value for key in ("first", "last") for value in starts[f"{key}_{column}"] if value]
    wide = bool(values) and bool(np.max(values) > 10 * np.min(values) > 0)
    label = f"{summary['objective']['metric']} [{unit}]"
    shown = figure(traces, xaxis=axis("start"), yaxis=axis(label, type="log" if wide else "linear"))
    caption = "Exact, on the machines that descent began with, and on those where it ended, moved to meet the limits."
    return Figure("From many starts", caption, {"figure": shown}, height=380)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
