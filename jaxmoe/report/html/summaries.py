"""Blocks of what single commands found, from their `summary.json`: `validate`, `network`, `simulate`, `trace`."""

from collections.abc import Mapping
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
from jaxmoe.report.style import GUIDE, PALETTE, byte_unit, stage_colours, strategy_colours

COMPARED = ("dispatch", "compute", "combine", "total")


def validation_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading, of a summary of `validate`."""
    trials = {
        (name, int(tokens)): trial
        for name, of in summary["strategies"].items()
        for tokens, trial in of["batch_tokens"].items()
    }
    several = len({tokens for _, tokens in trials}) > 1
    points = {}
    for (name, tokens), trial in trials.items():
        batches = [batch for layer in trial["layers"] for batch in layer["batches"]]
        simulated, model = ([batch[of]["total_s"] for batch in batches] for of in ("simulated", "model"))
        points[f"{name}, {tokens} tokens" if several else name] = (np.array(simulated), np.array(model))
    return {
        "Model against simulator": [
            _agreement_table(trials),
            agreement_figure(points, "Every layer and batch, in total."),
        ]
    }


def _agreement_table(trials: Mapping[tuple[str, int], Mapping[str, Any]]) -> TableBlock:
    """A line for each strategy and size of batch: means of both, and how they agree."""
    means = {key: trial["mean"] for key, trial in trials.items()}
    factor, unit = seconds_unit(mean["simulated"]["total_s"] for mean in means.values())
    rows: list[list[Cell]] = []
    for (name, tokens), mean in means.items():
        times = [mean[of][f"{stage}_s"] * factor for stage in COMPARED for of in ("model", "simulated")]
        agreed = trials[name, tokens]["agreement"]["total"]
        rows.append([name, tokens, *times, agreed["r2"], agreed["mean_abs_error_percent"]])
    columns = [f"{stage}, {of}" for stage in COMPARED for of in ("model", "simulated")]
    return TableBlock(
        f"Mean over layers and batches, times in {unit}",
        ["strategy", "tokens", *columns, "R2 of the total", "mean absolute error, %"],
        rows,
    )


def agreement_figure(points: Mapping[str, tuple[np.ndarray, np.ndarray]], caption: str) -> Figure:
    """Predicted over simulated seconds: by name simulated [point] and model [point]. On the line they are equal."""
    largest = max((float(np.max(values, initial=0.0)) for pair in points.values() for values in pair), default=0.0)
    factor, unit = seconds_unit([largest])
    colours = strategy_colours(points)
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": [0, largest * factor],
        "y": [0, largest * factor],
        "line": {"color": GUIDE, "dash": "dot"},
        "hoverinfo": "skip",
        "name": "equal",
    }
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": simulated * factor,
            "y": model * factor,
            "marker": {"color": colours[name], "size": 8, "opacity": 0.8, "line": {"width": 0.5, "color": "white"}},
            "hovertemplate": f"%{{fullData.name}}<br>simulated %{{x:.4g}}, model %{{y:.4g}} {unit}<extra></extra>",
        }
        for name, (simulated, model) in points.items()
    ]
    shown = figure([line, *traces], xaxis=axis(f"simulated [{unit}]"), yaxis=axis(f"model [{unit}]"))
    return Figure("Model against event simulator", caption, {"figure": shown}, height=460)


# Completion of given traffic: `network`.

MOST_ROWS = 1000


def network_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading, of a summary of `network`."""
    matrices = summary["matrices"]
    times = {name: (of["completion_s"]["des"], of["completion_s"]["model"]) for name, of in matrices.items()}
    simulated, model = (np.array(column, float) for column in zip(*times.values(), strict=True))
    caption = "Every point is a traffic matrix."
    return {"Traffic": [_matrix_table(matrices), agreement_figure({"matrices": (simulated, model)}, caption)]}


