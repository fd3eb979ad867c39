"""A real trace beside made-up ones, statistic by statistic."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxmoe.plotting import style

BAR = 0.8  # of the height of a statistic


def plot_trace_comparison(
    path: Path, statistics: Sequence[str], traces: Mapping[str, Sequence[float] | np.ndarray], title: str
) -> None:
    """Statistics by name, and their values [statistic] of each trace, the real one first.

    Every statistic has its own scale, from 0 to its largest value; the numbers are at the ends of the bars.
    """
    style.check_not_empty("statistics", statistics)
    style.check_not_empty("traces", traces)
    for name, values in traces.items():
        style.check_lengths(name, values, "statistics", statistics)
    values = np.array([np.asarray(some, float) for some in traces.values()])  # [trace, statistic]
    largest = np.abs(values).max(axis=0)
    length = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)
    thick = BAR / len(traces)
    figure = style.new_figure(8.4, 1.5 + (0.2 * len(traces) + 0.16) * len(statistics), title)
    axes = figure.subplots()
    for index, (name, colour) in enumerate(style.strategy_colours(traces).items()):
        row = np.arange(len(statistics)) + (index - (len(traces) - 1) / 2) * thick
        axes.barh(row, length[index], height=thick * 0.9, color=colour, label=name)
        for y, end, value in zip(row, length[index], values[index], strict=True):
            axes.annotate(
                style.digits(value),
                (max(end, 0), y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=style.TICK_SIZE,
            )
    style.dress(axes, "", "", grid="x")
    axes.set_yticks(range(len(statistics)), list(statistics))
    axes.set_ylim(len(statistics) - 0.5, -0.5)  # the first statistic on top
    axes.set_xlim(min(0.0, float(length.min())), 1.1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    style.legend_below(figure, [axes])
    style.save(figure, path)
