"""Curves of traces: coverage, over time and by layer; and bars of statistics of several traces."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from jaxmoe.report import style

# How few pairs of experts make up how much: Fig. 4(c), 5(d) and 8(c) of "wafer_scale_moe_data_movement".


def plot_coverage(
    path: Path,
    curves: Mapping[str, np.ndarray],
    baselines: Mapping[str, np.ndarray],
    title: str,
    mark: float = 0.2,
    what: str = "expert pairs",
) -> None:
    """Share of all events on the most frequent pairs, by the part of the pairs they are.

    A curve [point] is cumulative and goes from 0, at no pair, in even steps to 1, at all of them. Its baseline of the
    same name, where there is one, is what it would be by chance, dashed. Values at the `mark` are in the legend.
    """
    style.check_not_empty("curves", curves)
    for name, curve in (*curves.items(), *baselines.items()):
        if len(curve) < 2:
            raise ValueError(f"{name} has {len(curve)} points, expected its value at no pair and at all pairs at least")
    colours = style.strategy_colours(curves)
    figure = style.new_figure(7.6, 5.2, title)
    axes = figure.subplots()
    axes.axvline(mark, color=style.GUIDE, linewidth=1.0, linestyle=":", zorder=1)
    for name, curve in curves.items():
        label = f"{name}: {_at(mark, curve):.0%} on the top {mark:.0%}"
        if name in baselines:
            label += f" (by chance {_at(mark, baselines[name]):.0%})"
            axes.plot(_parts(baselines[name]), baselines[name], color=colours[name], linewidth=1.2, linestyle="--")
        axes.plot(_parts(curve), curve, color=colours[name], linewidth=2.0, label=label)
        axes.plot(mark, _at(mark, curve), "o", color=colours[name], markersize=6, markeredgecolor="white")
    if baselines:
        axes.plot([], [], color=style.GUIDE, linewidth=1.2, linestyle="--", label="by chance")
    style.dress(axes, f"{what}, most frequent first", "cumulative share of events", grid="both")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="lower right", fontsize=style.TICK_SIZE, frameon=True, facecolor="white", edgecolor="none")
    style.save(figure, path)


def _parts(curve: np.ndarray) -> np.ndarray:
    return np.linspace(0, 1, len(curve))


def _at(part: float, curve: np.ndarray) -> float:
    return float(np.interp(part, _parts(curve), curve))


# Loads of nodes as tokens pass: Fig. 12 of "moentwine".

NAMED = 8  # lines that can be told apart


def plot_node_load(
    path: Path, tokens: np.ndarray, ratio: np.ndarray, title: str, sections: Mapping[str, float] | None = None
) -> None:
    """Load of every node over the mean of all, [time, node], by the tokens that have passed, [time].

    `sections` names what is served from a number of tokens on. Of many nodes, only the four of the highest mean have
    colours.
    """
    style.check_not_empty("tokens", tokens)
    style.check_lengths("ratio", ratio, "tokens", tokens)
    nodes = ratio.shape[1]
    figure = style.new_figure(10.0, 4.6, title)
    axes = figure.subplots()
    axes.axhline(1, color=style.INK, linewidth=1.4, linestyle=":", zorder=1, label="mean")
    named = range(nodes) if nodes <= NAMED else np.argsort(-ratio.mean(axis=0))[:4]
    if nodes > NAMED:
        axes.plot(tokens, ratio, color="#c9c9c9", linewidth=0.8)
    for node, colour in zip(named, style.PALETTE, strict=False):
        axes.plot(tokens, ratio[:, node], color=colour, linewidth=1.6, label=f"node {node}")
    style.dress(axes, "tokens passed", "load of the node over the mean")
    axes.set_ylim(0, float(ratio.max()) * 1.15 or 1.0)
    axes.margins(x=0.01)
    for name, start in (sections or {}).items():
        axes.axvline(start, color=style.INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            name,
            (start, 0.98),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=style.TICK_SIZE,
        )
    style.legend_below(figure, [axes], columns=6)
    style.save(figure, path)


STRONG, MODERATE = 0.7, 0.4  # bounds of Spearman's correlation, as the paper has them


# Measures of every layer beside what they would be by chance.
#
# After Fig. 6(e, f) of "wafer_scale_moe_data_movement" and Fig. 3(b) of "hd_moe".


def plot_stage_correlation(
    path: Path,
    layer_ids: np.ndarray,
    correlations: Mapping[str, np.ndarray],
    baselines: Mapping[str, np.ndarray],
    title: str,
    phases: str = "prefill and decode",
) -> None:
    """Spearman's correlation of two `phases`, [layer] by name, with the bounds of strong and moderate.

    A baseline of the same name is dashed: the same of two samples of one and the same thing, which is the most that
    can be expected.
    """
    figure, axes = _lines(layer_ids, correlations, baselines, title, "stretches dealt at random")
    style.dress(axes, "layer", f"Spearman's correlation of\n{phases}")
    lowest = min(0.0, *(float(np.nanmin(values)) for values in (*correlations.values(), *baselines.values())))
    axes.set_ylim(max(lowest * 1.1, -1.0), 1.02)
    for bound, name in ((STRONG, "strong"), (MODERATE, "moderate")):
        axes.axhline(bound, color=style.INK, linewidth=1.0, linestyle=":", zorder=1)
        axes.annotate(
            f"{name} from {bound}",
            (1.01, bound),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=style.TICK_SIZE,
        )
    style.legend_below(figure, [axes], columns=3)
    style.save(figure, path)


def plot_reuse(
    path: Path, layer_ids: np.ndarray, reuse: Mapping[str, np.ndarray], baselines: Mapping[str, np.ndarray], title: str
) -> None:
    """The mean part of a token's experts that the token before chose too, [layer] by name; chance is dashed."""
    figure, axes = _lines(layer_ids, reuse, baselines, title, "by chance")
    style.dress(axes, "layer", "experts shared with the token before")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    style.legend_below(figure, [axes], columns=3)
    style.save(figure, path)


def _lines(
    layer_ids: np.ndarray,
    series: Mapping[str, np.ndarray],
    baselines: Mapping[str, np.ndarray],
    title: str,
    baseline: str,
) -> tuple[Figure, Axes]:
    style.check_not_empty("layer_ids", layer_ids)
    style.check_not_empty("values by layer", series)
    for name, values in (*series.items(), *baselines.items()):
        style.check_lengths(name, values, "layer_ids", layer_ids)
    figure = style.new_figure(float(np.clip(6.5 + 0.07 * len(layer_ids), 7.0, 13.0)), 4.6, title)
    axes = figure.subplots()
    colours, markers = style.strategy_colours(series), style.strategy_markers(series)
    for name, values in series.items():
        style.marked_line(axes, layer_ids, values, name, colours[name], markers[name], width=1.6)
        if name in baselines:
            axes.plot(
                layer_ids,
                baselines[name],
                color=colours[name],
                marker=markers[name],
                markersize=3,
                linewidth=1.2,
                linestyle="--",
            )
    if baselines:
        axes.plot([], [], color=style.GUIDE, linewidth=1.2, linestyle="--", label=baseline)
    style.whole_number_ticks(axes, layer_ids)
    axes.margins(x=0.02 if len(layer_ids) > 1 else 0.5)
    return figure, axes


# A real trace beside made-up ones, statistic by statistic.

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
