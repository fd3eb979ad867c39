"""Times by layer, by step of a search, and by iteration."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from jaxmoe.report import style

# Strategies compared layer by layer, and what their time is made of.

PARTS = style.stage_colours(("dispatch", "compute", "combine"))


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
    path: Path,
    strategies: Mapping[str, Sequence[float | int | np.floating | np.ndarray]],
    title: str,
    limits: Mapping[str, str] | None = None,
) -> None:
    """Seconds of (dispatch, compute, combine) of every strategy, stacked; [layer] arrays are averaged.

    `limits` says behind each bar what limits the strategy.
    """
    style.check_not_empty("strategies", strategies)
    for name, parts in strategies.items():
        if len(parts) != len(PARTS):
            raise ValueError(f"{name} has {len(parts)} parts, expected {len(PARTS)}: {', '.join(PARTS)}")
    seconds = np.array([[np.mean(part) for part in parts] for parts in strategies.values()])  # [strategy, part]
    factor, unit = style.time_unit(float(seconds.sum(axis=1).max()))
    figure = style.new_figure(8.0, 1.7 + 0.42 * len(strategies), title)
    axes = figure.subplots()
    _stack(axes, list(strategies), seconds * factor, limits or {})
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
        style.marked_line(axes, layer_ids, values, label, colours[name], markers[name], size)
    style.whole_number_ticks(axes, layer_ids)
    axes.margins(x=0.02 if len(layer_ids) > 1 else 0.5)


def _fit_y(axes: Axes, values: np.ndarray) -> None:
    """From zero, or logarithmic where the largest would press the smallest flat."""
    positive = values[values > 0]
    if positive.size == values.size and positive.max() > 25 * positive.min():
        axes.set_yscale("log")
        style.log_ticks(axes.yaxis)
        axes.grid(axis="y", which="minor", color="#f0f0f0", linewidth=0.6)
    else:
        axes.set_ylim(0, float(values.max()) * 1.08 or 1.0)


def _stack(axes: Axes, names: list[str], times: np.ndarray, limits: Mapping[str, str]) -> None:
    row = np.arange(len(names))
    left = np.zeros(len(names))
    for (part, colour), width in zip(PARTS.items(), times.T, strict=True):
        axes.barh(row, width, left=left, height=0.62, color=colour, label=part, edgecolor="white", linewidth=0.8)
        left = left + width
    for index, (name, total) in enumerate(zip(names, left, strict=True)):
        told = f"{total:.3g}" + (f"  {limits[name]}" if name in limits else "")
        axes.annotate(told, (total, index), (5, 0), textcoords="offset points", va="center", fontsize=style.TICK_SIZE)
    axes.set_yticks(row, names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first strategy on top
    axes.set_xlim(0, float(left.max()) * (1.45 if limits else 1.1) or 1.0)


# How an optimiser came to its plan: what it minimised step by step, and what its plan took after each stage.

_DASHES = ((0, (6, 2)), (0, (4, 1.5, 1, 1.5)), (0, (2, 1.5)), (0, (1, 1.2)))


def plot_convergence(
    path: Path,
    history: Mapping[str, tuple[np.ndarray, np.ndarray]],
    stages: Mapping[str, float],
    bound: float,
    title: str,
) -> None:
    """Seconds by step, one panel for each stage of `history` (step, best value so far or of late).

    `stages` are exact values after each stage (rounded, repaired, ...) and `bound` a lower bound, drawn as
    horizontal lines with their values in the legend.
    """
    style.check_not_empty("history", list(history))
    for stage, (step, seconds) in history.items():
        style.check_not_empty(f"steps of {stage}", step)
        style.check_lengths(f"values of {stage}", seconds, f"steps of {stage}", step)
    factor, unit = style.time_unit(
        max([*(float(np.max(seconds)) for _, seconds in history.values()), *stages.values()])
    )
    figure = style.new_figure(5.0 + 2.5 * len(history), 4.8, title)
    panels = list(figure.subplots(1, len(history), sharey=True, squeeze=False)[0])
    for axes, (stage, (step, seconds)), label in zip(
        panels, history.items(), [f"time of the layer [{unit}]", *[""] * len(history)], strict=False
    ):
        axes.plot(
            step,
            np.asarray(seconds) * factor,
            color=style.INK,
            linewidth=1.8,
            marker="o" if len(step) == 1 else None,  # no line shows one value
            label="minimised value, relaxed less and less in the descent",
        )
        style.dress(axes, f"step of the {stage}", label)
        _draw_levels(axes, stages, bound, factor, unit)
    style.legend_below(figure, panels, columns=3)
    style.save(figure, path)


def _draw_levels(axes: Axes, stages: Mapping[str, float], bound: float, factor: float, unit: str) -> None:
    for index, (name, value) in enumerate(stages.items()):
        axes.axhline(
            value * factor,
            color=style.PALETTE[index % len(style.PALETTE)],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.5,
            label=f"{name}: {value * factor:.4g} {unit}",
            zorder=1.5,
        )
    if bound > 0:
        label = f"lower bound: {bound * factor:.4g} {unit}"
        axes.axhline(bound * factor, color=style.GUIDE, linewidth=1.2, label=label)
        axes.axhspan(0, bound * factor, color="#efefef", zorder=0)
    axes.set_ylim(bottom=0)


def plot_starts(path: Path, history: Float[np.ndarray, "step start"], best: float, metric: str, title: str) -> None:
    """A relaxed metric of every start by step, and the exact `best` as a line. Names that end in _s are times."""
    style.check_not_empty("history", history)
    factor, unit = style.time_unit(best) if metric.endswith("_s") else (1.0, "")
    name = metric.removesuffix("_s").replace("_", " ")
    figure = style.new_figure(7.6, 4.8, title)
    axes = figure.subplots()
    step = np.arange(1, len(history) + 1)
    axes.plot(step, history * factor, color=style.PALETTE[0], linewidth=0.8, alpha=0.45)
    axes.plot([], [], color=style.PALETTE[0], label="a start, relaxed; constraints may be broken on the way")
    told = f"best, exact, constraints met: {best * factor:.4g} {unit}".strip()
    axes.axhline(best * factor, color=style.PALETTE[1], linestyle="--", linewidth=1.8, label=told)
    axes.set_yscale("log")
    style.log_ticks(axes.yaxis)
    style.dress(axes, "step", f"{name} [{unit}]" if unit else name, grid="both")
    style.legend_below(figure, [axes], columns=2)
    style.save(figure, path)


# The time of every iteration of a run, and how much faster a system is than the static plan.


def plot_iterations(
    path: Path,
    seconds: Mapping[str, np.ndarray],
    simulated: Mapping[str, np.ndarray],
    replayed: np.ndarray,
    title: str,
) -> None:
    """Seconds of every iteration, [iteration] by name, as lines; those of the `replayed` ones in the simulator as dots.

    The first name is the baseline: where there are others, a second panel has its time over theirs.
    """
    style.check_not_empty("runs", seconds)
    baseline, *others = seconds
    for name in seconds:
        style.check_lengths(name, seconds[name], baseline, seconds[baseline])
    for name in simulated:
        style.check_lengths(f"replays of {name}", simulated[name], "replayed iterations", replayed)
    factor, unit = style.time_unit(max(float(np.max(times)) for times in seconds.values()))
    colours, markers = style.strategy_colours(seconds), style.strategy_markers(seconds)
    figure = style.new_figure(9.0, 6.2 if others else 4.4, title)
    times, *rest = figure.subplots(1 + bool(others), 1, sharex=True, squeeze=False)[:, 0]
    at = np.arange(len(seconds[baseline]))
    for name, values in seconds.items():
        times.plot(at, np.asarray(values) * factor, color=colours[name], linewidth=1.6, label=name)
        look = {"color": colours[name], "marker": markers[name], "edgecolors": style.INK, "s": 46, "zorder": 3}
        times.scatter(replayed, np.asarray(simulated[name]) * factor, label=f"{name}, event simulator", **look)
    highest = max(float(np.max(each)) for each in (*seconds.values(), *simulated.values()) if len(each))
    times.set_ylim(0, highest * factor * 1.08 or 1.0)  # markers at the top are whole
    for axes in rest:
        axes.axhline(1, color=style.GUIDE, linewidth=1.4, linestyle="--", zorder=1)
        for name in others:
            axes.plot(at, np.asarray(seconds[baseline]) / seconds[name], color=colours[name], linewidth=1.6)
        style.dress(axes, "iteration", f"speed-up over {baseline}")
    style.dress(times, "" if rest else "iteration", f"time of an iteration [{unit}]")
    style.whole_number_ticks((rest or [times])[0], at)
    style.legend_below(figure, [times], columns=4)
    style.save(figure, path)
