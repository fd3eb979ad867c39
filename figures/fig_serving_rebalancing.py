"""Figure of EPLB's interval in the study `serving`: how much longer users wait than without rebalancing.

python figures/fig_serving_rebalancing.py
"""

import numpy as np
from matplotlib.axes import Axes
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

METRICS = {"tpot_mean_ms": "per token, mean", "tpot_p99_ms": "per token, P99", "ttft_p99_ms": "first token, P99"}
POLICIES = ("balanced", "10 s", "1 min", "10 min")
MOVES = {"1": ("#0072B2", "o", "moves as quick as links"), "100": ("#D55E00", "^", "moves 100 times slower")}
BOUND = ("#000000", "s", "bound")


def panel(axes: Axes, rows: Rows, metric: str) -> None:
    """Each seed over its own row without rebalancing as a point, the mean of seeds as a line."""
    never = column(select(rows, policy="never"), metric)
    axes.axhline(0, color=style.GUIDE, linewidth=1.0)
    for place, policy in enumerate(POLICIES):
        own = select(rows, policy=policy)
        for side, slower in enumerate(distinct(own, "slower")):
            colour, marker, label = MOVES.get(slower, BOUND)
            more = 100 * (column(select(own, slower=slower), metric) / never - 1)
            at = place + 0.3 * side - 0.15 * (slower in MOVES)
            axes.plot(np.full(len(more), at), more, marker, color=colour, markersize=4, linestyle="", label=label)
            axes.hlines(more.mean(), at - 0.14, at + 0.14, color=colour, linewidth=1.2)
    axes.set_xticks(range(len(POLICIES)), POLICIES)
    axes.set_ylabel("more than never, %")
    axes.grid(axis="y", color="#eeeeee", zorder=0)


def draw(rows: Rows) -> None:
    """A row of panels for each drift and rate."""
    pairs = [(drift, rate) for drift in distinct(rows, "drift_s")[::-1] for rate in distinct(rows, "rate_per_s")]
    cases = [pair for pair in pairs if select(rows, drift_s=pair[0], rate_per_s=pair[1])]
    figure = style.new_figure(11.0, 2.7 * len(cases) + 0.9, "EPLB's interval: waits against those without rebalancing")
    grid = figure.subplots(len(cases), len(METRICS), squeeze=False)
    for line, (drift, rate) in zip(grid, cases, strict=True):
        own = select(rows, drift_s=drift, rate_per_s=rate)
        for axes, (metric, name) in zip(line, METRICS.items(), strict=True):
            panel(axes, own, metric)
            axes.set_title(f"{name}\n{rate} requests/s, drift {float(drift) / 60:g} min", fontsize=style.PANEL_SIZE)
    style.legend_below(figure, grid.ravel())
    style.save(figure, images_folder(__doc__) / "serving_rebalancing.png")


if __name__ == "__main__":
    draw(read_table(STUDIES / "serving" / "rebalancing.csv"))
