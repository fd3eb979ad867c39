"""The time of every iteration of a run, and how much faster a system is than the static plan."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxmoe.plotting import style


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
    times.set_ylim(bottom=0)
    for axes in rest:
        axes.axhline(1, color=style.GUIDE, linewidth=1.4, linestyle="--", zorder=1)
        for name in others:
            axes.plot(at, np.asarray(seconds[baseline]) / seconds[name], color=colours[name], linewidth=1.6)
        style.dress(axes, "iteration", f"speed-up over {baseline}")
    style.dress(times, "" if rest else "iteration", f"time of an iteration [{unit}]")
    style.whole_number_ticks((rest or [times])[0], at)
    style.legend_below(figure, [times], columns=4)
    style.save(figure, path)
