"""Figure of balancers of experts under load in the study `serving`: highest rates and tails over skew and drift.

python figures/fig_serving_balancers.py
"""

import numpy as np
from matplotlib.axes import Axes
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

METRICS = {
    "highest_per_s": "highest rate within limits",
    "ttft_p99_ms": "first token, P99",
    "tpot_p99_ms": "per token, P99",
}
BASE = "eplb, static"
COLOURS = ("#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7")


def panel(axes: Axes, rows: Rows, metric: str) -> None:
    """Each seed over its own static placement as a point, the mean of seeds as a line, for each skew and drift."""
    cases = [(skew, drift) for skew in distinct(rows, "skew") for drift in distinct(rows, "drift_s")]
    others = [name for name in distinct(rows, "balancer") if name != BASE]
    for place, (skew, drift) in enumerate(cases):
        own = select(rows, skew=skew, drift_s=drift)
        base = column(select(own, balancer=BASE), metric)
        for side, name in enumerate(others):
            for slower in distinct(select(own, balancer=name), "slower"):
                more = 100 * (column(select(own, balancer=name, slower=slower), metric) / base - 1)
                at = place + 0.16 * (side - len(others) / 2) + 0.06 * (slower != "1")
                marker, told = ("o", name) if slower == "1" else ("^", "the same, moves 100 times slower")
                axes.plot(
                    np.full(len(more), at), more, marker, color=COLOURS[side], markersize=4, linestyle="", label=told
                )
                axes.hlines(more.mean(), at - 0.05, at + 0.05, color=COLOURS[side], linewidth=1.2)
    axes.axhline(0, color=style.GUIDE, linewidth=1.0)
    axes.set_xticks(range(len(cases)), [f"{skew}\n{float(drift) / 60:g} min" for skew, drift in cases])
    axes.set_xlabel("skew and drift of subjects")
    axes.set_yscale("symlog", linthresh=10.0)
    ticks = [tick for tick in (-10, -5, 0, 5, 10, 20, 50, 100) if tick < 20 or metric != "highest_per_s"]
    axes.set_yticks(ticks, [f"{tick}" for tick in ticks], minor=False)
    axes.set_ylabel(f"more than {BASE}, %")


def draw(rows: Rows) -> None:
    """A panel for each measure; waits are those at the highest of the rates."""
    rate = max(distinct(rows, "rate_per_s"), key=float)
    figure = style.new_figure(11.0, 4.6, "Balancers of experts under load")
    grid = figure.subplots(1, len(METRICS), squeeze=False)
    for axes, (metric, name) in zip(grid.ravel(), METRICS.items(), strict=True):
        panel(axes, select(rows, rate_per_s=rate), metric)
        title = name if metric == "highest_per_s" else f"{name}, {rate} requests/s"
        axes.set_title(title, fontsize=style.PANEL_SIZE)
    style.legend_below(figure, grid.ravel())
    style.save(figure, images_folder(__doc__) / "serving_balancers.png")


if __name__ == "__main__":
    draw(read_table(STUDIES / "serving" / "balancers.csv"))
