"""Map of the best strategy of every case over two parameters."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from jaxmoe.report import style

MARGIN = colormaps["cividis"].with_extremes(bad=style.GUIDE)  # grey where no strategy comes next
MOST_TILES = 2500  # more different places than these are drawn as points


def plot_wins(
    path: Path,
    x: Float[np.ndarray, " case"],
    y: Float[np.ndarray, " case"],
    winner: Sequence[str],
    behind: Float[np.ndarray, " case"],
    labels: tuple[str, str],
    logarithmic: tuple[bool, bool],
    title: str,
) -> None:
    """Draw the winner of every case at its place: tiles where cases fill a grid, else points.

    Of several cases in one tile, the strategy that is best in most of them is drawn. Colours suit colour-blind
    readers; points differ in their markers and tiles in hatching as well. Where one strategy wins every case, the
    title names it, and colours tell how far the next one is behind it: `behind`, a part of 1, infinite without a next;
    the median of several cases in one tile.
    """
    style.check_not_empty("winner", winner)
    style.check_lengths("x", x, "winner", winner)
    style.check_lengths("y", y, "winner", winner)
    style.check_lengths("behind", behind, "winner", winner)
    names = sorted(set(winner), key=lambda name: -list(winner).count(name))
    alone = len(names) == 1
    figure = style.new_figure(7.6, 5.6, f"{title}: {names[0]} everywhere" if alone else title)
    axes = figure.subplots()
    columns, rows = np.unique(x), np.unique(y)
    places = {*zip(x.tolist(), y.tolist(), strict=True)}
    if len(places) == len(columns) * len(rows) <= MOST_TILES and min(len(columns), len(rows)) > 1:
        edges = [_edges(values, log) for values, log in zip((columns, rows), logarithmic, strict=True)]
        if alone:
            _margin(figure, axes.pcolormesh(*edges, 100 * _medians(columns, rows, x, y, behind), cmap=MARGIN))
        else:
            _tiles(axes, edges, _most_wins(columns, rows, x, y, winner, names), names)
    elif alone:
        lead = 100 * np.ma.masked_invalid(behind)
        _margin(figure, axes.scatter(x, y, s=16, c=lead, cmap=MARGIN, linewidths=0, plotnonfinite=True))
    else:
        _points(axes, x, y, winner, names)
    style.dress(axes, *labels, grid="both")
    axes.set(xscale="log" if logarithmic[0] else "linear", yscale="log" if logarithmic[1] else "linear")
    style.log_ticks(*(axis for axis, log in zip((axes.xaxis, axes.yaxis), logarithmic, strict=True) if log))
    if not alone:
        style.legend_below(figure, [axes])
    style.save(figure, path)


def _margin(figure: Figure, drawn: ScalarMappable) -> None:
    """The scale of colours that tell by how much the winner leads."""
    bar = figure.colorbar(drawn)
    bar.set_label("next strategy behind by, %", fontsize=style.LABEL_SIZE, color=style.INK)
    bar.ax.tick_params(labelsize=style.TICK_SIZE, colors=style.INK)


def _most_wins(
    columns: np.ndarray, rows: np.ndarray, x: np.ndarray, y: np.ndarray, winner: Sequence[str], names: list[str]
) -> np.ndarray:
    """Strategy that is best in most cases of every tile, as an index into `names`, [row, column]."""
    counts = np.zeros((len(rows), len(columns), len(names)), int)
    which = np.array([names.index(name) for name in winner])
    np.add.at(counts, (np.searchsorted(rows, y), np.searchsorted(columns, x), which), 1)
    return counts.argmax(axis=2)


def _medians(
    columns: np.ndarray, rows: np.ndarray, x: np.ndarray, y: np.ndarray, behind: np.ndarray
) -> np.ma.MaskedArray:
    """The median of the cases of every tile, [row, column]; masked where no case has a next strategy."""
    found = [[np.median(behind[(x == column) & (y == row)]) for column in columns] for row in rows]
    return np.ma.masked_invalid(found)


HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo", "||", "**")


def _tiles(
    axes: Axes,
    edges: Sequence[np.ndarray],
    winners: np.ndarray,
    names: list[str],
) -> None:
    colours = style.strategy_colours(names)
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
