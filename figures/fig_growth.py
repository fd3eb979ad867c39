"""Growth of time and memory with nodes, experts and tokens, of the benchmarks: python figures/fig_growth.py"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from tables import STUDIES, column, images_folder, read_table, select

from jaxmoe.report import style

TABLE = STUDIES / "benchmarks" / "growth.csv"
EVALUATIONS = {
    "exact_us": "exact",
    "gradient_us": "relaxed, with gradient",
    "congested_us": "exact, homes and trees chosen by congestion",
}
AXES = {"nodes": "nodes of a mesh", "experts": "experts, of which a token chooses 4", "tokens": "tokens of a batch"}
MOST_MS, MOST_GIB = (0.2, 2e4), (0.1, 20.0)  # with room above for the legends
LARGEST = 4  # sizes of an axis that tell how it grows on


def exponent(value: np.ndarray, seconds: np.ndarray) -> float:
    """The power of the size with which the time of the largest sizes grows."""
    return float(np.polyfit(np.log(value[-LARGEST:]), np.log(seconds[-LARGEST:]), 1)[0])


def draw_growth(path: Path) -> None:
    """Processor time of one evaluation of a plan above, memory below, by each size alone."""
    rows = read_table(TABLE)
    told = (
        "A lone plan on one batch: time and memory as one size grows; others stay at 64 nodes, 64 experts, 128 tokens"
    )
    figure = style.new_figure(14, 8, told)
    panels = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    for (axis, label), (above, below) in zip(AXES.items(), panels.T, strict=True):
        sizes = select(rows, axis=axis)
        value = column(sizes, "value")
        for (name, told), colour in zip(EVALUATIONS.items(), style.PALETTE, strict=False):
            time = column(sizes, name)
            power = f"{told}, power {exponent(value, time):.1f}"
            above.plot(value, time / 1e3, marker="o", color=colour, label=power)
        below.plot(value, column(sizes, "evaluation_GiB"), marker="o", color=style.PALETTE[0], label="these three")
        if axis == "nodes":
            memory = column(sizes, "command_GiB")
            below.plot(value, memory, marker="s", color=style.PALETTE[1], label="whole command, a layer")
        _dress(above, "", "processor time [ms]", MOST_MS)
        _dress(below, label, "memory [GiB]", MOST_GIB)
    style.save(figure, path)


def _dress(axes: Axes, xlabel: str, ylabel: str, most: tuple[float, float]) -> None:
    style.dress(axes, xlabel, ylabel, grid="both")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(*most)
    style.log_ticks(axes.yaxis)
    axes.legend(fontsize="small", loc="upper left")


if __name__ == "__main__":
    draw_growth(images_folder(__doc__) / "growth.png")
