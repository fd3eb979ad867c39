"""How many of the chosen experts were predicted: Fig. 3(d) of "hd_moe"."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.ticker import PercentFormatter

from jaxmoe.plotting import style

LIMITS = ("random", "perfect")


def plot_recall(path: Path, sizes: np.ndarray, recall: Mapping[str, np.ndarray], top_k: int, title: str) -> None:
    """Share of chosen experts among the n ranked highest, [n] by name of the predictor, over `sizes` n, [n].

    Random and perfect prediction, where given, are dashed; a dotted line is at `top_k`, what a token chooses.
    """
    style.check_not_empty("sizes", sizes)
    style.check_not_empty("recall", recall)
    for name, values in recall.items():
        style.check_lengths(name, values, "sizes", sizes)
    predictors = [name for name in recall if name not in LIMITS]
    colours, markers = style.strategy_colours(predictors), style.strategy_markers(predictors)
    figure = style.new_figure(8.0, 5.0, title)
    axes = figure.subplots()
    axes.axvline(top_k, color=style.GUIDE, linewidth=1.0, linestyle=":", zorder=1)
    axes.annotate(f"chosen: {top_k}", (top_k, 1.02), (4, 0), textcoords="offset points", fontsize=style.TICK_SIZE)
    for name in sorted(recall, key=lambda name: -float(np.mean(recall[name]))):
        if name in LIMITS:
            axes.plot(sizes, recall[name], color=style.INK, linewidth=1.2, linestyle="--")
            axes.annotate(
                name, (sizes[-1], recall[name][-1]), (4, 0), textcoords="offset points", fontsize=style.TICK_SIZE
            )
        else:
            axes.plot(
                sizes,
                recall[name],
                label=name,
                color=colours[name],
                marker=markers[name],
                markersize=6,
                markeredgecolor="white",
                markeredgewidth=0.4,
                linewidth=1.6,
            )
    style.dress(axes, "experts predicted for a token and layer, n", "recall of the chosen experts", grid="both")
    style.whole_number_ticks(axes, np.asarray(sizes))
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="upper left", bbox_to_anchor=(1.08, 1.0), fontsize=style.TICK_SIZE, frameon=False)
    style.save(figure, path)
