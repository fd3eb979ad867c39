"""How few pairs of experts make up how much: Fig. 4(c), 5(d) and 8(c) of "wafer_scale_moe_data_movement"."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.ticker import PercentFormatter

from jaxmoe.plotting import style


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
