"""Figure of FSE-DP's buffering under load in the study `serving`: what waiting costs a user, and what it gives.

python figures/fig_serving_buffering.py
"""

import numpy as np
from matplotlib.axes import Axes
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

COLOURS = ("#0072B2", "#D55E00", "#009E73")
METRICS = {"tpot_mean_ms": "time per token", "tpot_p99_ms": "time per token, P99", "output_tokens_per_s": "tokens/s"}


def more(rows: Rows, metric: str, base: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Slacks, and what each adds in % to a metric of `base` without waits, a row for each seed."""
    every = [(select(rows, seed=seed), select(base, seed=seed)) for seed in distinct(rows, "seed")]
    added = [100 * (column(own, metric) / column(other, metric)[0] - 1) for own, other in every]
    return 100 * column(every[0][0], "slack"), np.stack(added)


def panel(axes: Axes, rows: Rows, metric: str) -> None:
    """A line for each rate or number of places: means of seeds, their range as a band.

    With room in a step for all users, it is beside the same users without: what room alone gives is at slack 0.
    """
    for come, dash in {"at random": "-", "together": "-", "apart": "--", "together, room": ":"}.items():
        own = select(rows, come=come)
        for colour, number in zip(COLOURS, distinct(own, "number"), strict=False):
            base = select(rows, come=come.removesuffix(", room"), number=number)
            slacks, added = more(select(own, number=number), metric, base)
            room = 2 if come.endswith("room") else 1
            users = f"{room * float(number):g} tokens a step, {come.removesuffix(', room')}"
            told = f"{float(number):g} requests/s" if come == "at random" else users
            axes.plot(slacks, added.mean(axis=0), dash, color=colour, marker="o", markersize=4, label=told)
            axes.fill_between(slacks, added.min(axis=0), added.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.axhline(0, color=style.GUIDE, linewidth=1.0)
    axes.set_xlabel("slack, %")
    axes.set_ylabel("more than without waits, %")


def draw(rows: Rows) -> None:
    """Requests at random: time per token, and its P99, and tokens/s; then tokens/s of users."""
    random, users = select(rows, come="at random"), [row for row in rows if row["come"] != "at random"]
    shown = [*((random, metric, f"at random: {told}") for metric, told in METRICS.items())]
    shown.append((users, "output_tokens_per_s", "users: tokens/s"))
    figure = style.new_figure(13.0, 4.2, "FSE-DP's buffering under load")
    grid = figure.subplots(1, len(shown))
    for axes, (own, metric, told) in zip(grid, shown, strict=True):
        panel(axes, own, metric)
        axes.set_title(told, fontsize=style.PANEL_SIZE)
        axes.legend(fontsize="x-small", handlelength=3.5)
    axes.set_ylim(top=1.7 * axes.get_ylim()[1])  # room for the legend of the last, which has most lines
    style.save(figure, images_folder(__doc__) / "serving_buffering.png")


if __name__ == "__main__":
    draw(read_table(STUDIES / "serving" / "buffering.csv"))
