"""Strategies compared layer by layer, and what their time is made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from jaxmoe.plotting import style

PARTS = {"dispatch": "#56B4E9", "compute": "#4d4d4d", "combine": "#E69F00"}


def plot_layer_latency(
    path: Path, layer_ids: Sequence[int] | np.ndarray, strategies: Mapping[str, np.ndarray], title: str
) -> None:
    """Seconds per layer of every strategy, [layer] each, as lines over the layer number."""
    _check(layer_ids, strategies)
    values = np.concatenate([np.asarray(times, float) for times in strategies.values()])
    factor, unit = style.time_unit(float(values.max()))
    figure = style.new_figure(_width(len(layer_ids)), 4.6, title)
    axes = figure.subplots()
    scaled = {name: np.asarray(times) * factor for name, times in strategies.items()}
    _draw_lines(axes, np.asarray(layer_ids), scaled)
    style.dress(axes, "layer", f"time of the layer [{unit}]")
    _fit_y(axes, values * factor)
    style.legend_below(figure, [axes])
    style.save(figure, path)


def plot_speedups(
    path: Path, layer_ids: Sequence[int] | np.ndarray, ratios: Mapping[str, np.ndarray], title: str
) -> None:
    """Time of each baseline over time of the plan, [layer] each: above the line at 1 the plan is faster."""
    _check(layer_ids, ratios)
    figure = style.new_figure(_width(len(layer_ids)), 4.6, title)
    axes = figure.subplots()
    axes.axhline(1, color=style.GUIDE, linewidth=1.4, linestyle="--", zorder=1)
    _draw_lines(
        axes, np.asarray(layer_ids), {f"over {name}": np.asarray(r) for name, r in ratios.items()}, list(ratios)
    )
    style.dress(axes, "layer", "speed-up (above 1: faster than the baseline)")
    _fit_y(axes, np.concatenate([np.asarray(ratio, float) for ratio in ratios.values()] + [np.ones(1)]))
    style.legend_below(figure, [axes])
    style.save(figure, path)


def plot_breakdown(
    path: Path, strategies: Mapping[str, Sequence[float | int | np.floating | np.ndarray]], title: str
) -> None:
    """Seconds of (dispatch, compute, combine) of every strategy, stacked; [layer] arrays are averaged."""
    style.check_not_empty("strategies", strategies)
    for name, parts in strategies.items():
        if len(parts) != len(PARTS):
            raise ValueError(f"{name} has {len(parts)} parts, expected {len(PARTS)}: {', '.join(PARTS)}")
    seconds = np.array([[np.mean(part) for part in parts] for parts in strategies.values()])  # [strategy, part]
    factor, unit = style.time_unit(float(seconds.sum(axis=1).max()))
    figure = style.new_figure(8.0, 1.7 + 0.42 * len(strategies), title)
    axes = figure.subplots()
    _stack(axes, list(strategies), seconds * factor)
    style.dress(axes, f"time of a layer, mean [{unit}]", "", grid="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    style.legend_below(figure, [axes])
    style.save(figure, path)


def _check(layer_ids: Sequence[int] | np.ndarray, series: Mapping[str, np.ndarray]) -> None:
    style.check_not_empty("layer_ids", layer_ids)
    style.check_not_empty("strategies", series)
    for name, values in series.items():
        style.check_lengths(f"{name}", values, "layer_ids", layer_ids)


def _width(layers: int) -> float:
    return float(np.clip(6.5 + 0.07 * layers, 7.0, 13.0))


def _draw_lines(
    axes: Axes, layer_ids: np.ndarray, series: Mapping[str, np.ndarray], names: list[str] | None = None
) -> None:
    """One line per entry; `names` are the strategies that lend their colours, if the labels are not they."""
    names = list(series) if names is None else names
    colours, markers = style.strategy_colours(names), style.strategy_markers(names)
    size = float(np.clip(160 / len(layer_ids), 2.6, 6.5))
    for name, (label, values) in zip(names, series.items(), strict=True):
        axes.plot(
            layer_ids,
            values,
            label=label,
            color=colours[name],
            marker=markers[name],
            markersize=size,
            markeredgecolor="white",
            markeredgewidth=0.4,
            linewidth=1.5,
            alpha=0.95,
        )
    style.whole_number_ticks(axes, layer_ids)
    axes.margins(x=0.02 if len(layer_ids) > 1 else 0.5)


def _fit_y(axes: Axes, values: np.ndarray) -> None:
    """From zero, or logarithmic where the largest would press the smallest flat."""
    positive = values[values > 0]
    if positive.size == values.size and positive.max() > 25 * positive.min():
        axes.set_yscale("log")
        axes.grid(axis="y", which="minor", color="#f0f0f0", linewidth=0.6)
    else:
        axes.set_ylim(0, float(values.max()) * 1.08 or 1.0)


def _stack(axes: Axes, names: list[str], times: np.ndarray) -> None:
    row = np.arange(len(names))
    left = np.zeros(len(names))
    for (part, colour), width in zip(PARTS.items(), times.T, strict=True):
        axes.barh(row, width, left=left, height=0.62, color=colour, label=part, edgecolor="white", linewidth=0.8)
        left = left + width
    for index, total in enumerate(left):
        axes.annotate(
            f"{total:.3g}", (total, index), (5, 0), textcoords="offset points", va="center", fontsize=style.TICK_SIZE
        )
    axes.set_yticks(row, names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first strategy on top
    axes.set_xlim(0, float(left.max()) * 1.1 or 1.0)
