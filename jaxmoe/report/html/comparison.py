"""Strategies side by side: what `evaluate` and `tune` found, from their `summary.json`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.report.html.blocks import (
    Block,
    Cell,
    Figure,
    Note,
    TableBlock,
    axis,
    choices,
    figure,
    seconds_unit,
)
from jaxmoe.report.html.summaries import agreement_figure, whole_model_blocks
from jaxmoe.report.style import GUIDE, INK, stage_colours, strategy_colours

STAGES = ("dispatch", "compute", "combine")
STAGE_COLOURS = stage_colours(STAGES)
ROW = 30  # CSS pixels for a bar
MARGIN, CELL = 190, 36  # CSS pixels for names and scale beside a map, and for a number in it
MOST_TIMES = 3  # the fastest: where colours end, so that what takes far longer does not make all others alike


def comparison_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading, of a summary of `evaluate` or `tune`."""
    strategies = summary["strategies"]
    factor, unit = seconds_unit(of["mean"]["total_s"] for of in strategies.values())
    notes: list[Block] = [Note(f"{name}: {of['note']}") for name, of in strategies.items() if of["note"]]
    sections: dict[str, list[Block]] = {
        "Strategies": [
            _table(strategies, factor, unit),
            *notes,
            _breakdown(strategies, factor, unit),
            *_exchanges(strategies, factor, unit),
            *whole_model_blocks(summary, "best"),
        ],
        "Layers": [
            _stages_by_layer(strategies, factor, unit),
            _totals_by_layer(strategies, summary["bound_s"], factor, unit),
        ],
    }
    if "tuning" in summary:
        sections["Tuning"] = _tuning(summary["tuning"], factor, unit)
    sections["Model against simulator"] = [_agreement(strategies)]
    return sections


def _under(strategies: Mapping[str, Any]) -> tuple[str, str]:
    """The beginning of keys of stages' times, and the exchange these are under; runs of old have one alone."""
    is_best = all("best_compute_s" in of["mean"] for of in strategies.values())
    return ("best_", "best exchange of every layer") if is_best else ("", "strategy's own exchange")


def _column(of: Mapping[str, Any], key: str) -> np.ndarray:
    """Values of every layer."""
    return np.array([layer[key] for layer in of["layers"]], float)


def _reference(strategies: Mapping[str, Any]) -> str:
    """Name of the strategy to which the others are compared: `tuned` if it is there, else the fastest.

    The fastest has the least time under its best exchange; comparable strategies come before all others.
    """
    if "tuned" in strategies:
        return "tuned"
    able = {name: of for name, of in strategies.items() if of["comparable"]} or strategies
    return min(able, key=lambda name: able[name]["mean"]["best_total_s"])


def _exchange_names(of: Mapping[str, Any], key: str) -> str:
    counted = Counter(layer[key] for layer in of["layers"]).most_common()
    return ", ".join(name if len(counted) == 1 else f"{name} ({count})" for name, count in counted)


def _table(strategies: Mapping[str, Any], factor: float, unit: str) -> TableBlock:
    reference = _reference(strategies)
    best = _column(strategies[reference], "best_total_s")
    rows = []
    for name, of in strategies.items():
        mean, ratio = of["mean"], float((_column(of, "best_total_s") / best).mean()) if of["comparable"] else None
        own = [mean[f"{key}_s"] * factor for key in (*STAGES, "total", "p95_total")]
        under = mean["best_total_s"] * factor if of["comparable"] else None
        fits = name if of["fits"] else f"{name} (does not fit)"
        best_one = [_exchange_names(of, "best_exchange"), of.get("best_limit")] if of["comparable"] else [None, None]
        own_one = [_exchange_names(of, "exchange"), *own, mean["des_total_s"] * factor, of.get("limit")]
        rows.append([fits, under, ratio, *best_one, *own_one])
    return TableBlock(
        f"Mean over layers, times in {unit}",
        [
            *(
                "strategy",
                "total, best exchange",
                f"times as long as {reference}",
                "best exchange",
                "limit of the best",
            ),
            *("own exchange", *STAGES, "total", "p95", "simulated", "limit"),
        ],
        rows,
        "A number behind an exchange is the layers that have it. Times as long: each under its best exchange, mean of "
        "the layers. What follows the own exchange is under that. Simulated: the event simulator, on the batches it "
        "replays.",
    )


