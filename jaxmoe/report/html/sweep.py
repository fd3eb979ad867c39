"""Blocks for a sweep: best strategies, Pareto fronts linked with parallel coordinates, and elasticities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log10
from typing import Any

import numpy as np

from jaxmoe.report.html.blocks import Block, Cell, Figure, Note, TableBlock, axis, choices, figure, rounded
from jaxmoe.report.style import INK, PALETTE, strategy_colours, time_unit

Row = Mapping[str, Any]
UNITS = {"TFLOPs", "GB", "MB", "kB", "B", "ns", "us", "ms", "s", "W", "J", "pJ", "mm2", "USD"}
FEW = 12  # different numbers that are drawn as names
MOST_AXES = 12  # of the parallel coordinates


@dataclass(frozen=True)
class SweepData:
    """Results of a sweep. Rows are all points that can be drawn or, of many, a sample and all points of the fronts.

    `axes` are columns that differ between points, `metrics` names of metrics with their columns; metrics whose column
    ends in `_s` are seconds. `fronts` are indices of `rows` by pair of metrics, in the order of the first. `winners`
    are the best rows of every case, or a sample of them, with the part by which the next strategy is `behind`.
    `worth` has, by metric and axis, the elasticity at the 5th percentile, in the median and at the 95th.
    """

    rows: Sequence[Row]
    points: int  # in all
    able: int  # that can be drawn: with metrics, and comparable
    axes: Sequence[str]
    metrics: Mapping[str, str]
    fronts: Mapping[tuple[str, str], Sequence[int]]
    best: Mapping[str, Row]
    winners: Sequence[Row]
    behind: Sequence[float]
    wins: Mapping[str, tuple[int, float | None]]  # cases by strategy, and how far the next one is behind in the median
    worth: Mapping[str, Mapping[str, tuple[float, float, float]]]
    limits: Mapping[str, Mapping[str, int]]  # points by strategy and by what is busy longest there
    notes: Sequence[str]


def sweep_blocks(data: SweepData) -> dict[str, list[Block]]:
    """Blocks by heading."""
    notes: list[Block] = [Note(note) for note in data.notes]
    if len(data.rows) < data.able:
        notes.append(
            Note(
                f"Figures show {len(data.rows):,} of {data.able:,} points: a seeded sample, and every point of the "
                "Pareto fronts. Tables and counts are of all points."
            )
        )
    sections: dict[str, list[Block]] = {"Points": [_best_table(data), *notes]}
    if data.fronts:
        sections["Pareto front and parallel coordinates"] = [_linked(data)]
    if data.limits:
        sections["What limits"] = [_limits_table(data)]
    if data.wins:
        sections["Who wins where"] = [_wins_table(data), *_map(data)]
    if data.worth:
        sections["What numbers are worth"] = [_worth(data)]
    return sections


# Columns: numbers with a label and a scale, or names by their index.


def label_of(key: str, others: Sequence[str] = ()) -> str:
    """A key for people: its last part, or as many as tell it from others, with its unit in brackets."""
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        short = parts[-count:]
        if all(other.split(".")[-count:] != short for other in others if other != key):
            break
    words = " ".join(short).split("_")
    unit = next((at for at, word in enumerate(words) if at and word in UNITS), len(words))
    name, measure = " ".join(words[:unit]), " ".join("µs" if word == "us" else word for word in words[unit:])
    measure = measure.replace(" per ", "/").replace(" ", "·")
    return f"{name} [{measure}]" if measure else name


def column(rows: Sequence[Row], key: str, label: str, is_time: bool = False) -> dict[str, Any]:
    """Values of a column for the page: `values`, `label`, and either `names` that they index or the `scale`.

    Times are given in seconds, and shown in a unit that suits them.
    """
    values = [row.get(key) for row in rows]
    if not all(isinstance(value, int | float) or value is None for value in values):
        names = sorted({_name(value) for value in values})
        index = {name: at for at, name in enumerate(names)}
        return {"label": label, "names": names, "values": [index[_name(value)] for value in values]}
    numbers = [float(value) if value is not None and isfinite(value) else None for value in values]
    if is_time:
        factor, unit = time_unit(max((number for number in numbers if number is not None), default=0.0))
        label = f"{label.partition(' [')[0]} [{unit}]"
        numbers = [None if number is None else number * factor for number in numbers]
    known = [number for number in numbers if number is not None]
    wide = bool(known) and min(known) > 0 and log10(max(known) / min(known)) > 1
    return {"label": label, "scale": "log" if wide else "linear", "values": rounded(numbers)}


def _name(value: object) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def _columns(data: SweepData, rows: Sequence[Row], keys: Sequence[str]) -> list[dict[str, Any]]:
    times = {key for key in data.metrics.values() if key.endswith("_s")}
    return [column(rows, key, label_of(key, keys), key in times) for key in keys]


# Tables.


def _best_table(data: SweepData) -> TableBlock:
    """The best point by every metric."""
    metrics = [name for name in data.metrics if name in data.best]
    keys = ["strategy", "exchange", *(key for key in data.axes if key not in ("strategy", "exchange"))]
    columns = [label_of(key, keys) for key in keys]
    rows = []
    factors = {name: _unit(data, name) for name in metrics}
    for name in metrics:
        row = data.best[name]
        values = {each: row.get(data.metrics[each]) for each in metrics}
        told = [None if value is None else value * factors[each][0] for each, value in values.items()]
        rows.append([name, str(row["hash"]), *told, *(_cell(row.get(key)) for key in keys)])
    headings = [f"{name} [{factors[name][1]}]" if factors[name][1] else name for name in metrics]
    caption = f"{data.points:,} points; {data.able:,} have metrics and can be compared."
    return TableBlock("Best point by every metric", ["best by", "point", *headings, *columns], rows, caption)


def _unit(data: SweepData, name: str) -> tuple[float, str]:
    """Unit of a metric: that of the times of the best points, or none."""
    key = data.metrics[name]
    if not key.endswith("_s"):
        return 1.0, label_of(key).partition("[")[2].removesuffix("]")
    return time_unit(max(row[key] for row in data.best.values() if row.get(key) is not None))


def _cell(value: object) -> Cell:
    return value if isinstance(value, str | int | float | None) and not isinstance(value, bool) else str(value)


def _limits_table(data: SweepData) -> TableBlock:
    kinds = sorted({kind for counts in data.limits.values() for kind in counts})
    rows: list[list[Cell]] = [[name, *(of.get(kind, 0) for kind in kinds)] for name, of in data.limits.items()]
    caption = "Points at which a resource of this kind is busy longest in a layer, all its stages together."
    return TableBlock("Points by what is busy longest", ["strategy", *kinds], rows, caption)


def _wins_table(data: SweepData) -> TableBlock:
    rows: list[list[Cell]] = [
        [name, cases, None if behind is None else 100 * behind]
        for name, (cases, behind) in sorted(data.wins.items(), key=lambda item: -item[1][0])
    ]
    cases = sum(count for count, _ in data.wins.values())
    return TableBlock(
        f"Best strategy, {cases:,} cases",
        ["strategy", "wins", "next strategy behind by (median), %"],
        rows,
        "A case is all points that differ in strategy and exchange alone.",
    )


# Figures.


def _linked(data: SweepData) -> Figure:
    """Parallel coordinates and a plane of two metrics, with one selection; `page.js` draws both."""
    metrics = [name for name in data.metrics if any(name in pair for pair in data.fronts)]
    exchanges = {(row["strategy"], row["exchange"]) for row in data.rows}
    told = {"strategy", "exchange"} if len(exchanges) == len({name for name, _ in exchanges}) else {"strategy"}
    keys = [*(key for key in data.axes if key not in told), *(data.metrics[name] for name in metrics)]
    shown = [*keys[: MOST_AXES - len(metrics)], *keys[-len(metrics) :]] if len(keys) > MOST_AXES else keys
    strategies = column(data.rows, "strategy", "strategy")
    colours = strategy_colours(strategies["names"])
    columns = dict(zip(shown, _columns(data, data.rows, shown), strict=True))
    plane = figure([], xaxis=axis(""), yaxis=axis(""), dragmode="select", hovermode="closest")
    block = {
        "figure": plane,
        "columns": [columns[key] for key in shown],
        "first": list(max(data.fronts.items(), key=lambda item: len(item[1]))[0]),  # the plane shown first
        "metrics": [{"name": name, "column": shown.index(data.metrics[name])} for name in metrics],
        "strategies": strategies,
        "colours": [colours[name] for name in strategies["names"]],
        "hash": [row["hash"] for row in data.rows],
        "fronts": [{"pair": list(pair), "rows": list(rows)} for pair, rows in data.fronts.items()],
        "front_colour": INK,
    }
    caption = (
        "Draw a box in the plane, or drag along an axis of the parallel coordinates: the other shows the same points. "
        "A click on a dragged range, or a double click in the plane, gives it up. The line is the Pareto front of the "
        "two metrics."
    )
    return Figure("Select in one, see in the other", caption, block, kind="linked", height=460, wide=True)


def _map(data: SweepData) -> list[Block]:
    """Winners over two axes that one chooses."""
    keys = [key for key in data.axes if key not in ("strategy", "exchange")]
    keys = [key for key in keys if len({_name(row.get(key)) for row in data.winners}) > 1]
    if not keys:
        return []
    names = list(data.wins)
    colours = strategy_colours(names)
    columns = _columns(data, data.winners, keys)
    for each in columns:
        _as_names_where_few(each)
    block = {
        "figure": figure([], xaxis=axis(""), yaxis=axis(""), hovermode="closest"),
        "columns": columns,
        "strategies": names,
        "colours": [colours[name] for name in names],
        "winner": [names.index(row["strategy"]) for row in data.winners],
        "behind": rounded([100 * behind if isfinite(behind) else None for behind in data.behind]),
    }
    cases = sum(count for count, _ in data.wins.values())
    part = f" {len(data.winners):,} of {cases:,} cases are drawn, a seeded sample." if len(data.winners) < cases else ""
    caption = f"Every case, coloured by its best strategy. Cases of few values are spread around them.{part}"
    return [Figure("Map of winners", caption, block, kind="map", height=520)]


def _as_names_where_few(column: dict[str, Any]) -> None:
    """Few different numbers are drawn as names, in their order."""
    different = sorted({value for value in column["values"] if value is not None})
    if "names" in column or len(different) > FEW or None in column["values"]:
        return
    index = {value: at for at, value in enumerate(different)}
    column["names"] = [f"{value:.5g}" for value in different]
    column["values"] = [index[value] for value in column["values"]]


def _worth(data: SweepData) -> Figure:
    """Elasticities as bars, of a metric that one chooses."""
    keys = list(dict.fromkeys(key for of in data.worth.values() for key in of))

    def bars(of: Mapping[str, tuple[float, float, float]]) -> dict[str, list[Any]]:
        low, middle, high = np.array([of.get(key, (np.nan,) * 3) for key in keys]).T
        x = [middle.tolist()]
        return {"x": x, "error_x.array": [(high - middle).tolist()], "error_x.arrayminus": [(middle - low).tolist()]}

    first = bars(next(iter(data.worth.values())))
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [label_of(key, keys) for key in keys],
        "x": rounded(first["x"][0]),
        "error_x": {
            "array": rounded(first["error_x.array"][0]),
            "arrayminus": rounded(first["error_x.arrayminus"][0]),
            "color": INK,
        },
        "marker": {"color": PALETTE[0]},
        "hovertemplate": "%{y}<br>%{x:.3f} % (median)<extra></extra>",
    }
    shown = figure(
        [trace],
        xaxis=axis("metric changes by [%]"),
        yaxis=axis("", autorange="reversed", gridcolor="rgba(0,0,0,0)"),
    )
    options = choices("metric", ((name, bars(of)) for name, of in data.worth.items()))
    caption = "For 1 % more of the number: median over points; the lines are from the 5th to the 95th percentile."
    return Figure("Elasticities", caption, {"figure": shown, "choices": options}, height=110 + 44 * len(keys))