def _matrix_table(matrices: Mapping[str, Mapping[str, Any]]) -> TableBlock:
    """The matrices that take longest."""
    slowest = sorted(matrices, key=lambda name: -matrices[name]["completion_s"]["model"])[:MOST_ROWS]
    factor, unit = seconds_unit(max(of["completion_s"].values()) for of in matrices.values())
    per_byte, size = byte_unit(max(of["bytes"] for of in matrices.values()))
    models = list(matrices[slowest[0]]["completion_s"])
    rows: list[list[Cell]] = [
        [
            name,
            *(matrices[name]["completion_s"][model] * factor for model in models),
            *(matrices[name][key] * per_byte for key in ("bytes", "max_link_load_B", "max_inject_B", "max_eject_B")),
            _bottleneck(matrices[name]["bottleneck"]),
        ]
        for name in slowest
    ]
    left = len(matrices) - len(rows)
    return TableBlock(
        "Completion of every matrix",
        [
            *("matrix", *(f"{_model_name(model)} [{unit}]" for model in models)),
            *(f"sent [{size}]", f"busiest link [{size}]", f"most sent by a node [{size}]", f"most received [{size}]"),
            "limited by",
        ],
        rows,
        f"And {left} more, which take less time; summary.json has them all." if left else "",
    )


def _model_name(model: str) -> str:
    return {"des": "simulated"}.get(model, model.replace("_", " "))


def _bottleneck(of: Mapping[str, Any] | None) -> str:
    if of is None:
        return "nothing"
    return f"link {of['ends'][0]} to {of['ends'][1]}" if of["part"] == "link" else f"{of['part']} of node {of['node']}"


# A step of the whole model: `evaluate`, `tune`, `simulate`.


def whole_model_blocks(summary: Mapping[str, Any], key: str) -> list[Block]:
    """Steps by strategy or system, which have this `key`; none in a summary of a version that told none."""
    whole = summary.get("whole_model", {})
    if not (steps := whole.get(key)):
        return []
    factor, unit = seconds_unit(of["step_s"] for of in steps.values())
    rows: list[list[Cell]] = [
        [name, of["step_s"] * factor, of["tokens_per_s"], of["tokens_per_s_device"]] for name, of in steps.items()
    ]
    columns = ["", f"a token [{unit}]", "tokens/s", "tokens/s a device"]
    return [TableBlock("A step of the whole model: the next token of every request", columns, rows, whole["counted"])]


# Systems over iterations: `simulate`.


OWN = "experts_broadcast_per_layer"  # a figure that only some systems have


