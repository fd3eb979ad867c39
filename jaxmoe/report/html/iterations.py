"""Systems over iterations: what `simulate` found, from its `summary.json`."""

from collections.abc import Mapping
from typing import Any

from jaxmoe.report.html.blocks import Block, Cell, Figure, Note, TableBlock, axis, figure, seconds_unit, stage_colours
from jaxmoe.report.style import strategy_colours

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
        times = [run["mean"][f"{stage}_s"] * factor for stage in (*stages, "total")]
        speedup = slow / sum(run["total_s"])
        rows.append([name, *times, run["p95_total_s"] * factor, speedup, *(run[key] for key in own)])
    table = TableBlock(
        f"Mean over {summary['iterations']} iterations, all layers together, times in {unit}",
        ["system", *stages, "total", "p95", f"speed-up over {baseline}", *(key.replace("_", " ") for key in own)],
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
            _lines(runs, replayed["iterations"], factor, unit),
            _stages(runs, stages, factor, unit),
        ]
    }


def _lines(runs: Mapping[str, Any], replayed: list[int], factor: float, unit: str) -> Figure:
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


def _stages(runs: Mapping[str, Any], stages: list[str], factor: float, unit: str) -> Figure:
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