def _breakdown(strategies: Mapping[str, Any], factor: float, unit: str) -> Figure:
    """Stages of every strategy as a bar, with p95 and the time under its own and its best exchange as marks."""
    names, (prefix, exchange) = list(strategies), _under(strategies)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": stage,
            "y": names,
            "x": [strategies[name]["mean"][f"{prefix}{stage}_s"] * factor for name in names],
            "marker": {"color": STAGE_COLOURS[stage]},
            "hovertemplate": f"%{{y}}<br>%{{fullData.name}} %{{x:.4g}} {unit}<extra></extra>",
        }
        for stage in STAGES
    ]
    for label, key, symbol in (
        ("p95 of batches", f"{prefix}p95_total_s", "line-ns"),
        ("best exchange", "best_total_s", "diamond"),
        ("own exchange", "total_s", "circle-open"),
    ):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "y": names,
                "x": [strategies[name]["mean"][key] * factor for name in names],
                "marker": {"symbol": symbol, "size": 9, "color": INK, "line": {"width": 2, "color": INK}},
                "hovertemplate": f"%{{y}}<br>%{{fullData.name}} %{{x:.4g}} {unit}<extra></extra>",
            }
        )
    shown = figure(
        traces,
        barmode="stack",
        xaxis=axis(f"time of a layer [{unit}]", rangemode="tozero"),
        yaxis=axis("", autorange="reversed", gridcolor="rgba(0,0,0,0)"),
    )
    caption = f"Mean over layers and batches, under the {exchange}. Click a name to hide it."
    return Figure("What the time is made of", caption, {"figure": shown}, height=130 + ROW * len(names))


def _exchanges(strategies: Mapping[str, Any], factor: float, unit: str) -> list[Block]:
    """Every comparable strategy under every exchange that may be chosen."""
    able = {name: of["under"] for name, of in strategies.items() if of["under"]}
    if not able:
        return []
    exchanges = list(dict.fromkeys(exchange for under in able.values() for exchange in under))
    seconds = np.array([[under[exchange] for exchange in exchanges] for under in able.values()])
    shown = figure(
        [
            {
                "type": "heatmap",
                "x": exchanges,
                "y": list(able),
                "z": (seconds * factor).tolist(),
                "zmin": factor * seconds.min(),
                "zmax": factor * min(seconds.max(), MOST_TIMES * seconds.min()),
                "colorscale": "Viridis",
                "reversescale": True,
                "xgap": 2,
                "ygap": 2,
                "colorbar": {"title": {"text": unit}, "thickness": 12},
                "texttemplate": "%{z:.3g}",
                "hovertemplate": f"%{{y}} under %{{x}}<br>%{{z:.4g}} {unit}<extra></extra>",
            }
        ],
        xaxis=axis("", tickangle=-40, showgrid=False),
        yaxis=axis("", autorange="reversed", showgrid=False),
    )
    caption = (
        f"Time of a layer [{unit}], mean over layers and batches; strategies that leave traffic out are not compared."
    )
    wide = MARGIN + CELL * len(exchanges)
    return [Figure("Under every exchange", caption, {"figure": shown}, height=210 + ROW * len(able), least_width=wide)]


def _layer_axis(layers: Sequence[int]) -> dict[str, Any]:
    return axis("layer", **({"tickvals": list(layers)} if len(layers) <= 16 else {}))


