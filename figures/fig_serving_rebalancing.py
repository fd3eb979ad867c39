"""Figure of EPLB's interval in the study `serving`: what users wait by how often experts are rebalanced.

python figures/fig_serving_rebalancing.py
"""

import numpy as np
from matplotlib.axes import Axes
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

METRICS = {
    "tpot_mean_ms": "per token, mean, ms",
    "tpot_p99_ms": "per token, P99, ms",
    "ttft_p99_ms": "first token, P99, ms",
}
POLICIES = ("balanced", "10 s", "1 min", "10 min", "never", "no copies")
MOVES = {"1": ("#0072B2", "o", "moves as quick as links"), "100": ("#D55E00", "^", "100 times slower")}
NONE = ("#000000", "s", "no moves")


def panel(axes: Axes, rows: Rows, metric: str) -> None:
    """Each policy's seeds as points, and their mean as a line of its width."""
    for place, policy in enumerate(POLICIES):
        own = select(rows, policy=policy)
        moves = any(float(row["moves"] or 0) for row in own)
        for slower in distinct(own, "slower"):
            colour, marker, label = MOVES[slower] if moves else NONE
            values = column(select(own, slower=slower), metric)
            at = place + (0.2 if slower == "100" else -0.2) * moves
            axes.plot(np.full(len(values), at), values, marker, color=colour, markersize=4, linestyle="", label=label)
            axes.hlines(values.mean(), at - 0.18, at + 0.18, color=colour, linewidth=1.2)
    axes.set_xticks(range(len(POLICIES)), POLICIES, rotation=30)
    axes.set_ylabel(METRICS[metric])
    axes.grid(axis="y", color="#eeeeee", zorder=0)


def draw(rows: Rows) -> None:
    """A row of panels for each rate, a pair of columns for each metric."""
    rates, drifts = distinct(rows, "rate_per_s"), distinct(rows, "drift_s")
    columns = [(drift, metric) for drift in drifts for metric in METRICS]
    figure = style.new_figure(
        2.9 * len(columns), 3.2 * len(rates) + 0.8, "EPLB's interval: what users wait by how often experts move"
    )
    grid = figure.subplots(len(rates), len(columns), squeeze=False)
    for line, rate in zip(grid, rates, strict=True):
        for axes, (drift, metric) in zip(line, columns, strict=True):
            panel(axes, select(rows, rate_per_s=rate, drift_s=drift), metric)
            axes.set_title(f"{rate} requests/s, drift {float(drift) / 60:g} min", fontsize=style.PANEL_SIZE)
            if metric.startswith("ttft"):
                axes.set_yscale("log")
                style.log_ticks(axes.yaxis, few=0)
    names = dict(zip(*grid[0, 0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=3, frameon=False)
    style.save(figure, images_folder(__doc__) / "serving_rebalancing.png")


if __name__ == "__main__":
    draw(read_table(STUDIES / "serving" / "rebalancing.csv"))
