"""Serving: tokens of a user against those of a device, queues and caches of engines over time, and waits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.ticker import PercentFormatter

from jaxmoe.report import style

LABELLED = 8  # curves with a name; more are drawn alike
SHOWN = 20_000  # points of a curve; more are not seen, and take memory
WIDE = 20.0  # the ratio of values from which on an axis is logarithmic


class Over(NamedTuple):
    """One quantity over time, a row for each engine; `part` of a whole is shown in per cents."""

    label: str
    values: Float[np.ndarray, "engine time"]
    part: bool = False


def plot_over_time(
    path: Path, time: Float[np.ndarray, " time"], engines: list[str], panels: list[Over], title: str
) -> None:
    """Quantities over time in seconds, a panel each above the others, with a curve for each engine."""
    style.check_not_empty("panels", panels)
    named = engines if len(engines) <= LABELLED else ["one engine each"] * len(engines)
    colours = style.strategy_colours(named)
    figure = style.new_figure(8.6, 1.1 + 1.75 * len(panels), title)
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        for name, values in zip(named, panel.values, strict=True):
            axes.plot(time, values, color=colours[name], linewidth=1.2, label=name, alpha=0.9)
        style.dress(axes, "", panel.label)
        axes.set_ylim(0, 1.02 if panel.part else max(1.0, 1.05 * float(np.nanmax(panel.values))))
        if panel.part:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    rows[-1].set_xlabel("time, s", fontsize=style.LABEL_SIZE)
    rows[0].set_xlim(float(time[0]), float(time[-1]))
    if len(engines) > 1:
        style.legend_below(figure, [rows[0]], columns=4)
    style.save(figure, path)


class Wait(NamedTuple):
    """Seconds that requests wait, and the limit that users set, or None."""

    values: Float[np.ndarray, " request"]
    limit: float | None = None


def plot_waits(path: Path, waits: Mapping[str, Wait], title: str) -> None:
    """The part of requests that wait at most so long, a panel for each kind of wait, with its limit dashed."""
    style.check_not_empty("waits", waits)
    figure = style.new_figure(4.4 * len(waits), 4.2, title)
    for axes, (name, wait) in zip(figure.subplots(1, len(waits), squeeze=False)[0], waits.items(), strict=True):
        values = np.sort(wait.values[np.isfinite(wait.values)])
        factor, unit = style.time_unit(float(np.quantile(values, 0.99)) if values.size else 1.0)
        shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), SHOWN)).astype(int))
        axes.step(
            values[shown] * factor,
            (shown + 1) / max(len(values), 1),
            where="post",
            color=style.PALETTE[0],
            linewidth=1.8,
        )
        most = max(values[-1:].max(initial=0.0), wait.limit or 0.0) * factor
        for mark in (0.5, 0.99) if values.size else ():
            at = float(np.quantile(values, mark)) * factor
            right = at < 0.7 * most  # where there is room for words
            axes.plot(at, mark, "o", color=style.PALETTE[0], markersize=5)
            axes.annotate(
                f"p{mark * 100:.0f} {style.digits(at)} {unit}",
                (at, mark),
                (7 if right else -7, -12),
                textcoords="offset points",
                ha="left" if right else "right",
                fontsize=style.TICK_SIZE,
            )
        if wait.limit is not None:
            axes.axvline(wait.limit * factor, color=style.PALETTE[1], linestyle="--", linewidth=1.2)
            told = {"rotation": 90, "ha": "right", "va": "bottom", "fontsize": style.TICK_SIZE}
            axes.annotate("limit", (wait.limit * factor, 0), (-3, 6), textcoords="offset points", **told)
        style.dress(axes, f"{name}, {unit}", "part of requests at most so long", grid="both")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0, None)
    style.save(figure, path)


def plot_rates(
    path: Path,
    rates: Float[np.ndarray, " rate"],
    served: Mapping[str, Float[np.ndarray, " rate"]],
    waits: Mapping[str, Mapping[str, Float[np.ndarray, " rate"]]],
    title: str,
) -> None:
    """Requests a second that are served, and statistics of each wait in seconds, over the rate of arrivals."""
    style.check_not_empty("rates", rates)
    figure = style.new_figure(4.2 * (1 + len(waits)), 4.0, title)
    first, *others = figure.subplots(1, 1 + len(waits), squeeze=False)[0]
    for at, (name, values) in enumerate(served.items()):
        style.marked_line(first, rates, values, name, style.PALETTE[2 * at], style.MARKERS[at])
    style.dress(first, "requests/s that come", "requests/s", grid="both")
    for axes, (name, curves) in zip(others, waits.items(), strict=True):
        factor, unit = style.time_unit(float(np.nanmedian([*curves.values()])))
        for at, (statistic, values) in enumerate(curves.items()):
            style.marked_line(axes, rates, values * factor, statistic, style.PALETTE[at], style.MARKERS[at])
        style.dress(axes, "requests/s that come", f"{name}, {unit}", grid="both")
        if np.nanmax([*curves.values()]) > WIDE * np.nanmin([*curves.values()]):
            axes.set_yscale("log")
            style.log_ticks(axes.yaxis)
        else:
            axes.set_ylim(0, None)
    for axes in (first, *others):
        axes.legend(fontsize=style.TICK_SIZE, frameon=False)
        axes.set_xlim(0, None)
    first.set_ylim(0, None)
    style.save(figure, path)


Plane = tuple[Float[np.ndarray, " _"], Float[np.ndarray, " _"]]  # tokens/s of a user and of a GPU


def plot_serving(
    path: Path,
    curves: Mapping[str, Plane],
    concurrencies: Sequence[int],
    title: str,
    device: str = "GPU",
) -> None:
    """Output tokens a second of one user and of one device, a curve for each layout over the requests in flight.

    Up and to the right is better. Every other point of the first curve tells its number of requests.
    """
    style.check_not_empty("curves", curves)
    colours, markers = style.strategy_colours(curves), style.strategy_markers(curves)
    figure = style.new_figure(7.8, 5.4, title)
    axes = figure.subplots()
    for name, (user, rate) in curves.items():
        axes.plot(user, rate, color=colours[name], marker=markers[name], markersize=5, linewidth=1.6, label=name)
    first = next(iter(curves.values()))
    for count, x, y in list(zip(concurrencies, *first, strict=True))[::2]:
        axes.annotate(f"{count}", (x, y), textcoords="offset points", xytext=(5, 4), fontsize=style.TICK_SIZE)
    style.dress(axes, "output tokens/s of a user", f"output tokens/s of a {device}", grid="both")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(
        loc="upper right",
        fontsize=style.TICK_SIZE,
        frameon=True,
        facecolor="white",
        edgecolor="none",
        title="numbers: requests in flight",
    )
    style.save(figure, path)


def plot_front(path: Path, points: Plane, front: Mapping[str, Plane], title: str) -> None:
    """Output tokens a second of one user and of one GPU, on logarithmic axes: all deployments, and those of the front.

    Up and to the right is better. `front` has a curve for each case.
    """
    style.check_not_empty("front", front)
    colours, markers = style.strategy_colours(front), style.strategy_markers(front)
    figure = style.new_figure(7.8, 5.4, title)
    axes = figure.subplots()
    axes.scatter(*points, s=4, color="#cccccc", linewidths=0, rasterized=True, label="all deployments", zorder=1)
    for name, (user, device) in front.items():
        marker, colour = markers[name], colours[name]
        axes.plot(user, device, color=colour, marker=marker, markersize=5, linewidth=1.4, label=name, zorder=3)
    axes.set(xscale="log", yscale="log")
    style.log_ticks(axes.xaxis, axes.yaxis)
    style.dress(axes, "output tokens/s of a user", "output tokens/s of a GPU", grid="both")
    axes.legend(loc="lower left", fontsize=style.TICK_SIZE, frameon=True, facecolor="white", edgecolor="none")
    style.save(figure, path)
