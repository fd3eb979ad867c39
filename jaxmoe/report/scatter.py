"""Scatter plots: model against simulation, one or several panels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from jaxmoe.report import style

# The model against the event simulation, point by point.

BAND = 0.1


def plot_model_vs_simulation(
    path: Path,
    simulated_s: np.ndarray,
    predicted_s: np.ndarray,
    groups: Sequence[str],
    title: str,
    annotation: str = "",
    labels: tuple[str, str] = ("simulated time", "predicted time"),
    unit: str | None = None,
) -> None:
    """Predicted over simulated seconds on logarithmic axes, coloured by group, with the line of agreement.

    `annotation` is text for the empty corner, such as R2 and the mean error; it is not computed here. `labels`
    are those of the axes. Times in a `unit` of their own, such as cycles, are shown as they are.
    """
    style.check_not_empty("simulated_s", simulated_s)
    style.check_lengths("simulated_s", simulated_s, "predicted_s", predicted_s)
    style.check_lengths("groups", groups, "simulated_s", simulated_s)
    both = np.concatenate([np.asarray(simulated_s, float), np.asarray(predicted_s, float)])
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError("logarithmic axes need finite times above 0 s")
    factor, unit = (1.0, unit) if unit else style.time_unit(float(np.median(both)))
    figure = style.new_figure(7.6, 5.8, title, layout="compressed")
    axes = figure.subplots()
    _draw_agreement(axes, both.min() * factor / 1.5, both.max() * factor * 1.5)
    _draw_groups(axes, np.asarray(simulated_s) * factor, np.asarray(predicted_s) * factor, list(groups))
    style.dress(axes, f"{labels[0]} [{unit}]", f"{labels[1]} [{unit}]", grid="both")
    axes.tick_params(axis="x", which="minor", rotation=60)  # labels of neighbours would overlap
    if annotation:
        _annotate(axes, annotation)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=style.TICK_SIZE, frameon=False)
    style.save(figure, path)


def _draw_agreement(axes: Axes, low: float, high: float) -> None:
    ends = np.array([low, high])
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="#ececec", label=f"within {BAND:.0%}", zorder=0)
    axes.plot(ends, ends, color=style.GUIDE, linewidth=1.2, label="equal", zorder=1)


def _draw_groups(axes: Axes, simulated: np.ndarray, predicted: np.ndarray, groups: list[str]) -> None:
    colours, markers = style.strategy_colours(groups), style.strategy_markers(groups)
    for group, colour in colours.items():
        member = np.array([name == group for name in groups])
        axes.scatter(
            simulated[member],
            predicted[member],
            s=34,
            color=colour,
            marker=markers[group],
            edgecolors="white",
            linewidths=0.5,
            alpha=0.85,
            label=group,
            zorder=3,
        )


def _annotate(axes: Axes, text: str) -> None:
    # Points near the line of agreement leave the upper left corner empty.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 3}
    axes.text(
        0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=style.LABEL_SIZE, color=style.INK, bbox=box
    )


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
        _check(panel)
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


def _check(panel: ScatterPanel) -> None:
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
