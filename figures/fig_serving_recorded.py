"""Figure of recorded runs in the study `serving`: what users waited against what kernels tell, request by request.

python figures/fig_serving_recorded.py
"""

import numpy as np
from matplotlib.axes import Axes
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

METRICS = {"ttft": "time to first token", "tpot": "time per output token"}
SHOWN = {"ttft": (1.0, "s"), "tpot": (1e3, "ms")}
MEASURED, TOLD = ("#000000", "-"), ("#D55E00", "--")
NAMES = {"rtxpro6000_qwen3-30b-a3b": "Qwen3-30B-A3B, 2 ranks", "rtxpro6000_qwen3-32b": "Qwen3-32B, 2 GPUs a layer"}


def times_of(rows: Rows, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Measured and told times of each request, in the unit that is shown."""
    factor, _ = SHOWN[metric]
    return column(rows, f"{metric}_measured_s") * factor, column(rows, f"{metric}_told_s") * factor


def distribution(axes: Axes, rows: Rows, metric: str) -> None:
    """Part of the requests that wait no longer."""
    for times, (colour, line), label in zip(
        times_of(rows, metric), (MEASURED, TOLD), ("measured", "told"), strict=True
    ):
        part = np.arange(1, len(times) + 1) / len(times)
        axes.step(np.sort(times), 100 * part, where="post", color=colour, linestyle=line, linewidth=1.6, label=label)
    axes.set(ylim=(0, 100), xlabel=f"{METRICS[metric]}, {SHOWN[metric][1]}", ylabel="requests, %")


def scatter(axes: Axes, rows: Rows, metric: str) -> None:
    """Told over measured, a point for each request."""
    measured, told = times_of(rows, metric)
    axes.scatter(measured, told, s=9, color=style.PALETTE[0], alpha=0.6, linewidths=0)
    ends = min(measured.min(), told.min()), max(measured.max(), told.max())
    axes.plot(ends, ends, color=style.GUIDE, linewidth=1.0)
    axes.set(xlabel=f"measured, {SHOWN[metric][1]}", ylabel=f"told, {SHOWN[metric][1]}")


def draw(rows: Rows) -> None:
    """A row of panels for each run: distributions, then requests one by one."""
    runs = distinct(rows, "run")
    figure = style.new_figure(
        14.0, 3.6 * len(runs) + 0.6, "Recorded runs of vLLM: what users waited, and what kernels tell"
    )
    grid = figure.subplots(len(runs), 4, squeeze=False)
    for line, run in zip(grid, runs, strict=True):
        own = select(rows, run=run)
        for place, (metric, name) in enumerate(METRICS.items()):
            for axes, panel, what in (
                (line[place], distribution, "distribution"),
                (line[2 + place], scatter, "requests"),
            ):
                panel(axes, own, metric)
                axes.set_title(f"{NAMES.get(run, run)}\n{name}, {what}", fontsize=style.PANEL_SIZE)
                axes.grid(color="#eeeeee", zorder=0)
                if metric == "ttft":
                    axes.set_xscale("log")
                    axes.set_yscale("log" if what == "requests" else "linear")
                    style.log_ticks(*([axes.xaxis, axes.yaxis] if what == "requests" else [axes.xaxis]), few=0)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    style.save(figure, images_folder(__doc__) / "serving_recorded.png")


if __name__ == "__main__":
    draw(read_table(STUDIES / "serving" / "requests.csv"))