def iterations_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading, of a summary of `simulate`."""
    runs, replayed, stages = summary["runs"], summary["replayed"], summary["stages"]
    factor, unit = seconds_unit(run["mean"]["total_s"] for run in runs.values())
    baseline = summary["baseline"]
    slow = sum(runs[baseline]["total_s"])
    own = [OWN] if all(OWN in run for run in runs.values()) else []
    rows: list[list[Cell]] = []
    for name, run in runs.items():
        speedup = slow / sum(run["total_s"])
        spent = [run["mean"][f"{stage}_s"] * factor for stage in stages]
        times = [run["mean"]["total_s"] * factor, speedup, run["p95_total_s"] * factor, *spent]
        rows.append([name, *times, *(run[key] for key in own), run.get("limit")])
    table = TableBlock(
        f"Mean over {summary['iterations']} iterations, all layers together, times in {unit}",
        [
            "system",
            "total",
            f"times as fast as {baseline}",
            "p95",
            *stages,
            *(key.replace("_", " ") for key in own),
            "limit",
        ],
        rows,
        "Movement that is hidden behind a layer is not in the total.",
    )
    notes: list[Block] = (
        [Note(f"{summary['plan']['name']}: {summary['plan']['note']}")] if summary["plan"]["note"] else []
    )
    return {
        "Systems": [
            table,
            *notes,
            *whole_model_blocks(summary, "runs"),
            _iteration_lines(runs, replayed["iterations"], factor, unit),
            _stage_bars(runs, stages, factor, unit),
        ]
    }


def _iteration_lines(runs: Mapping[str, Any], replayed: list[int], factor: float, unit: str) -> Figure:
    """Every iteration in the model, and the replayed ones in the simulator."""
    colours = strategy_colours(runs)
    traces: list[dict[str, Any]] = []
    for name, run in runs.items():
        template = f"iteration %{{x}}<br>%{{fullData.name}} %{{y:.4g}} {unit}<extra></extra>"
        modelled = [seconds * factor for seconds in run["total_s"]]
        seen = [seconds * factor for seconds in run["simulated_s"]]
        common = {"type": "scatter", "hovertemplate": template}
        traces.append(common | {"mode": "lines", "name": name, "y": modelled, "line": {"color": colours[name]}})
        mark = {"color": colours[name], "symbol": "x", "size": 9}
        traces.append(
            common | {"mode": "markers", "name": f"{name}, simulated", "x": replayed, "y": seen, "marker": mark}
        )
    shown = figure(traces, xaxis=axis("iteration"), yaxis=axis(f"time of all layers [{unit}]", rangemode="tozero"))
    caption = "Crosses are replays in the event simulator, stage by stage and without movements."
    return Figure("Iterations", caption, {"figure": shown}, height=400)


def _stage_bars(runs: Mapping[str, Any], stages: list[str], factor: float, unit: str) -> Figure:
    """Stages of every system as a stack; movement beside, since it may be hidden."""
    names, colours = list(runs), stage_colours(stages)
    traces = [
        {
            "type": "bar",
            "name": stage,
            "x": names,
            "y": [runs[name]["mean"][f"{stage}_s"] * factor for name in names],
            "marker": {"color": colours[stage]},
            "visible": "legendonly" if stage == "movement" else True,
            "hovertemplate": f"%{{x}}<br>%{{fullData.name}} %{{y:.4g}} {unit}<extra></extra>",
        }
        for stage in stages
    ]
    shown = figure(traces, barmode="stack", xaxis=axis(""), yaxis=axis(f"time of all layers [{unit}]"))
    caption = "Mean over iterations. Click movement to see it: it may be hidden behind the layer before."
    return Figure("What the time is made of", caption, {"figure": shown}, height=400)


# Figures of every layer: `trace`.

CHANCE = "_baseline"  # ends the name of a figure as it would be by chance


def trace_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading: one for every part of the summary that has figures by layer."""
    sections: dict[str, list[Block]] = {}
    for heading, of in _parts("all tokens", summary):
        layers = of["layers"]
        keys = [key for key in layers[0] if key != "layer_id"]
        rows = [[layer["layer_id"], *(layer.get(key) for key in keys)] for layer in layers]
        table = TableBlock("Layers", ["layer", *(key.replace("_", " ") for key in keys)], rows)
        sections[heading.capitalize()] = [*_layer_lines(layers, keys), table]
    return sections


def _parts(name: str, of: object) -> list[tuple[str, Mapping[str, Any]]]:
    """Mappings with a list `layers` of figures by `layer_id`, by what they are called."""
    if not isinstance(of, dict):
        return []
    layers = of.get("layers")
    has_layers = isinstance(layers, list) and bool(layers) and isinstance(layers[0], dict) and "layer_id" in layers[0]
    found: list[tuple[str, Mapping[str, Any]]] = [(name, of)] if has_layers else []
    for key, each in of.items():
        found += _parts(key.replace("_", " "), each)
    return found


def _layer_lines(layers: list[Mapping[str, Any]], keys: list[str]) -> list[Block]:
    """A figure of every layer, beside what it would be by chance; one is chosen from all."""
    numbers = [key for key in keys if isinstance(layers[0].get(key), int | float) and not key.endswith(CHANCE)]
    if not numbers:
        return []

    def both(key: str) -> list[list[Any]]:
        return [[layer.get(name) for layer in layers] for name in (key, key + CHANCE)]

    x = [layer["layer_id"] for layer in layers]
    look = [("recorded", {"color": PALETTE[0]}), ("by chance", {"color": GUIDE, "dash": "dot"})]
    traces = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": values, "line": line}
        for (name, line), values in zip(look, both(numbers[0]), strict=True)
    ]
    shown = figure(traces, xaxis=axis("layer"), yaxis=axis("value of the figure chosen", rangemode="tozero"))
    options = ((key.replace("_", " "), {"y": both(key)}) for key in numbers)
    data = {"figure": shown, "choices": choices("figure", options)}
    return [Figure("By layer", "By chance: the same with all choices drawn independently.", data, height=360)]
