"""Grids of panels that several figures draw: bars or dots by group and series, and points with lines through 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from jaxmoe.report import style

SPAN = 0.82  # of a group's place, all its series together
WIDEST = 16.0  # inches
ENTRY = 2.2  # inches of an entry of the legend
LINEAR_BELOW = 0.1  # on the axis that is logarithmic but has a zero


@dataclass(frozen=True)
class GroupPanel:
    """Values of every series in every group: [group] for bars, [group, repeat] for dots. NaN is not drawn.

    `reference` is a dashed line's value and name, `notes` [group] are written above the bars of a series.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, np.ndarray]
    ylabel: str
    xlabel: str = ""
    reference: tuple[float, str] | None = None
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scale: Literal["linear", "log", "symlog"] = "linear"


def plot_bar_panels(path: Path, panels: Sequence[GroupPanel], title: str, columns: int = 3) -> None:
    """Bars side by side within each group. Panels of a row share their y axis, and all share one legend."""
    _plot(path, panels, title, columns, 1, _draw_bars)


def plot_dot_panels(path: Path, panels: Sequence[GroupPanel], title: str, columns: int = 3) -> None:
    """A dot for every repeat, and a line at the median of each group and series."""
    _plot(path, panels, title, columns, 2, _draw_dots)


def _plot(
    path: Path,
    panels: Sequence[GroupPanel],
    title: str,
    columns: int,
    axes_of_values: int,
    draw: Callable[[Axes, GroupPanel, Mapping[str, str]], None],
) -> None:
    style.check_not_empty("panels", panels)
    for panel in panels:
        _check(panel, axes_of_values)
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    width = float(np.clip(columns * _panel_width(panels), 6.4, WIDEST))
    figure = style.new_figure(width, 2.75 * rows + 1.1, title)
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey="row").ravel())
    names = [name for panel in panels for name in panel.series]
    colours = (style.stage_colours if style.are_stages(names) else style.strategy_colours)(names)
    for place, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        draw(axes, panel, colours)
        last_of_column = place + columns >= len(panels)
        _frame(axes, panel, panel.xlabel if last_of_column else "", panel.ylabel if place % columns == 0 else "")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    shown = grid[: len(panels)]
    if len({label for axes in shown for label in axes.get_legend_handles_labels()[1]}) > 1:
        style.legend_below(figure, shown, columns=int(width // ENTRY))
    style.save(figure, path)


def _check(panel: GroupPanel, axes_of_values: int) -> None:
    style.check_not_empty(f"groups of {panel.title!r}", panel.groups)
    style.check_not_empty(f"series of {panel.title!r}", panel.series)
    for name, values in panel.series.items():
        style.check_lengths(name, values, "groups", panel.groups)
        if np.ndim(values) != axes_of_values:
            expected = "[group]" if axes_of_values == 1 else "[group, repeat]"
            raise ValueError(f"{name} of {panel.title!r} has shape {np.shape(values)}, expected {expected}")
    for name, notes in panel.notes.items():
        if name not in panel.series:
            raise ValueError(f"notes of {panel.title!r} are for {name!r}, which is none of {', '.join(panel.series)}")
        style.check_lengths(f"notes of {name}", notes, "groups", panel.groups)


def _panel_width(panels: Sequence[GroupPanel]) -> float:
    """Inches that the fullest panel wants."""
    characters = max(len(line) for panel in panels for group in panel.groups for line in group.split("\n"))
    series = max(len(panel.series) for panel in panels)
    groups = max(len(panel.groups) for panel in panels)
    return 0.9 + groups * max(0.16 * series, 0.085 * characters + 0.1)


def _places(panel: GroupPanel) -> dict[str, np.ndarray]:
    """Where each series stands in every group, [group]."""
    shift = SPAN / len(panel.series) * (np.arange(len(panel.series)) - (len(panel.series) - 1) / 2)
    return {name: np.arange(len(panel.groups)) + shift[i] for i, name in enumerate(panel.series)}


def _draw_bars(axes: Axes, panel: GroupPanel, colours: Mapping[str, str]) -> None:
    thick = SPAN / len(panel.series)
    for name, place in _places(panel).items():
        values = np.asarray(panel.series[name], float)
        axes.bar(place, values, width=thick * 0.94, color=colours[name], label=name, zorder=2)
        for x, value, note in zip(place, values, panel.notes.get(name, ()), strict=False):
            if np.isfinite(value):
                axes.annotate(
                    note,
                    (x, value),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8.5,
                    color=style.INK,
                )
    if panel.scale == "linear":
        axes.margins(y=0.14 if panel.notes else 0.06)


def _draw_dots(axes: Axes, panel: GroupPanel, colours: Mapping[str, str]) -> None:
    thick = SPAN / len(panel.series)
    for name, place in _places(panel).items():
        values = np.asarray(panel.series[name], float)
        aside = np.linspace(-0.3, 0.3, values.shape[1]) * thick if values.shape[1] > 1 else np.zeros(1)
        x = place[:, None] + aside
        axes.scatter(
            x, values, s=26, color=colours[name], alpha=0.7, edgecolors="white", linewidths=0.4, label=name, zorder=3
        )
        known = np.isfinite(values).any(axis=1)
        axes.hlines(
            np.nanmedian(values[known], axis=1),
            place[known] - 0.42 * thick,
            place[known] + 0.42 * thick,
            color=style.INK,
            linewidth=1.8,
            label="median",
            zorder=2,
        )


def _frame(axes: Axes, panel: GroupPanel, xlabel: str, ylabel: str) -> None:
    style.dress(axes, xlabel, ylabel)
    axes.set_title(panel.title, fontsize=style.PANEL_SIZE, color=style.INK)
    if panel.scale != "linear":
        _make_logarithmic(axes, panel.scale)
    if panel.reference is not None:
        value, name = panel.reference
        axes.axhline(value, color=style.INK, linewidth=1.2, linestyle="--", label=name, zorder=3)
    axes.set_xticks(range(len(panel.groups)), list(panel.groups))
    axes.set_xlim(-0.55, len(panel.groups) - 0.45)
    axes.tick_params(axis="x", length=0)


def _make_logarithmic(axes: Axes, scale: str) -> None:
    """Plain numbers at the ticks, and enough of them where the values span less than a power of ten."""
    if scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_yscale("symlog", linthresh=LINEAR_BELOW)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


# Two measures of the same cases against each other, in panels with lines through the origin.
#
# After Fig. 5 of "hd_moe".

SIDE = 3.9  # inches of a panel
LINE = 0.2  # inches of an entry of its legend


@dataclass(frozen=True)
class ScatterPanel:
    """Points (x [point], y [point]) by group, and lines y = slope x by the group that lends its colour, or "equal".

    Groups in the legend are called by their `labels`, where they have one. `logarithmic` axes leave out what is not
    above 0; NaN is not drawn.
    """

    title: str
    points: Mapping[str, tuple[np.ndarray, np.ndarray]]
    xlabel: str
    ylabel: str
    slopes: Mapping[str, float] = field(default_factory=lambda: {"equal": 1.0})
    labels: Mapping[str, str] = field(default_factory=dict)
    logarithmic: bool = False


def plot_scatter_panels(path: Path, panels: Sequence[ScatterPanel], title: str, columns: int = 3) -> None:
    """Draw the panels, with the same limits on both axes of each. Panels with labels have legends of their own."""
    style.check_not_empty("panels", panels)
    for panel in panels:
        _check_points(panel)
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    entries = max(len(panel.points) + len(panel.slopes) if panel.labels else 0 for panel in panels)
    figure = style.new_figure(max(SIDE * columns, 6.4), (SIDE + LINE * entries) * rows + 0.9, title)
    grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
    colours = style.strategy_colours(group for panel in panels for group in panel.points)
    markers = style.strategy_markers(colours)
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel, colours, markers)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    common = [axes for axes, panel in zip(grid, panels, strict=False) if not panel.labels]
    if common:
        style.legend_below(figure, common)
    style.save(figure, path)


def _check_points(panel: ScatterPanel) -> None:
    style.check_not_empty(f"points of {panel.title!r}", panel.points)
    for group, (x, y) in panel.points.items():
        style.check_lengths(f"x of {group}", x, f"y of {group}", y)
    for group in panel.slopes:
        if group != "equal" and group not in panel.points:
            raise ValueError(f"a slope of {panel.title!r} is for {group!r}, which is none of {', '.join(panel.points)}")
    if not _known(panel).size:
        raise ValueError(f"{panel.title!r} has no point to draw")


def _known(panel: ScatterPanel) -> np.ndarray:
    """All values that can be drawn."""
    values = np.concatenate([np.ravel(np.asarray(one, float)) for pair in panel.points.values() for one in pair])
    return values[np.isfinite(values) & ((values > 0) | (not panel.logarithmic))]


def _draw(axes: Axes, panel: ScatterPanel, colours: Mapping[str, str], markers: Mapping[str, str]) -> None:
    for group, (x, y) in panel.points.items():
        axes.scatter(
            x,
            y,
            s=30,
            color=colours[group],
            marker=markers[group],
            edgecolors="white",
            linewidths=0.4,
            alpha=0.85,
            label=panel.labels.get(group, group),
            zorder=3,
        )
    known = _known(panel)
    low, high = (known.min() / 1.4, known.max() * 1.4) if panel.logarithmic else _around(known)
    for group, slope in panel.slopes.items():
        colour, label = (style.GUIDE, "equal") if group == "equal" else (colours[group], None)
        ends = np.array([low, high])
        axes.plot(ends, slope * ends, color=colour, linewidth=1.3, linestyle="--", label=label, zorder=2)
    style.dress(axes, panel.xlabel, panel.ylabel, grid="both")
    if panel.logarithmic:
        axes.set(xscale="log", yscale="log")
        style.log_ticks(axes.xaxis, axes.yaxis, few=1.0)
    else:
        axes.locator_params(nbins=7)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set_title(panel.title, fontsize=style.PANEL_SIZE, color=style.INK)
    if panel.labels:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=style.TICK_SIZE, frameon=False)


def _around(values: np.ndarray) -> tuple[float, float]:
    """Limits a little wider than the values."""
    margin = 0.08 * float(np.ptp(values)) or 0.1
    return float(values.min()) - margin, float(values.max()) + margin
