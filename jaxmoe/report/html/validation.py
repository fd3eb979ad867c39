"""The model against the event simulator: what `validate` found, from its `summary.json`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.report.html.blocks import Block, Cell, Figure, TableBlock, axis, figure, seconds_unit
from jaxmoe.report.style import GUIDE, strategy_colours

STAGES = ("dispatch", "compute", "combine", "total")


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
    return {"Model against simulator": [_table(trials), agreement_figure(points, "Every layer and batch, in total.")]}


def _table(trials: Mapping[tuple[str, int], Mapping[str, Any]]) -> TableBlock:
    """A line for each strategy and size of batch: means of both, and how they agree."""
    means = {key: trial["mean"] for key, trial in trials.items()}
    factor, unit = seconds_unit(mean["simulated"]["total_s"] for mean in means.values())
    rows: list[list[Cell]] = []
    for (name, tokens), mean in means.items():
        times = [mean[of][f"{stage}_s"] * factor for stage in STAGES for of in ("model", "simulated")]
        agreed = trials[name, tokens]["agreement"]["total"]
        rows.append([name, tokens, *times, agreed["r2"], agreed["mean_abs_error_percent"]])
    columns = [f"{stage}, {of}" for stage in STAGES for of in ("model", "simulated")]
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
