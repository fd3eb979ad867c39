"""Map of the best strategy of every case over two parameters."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from jaxmoe.report import style

MOST_TILES = 2500  # more different places than these are drawn as points


def plot_wins(
    path: Path,
    x: Float[np.ndarray, " case"],
    y: Float[np.ndarray, " case"],
    winner: Sequence[str],
    labels: tuple[str, str],
    logarithmic: tuple[bool, bool],
    title: str,
) -> None:
    """Draw the winner of every case at its place: tiles where cases fill a grid, else points.

    Of several cases in one tile, the strategy that is best in most of them is drawn. Colours suit colour-blind
    readers; points differ in their markers and tiles in hatching as well.
    """
    style.check_not_empty("winner", winner)
    style.check_lengths("x", x, "winner", winner)
    style.check_lengths("y", y, "winner", winner)
    figure = style.new_figure(7.6, 5.6, title)
    axes = figure.subplots()
    names = sorted(set(winner), key=lambda name: -list(winner).count(name))
    columns, rows = np.unique(x), np.unique(y)
    places = {*zip(x.tolist(), y.tolist(), strict=True)}
    if len(places) == len(columns) * len(rows) <= MOST_TILES and min(len(columns), len(rows)) > 1:
        _tiles(axes, columns, rows, _most_wins(columns, rows, x, y, winner, names), names, logarithmic)
    else:
        _points(axes, x, y, winner, names)
    style.dress(axes, *labels, grid="both")
    axes.set(xscale="log" if logarithmic[0] else "linear", yscale="log" if logarithmic[1] else "linear")
    style.log_ticks(*(axis for axis, log in zip((axes.xaxis, axes.yaxis), logarithmic, strict=True) if log))
    style.legend_below(figure, [axes])
    style.save(figure, path)


def _most_wins(
    columns: np.ndarray, rows: np.ndarray, x: np.ndarray, y: np.ndarray, winner: Sequence[str], names: list[str]
) -> np.ndarray:
    """Strategy that is best in most cases of every tile, as an index into `names`, [row, column]."""
    counts = np.zeros((len(rows), len(columns), len(names)), int)
    which = np.array([names.index(name) for name in winner])
    np.add.at(counts, (np.searchsorted(rows, y), np.searchsorted(columns, x), which), 1)
    return counts.argmax(axis=2)


HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo", "||", "**")


def _tiles(
    axes: Axes,
    columns: np.ndarray,
    rows: np.ndarray,
    winners: np.ndarray,
    names: list[str],
    logarithmic: tuple[bool, bool],
) -> None:
    colours = style.strategy_colours(names)
    edges = [_edges(values, log) for values, log in zip((columns, rows), logarithmic, strict=True)]
    for index, name in enumerate(names):
        there = np.ma.masked_where(winners != index, np.ones(winners.shape))
        hatch = HATCHES[index % len(HATCHES)]
        axes.pcolor(*edges, there, cmap=ListedColormap([colours[name]]), hatch=hatch, edgecolor="white", linewidth=0)
        axes.fill([], [], facecolor=colours[name], hatch=hatch, edgecolor="white", linewidth=0, label=name)


def _edges(values: np.ndarray, logarithmic: bool) -> np.ndarray:
    """Borders half way between neighbours."""
    values = np.log(values) if logarithmic else values
    middle = (values[1:] + values[:-1]) / 2
    edges = np.concatenate([[2 * values[0] - middle[0]], middle, [2 * values[-1] - middle[-1]]])
    return np.exp(edges) if logarithmic else edges


def _points(axes: Axes, x: np.ndarray, y: np.ndarray, winner: Sequence[str], names: list[str]) -> None:
    colours, markers = style.strategy_colours(names), style.strategy_markers(names)
    for name in names:
        own = np.array([each == name for each in winner])
        axes.scatter(x[own], y[own], s=16, color=colours[name], marker=markers[name], linewidths=0, label=name)
