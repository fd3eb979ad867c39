"""Descents from many starts: what is minimised, step by step."""

from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.ticker import LogFormatter

from jaxmoe.report import style


def plot_starts(path: Path, history: Float[np.ndarray, "step start"], best: float, metric: str, title: str) -> None:
    """A relaxed metric of every start by step, and the exact `best` as a line. Names that end in _s are times."""
    style.check_not_empty("history", history)
    factor, unit = style.time_unit(best) if metric.endswith("_s") else (1.0, "")
    name = metric.removesuffix("_s").replace("_", " ")
    figure = style.new_figure(7.6, 4.8, title)
    axes = figure.subplots()
    step = np.arange(1, len(history) + 1)
    axes.plot(step, history * factor, color=style.PALETTE[0], linewidth=0.8, alpha=0.45)
    axes.plot([], [], color=style.PALETTE[0], label="a start, relaxed; constraints may be broken on the way")
    told = f"best, exact, constraints met: {best * factor:.4g} {unit}".strip()
    axes.axhline(best * factor, color=style.PALETTE[1], linestyle="--", linewidth=1.8, label=told)
    axes.set_yscale("log")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    style.dress(axes, "step", f"{name} [{unit}]" if unit else name, grid="both")
    style.legend_below(figure, [axes], columns=2)
    style.save(figure, path)