def _stages_by_layer(strategies: Mapping[str, Any], factor: float, unit: str) -> Figure:
    """Stacked bars of one strategy, chosen from all, on one scale."""
    reference = _reference(strategies)
    names, (prefix, exchange) = [reference, *(name for name in strategies if name != reference)], _under(strategies)
    layers = [layer["layer_id"] for layer in strategies[reference]["layers"]]

    def bars(name: str) -> list[list[float]]:
        return [(_column(strategies[name], f"{prefix}{stage}_s") * factor).tolist() for stage in STAGES]

    traces = [
        {
            "type": "bar",
            "name": stage,
            "x": layers,
            "y": values,
            "marker": {"color": STAGE_COLOURS[stage]},
            "hovertemplate": f"layer %{{x}}<br>%{{fullData.name}} %{{y:.4g}} {unit}<extra></extra>",
        }
        for stage, values in zip(STAGES, bars(reference), strict=True)
    ]
    longest = max(float(np.sum(bars(name), axis=0).max()) for name in names)
    shown = figure(
        traces,
        barmode="stack",
        xaxis=_layer_axis(layers),
        yaxis=axis(f"time [{unit}]", range=[0, 1.05 * longest or 1]),
    )
    data = {"figure": shown, "choices": choices("strategy", ((name, {"y": bars(name)}) for name in names))}
    caption = f"Mean over batches, under the {exchange}. The scale is the same for all strategies."
    return Figure("Stages of every layer", caption, data, height=400)


def _totals_by_layer(
    strategies: Mapping[str, Any], bound: Mapping[str, Any] | None, factor: float, unit: str
) -> Figure:
    """A line for every strategy; mean, p95, or under the best exchange."""
    colours, layers = strategy_colours(strategies), [of["layer_id"] for of in next(iter(strategies.values()))["layers"]]
    kinds = {"mean, best exchange": "best_total_s", "mean, own exchange": "total_s", "p95, own exchange": "p95_total_s"}

    def lines(key: str) -> list[list[float]]:
        own = [(_column(of, key) * factor).tolist() for of in strategies.values()]
        return own + ([] if bound is None else [[seconds * factor for seconds in bound["layers"]]])

    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": layers,
            "y": values,
            "line": {"color": colours[name]},
            "hovertemplate": f"layer %{{x}}<br>%{{fullData.name}} %{{y:.4g}} {unit}<extra></extra>",
        }
        for name, values in zip(strategies, lines("best_total_s"), strict=False)
    ]
    if bound is not None:
        traces.append(traces[0] | {"name": "lower bound", "y": lines("best_total_s")[-1]})
        traces[-1] |= {"mode": "lines", "line": {"color": GUIDE, "dash": "dot"}}
    shown = figure(traces, xaxis=_layer_axis(layers), yaxis=axis(f"time of a layer [{unit}]", rangemode="tozero"))
    data = {"figure": shown, "choices": choices("time", ((kind, {"y": lines(key)}) for kind, key in kinds.items()))}
    caption = "Click a name to hide it, double-click it to see it alone."
    return Figure("Layers by strategy", caption, data, height=460)


def _tuning(tuning: Mapping[str, Any], factor: float, unit: str) -> list[Block]:
    """The search, and what its stages ended with."""
    stages = {name.removesuffix("_s"): of["mean"] * factor for name, of in tuning["stages"].items()}
    bound = tuning["bound_s"]["mean"] * factor
    rows: list[list[Cell]] = [[name, seconds, seconds / bound if bound else None] for name, seconds in stages.items()]
    table = TableBlock(
        f"Optimiser {tuning['optimiser']}, times in {unit}",
        ["stage", "time of a layer", "times the lower bound"],
        [*rows, *([["lower bound", bound, 1.0]] if bound else [])],
        "Mean over layers, on the batches that the tuner has seen.",
    )
    histories = {name: of for name, of in tuning["history"].items() if of["step"]}
    if not histories:
        return [table]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": of["step"],
            "y": [seconds * factor for seconds in of["mean_s"]],
            "hovertemplate": f"%{{fullData.name}}, step %{{x}}<br>%{{y:.4g}} {unit}<extra></extra>",
        }
        for name, of in histories.items()
    ]
    shown = figure(traces, xaxis=axis("step"), yaxis=axis(f"time of a layer [{unit}]"))
    return [table, Figure("The search", "Mean over layers.", {"figure": shown}, height=360)]


def _agreement(strategies: Mapping[str, Any]) -> Figure:
    """Every strategy and layer as a point."""
    points = {name: (_column(of, "des_total_s"), _column(of, "des_model_total_s")) for name, of in strategies.items()}
    return agreement_figure(points, "Total of every layer, mean over the batches that the simulator replays.")
