"""How experts are activated, Fig. 3 of "hd_moe", and how well predictors know what will be."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jaxmoe.report import style
from jaxmoe.report.trace_heatmaps import NOTHING

SPAN = 0.86  # of an expert's place, the bars of all layers together


def plot_activation(
    path: Path,
    layer_ids: np.ndarray,
    frequency: Mapping[str, np.ndarray],
    overlap: Mapping[str, np.ndarray],
    affinity: np.ndarray,
    accuracy: Mapping[str, np.ndarray],
    title: str,
) -> None:
    """Draw Fig. 3 of one model.

    (a) `frequency` [expert] by name of the layer, the part of tokens that choose the expert; (b) `overlap` [layer] by
    name, the part of a token's experts that its neighbour chooses too; (c) `affinity` [expert, expert], the
    probability of the column's expert given the row's; (d) `accuracy` [layer] by predictor, the part of the chosen
    experts that were predicted. Where no predictor is given, (d) is left out.
    """
    style.check_not_empty("layer_ids", layer_ids)
    style.check_not_empty("frequency", frequency)
    experts = len(next(iter(frequency.values())))
    for name, values in frequency.items():
        style.check_lengths(name, values, "the first layer", next(iter(frequency.values())))
    for name, values in (*overlap.items(), *accuracy.items()):
        style.check_lengths(name, values, "layer_ids", layer_ids)
    if np.shape(affinity) != (experts, experts):
        raise ValueError(f"affinity has shape {np.shape(affinity)}, but there are {experts} experts")
    figure = style.new_figure(14.0, 8.6, title)
    panels = figure.subplots(2, 2).ravel()
    _draw_frequency(panels[0], frequency)
    _draw_lines(panels[1], layer_ids, overlap)
    style.dress(panels[1], "layer", "experts shared with the token before")
    _draw_affinity(panels[2], affinity)
    if accuracy:
        _draw_lines(panels[3], layer_ids, accuracy)
        style.dress(panels[3], "layer", "chosen experts predicted")
    else:
        panels[3].set_visible(False)
    names = ("how often experts are chosen", "neighbouring tokens", "experts chosen together", "accuracy of prediction")
    for letter, axes, name in zip("abcd", panels, names, strict=True):
        axes.set_title(f"({letter}) {name}", fontsize=style.PANEL_SIZE, color=style.INK)
    style.save(figure, path)


def _draw_frequency(axes: Axes, frequency: Mapping[str, np.ndarray]) -> None:
    thick = SPAN / len(frequency)
    for i, (name, colour) in enumerate(style.strategy_colours(frequency).items()):
        values = np.asarray(frequency[name])
        place = np.arange(len(values)) + (i - (len(frequency) - 1) / 2) * thick
        axes.bar(place, values, width=thick, color=colour, label=name)
    axes.axhline(values.mean(), color=style.INK, linewidth=1.2, linestyle="--", label="all alike")
    style.dress(axes, "expert", "tokens that choose it")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.margins(x=0.01)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend_above(axes)


def _draw_lines(axes: Axes, layer_ids: np.ndarray, series: Mapping[str, np.ndarray]) -> None:
    colours, markers = style.strategy_colours(series), style.strategy_markers(series)
    for name, values in series.items():
        style.marked_line(axes, layer_ids, values, name, colours[name], markers[name], 5.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend_above(axes)


def _draw_affinity(axes: Axes, affinity: np.ndarray) -> None:
    # An expert is always chosen with itself, which would hide all the rest.
    apart = np.where(np.eye(len(affinity), dtype=bool), np.nan, affinity)
    shown = axes.imshow(apart, cmap=colormaps["inferno"].with_extremes(bad=NOTHING), vmin=0, interpolation="nearest")
    style.dress(axes, "expert j", "expert i")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    bar = axes.figure.colorbar(shown, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label("P(j chosen | i chosen)", fontsize=style.LABEL_SIZE)
    bar.ax.tick_params(labelsize=style.TICK_SIZE)


def _legend_above(axes: Axes) -> None:
    """Inside, over data that are given some more room."""
    axes.set_ylim(0, axes.get_ylim()[1] * 1.18)
    axes.legend(loc="upper center", ncols=4, fontsize=style.TICK_SIZE, frameon=False, columnspacing=1.2)


# How many of the chosen experts were predicted: Fig. 3(d) of "hd_moe".

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
            style.marked_line(axes, sizes, recall[name], name, colours[name], markers[name], width=1.6)
    style.dress(axes, "experts predicted for a token and layer, n", "recall of the chosen experts", grid="both")
    style.whole_number_ticks(axes, np.asarray(sizes))
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="upper left", bbox_to_anchor=(1.08, 1.0), fontsize=style.TICK_SIZE, frameon=False)
    style.save(figure, path)
