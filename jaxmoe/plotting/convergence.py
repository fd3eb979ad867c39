"""How an optimiser came to its plan: what it minimised step by step, and what its plan took after each stage."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from jaxmoe.plotting import style

_DASHES = ((0, (6, 2)), (0, (4, 1.5, 1, 1.5)), (0, (2, 1.5)), (0, (1, 1.2)))
_STAGE_COLOURS = ("#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#E69F00")


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
        axes.plot(step, np.asarray(seconds) * factor, color=style.INK, linewidth=1.8, label="minimised value")
        style.dress(axes, f"step of the {stage}", label)
        _draw_levels(axes, stages, bound, factor, unit)
    style.legend_below(figure, panels, columns=3)
    style.save(figure, path)


def _draw_levels(axes: Axes, stages: Mapping[str, float], bound: float, factor: float, unit: str) -> None:
    for index, (name, value) in enumerate(stages.items()):
        axes.axhline(
            value * factor,
            color=_STAGE_COLOURS[index % len(_STAGE_COLOURS)],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.5,
            label=f"{name}: {value * factor:.4g} {unit}",
            zorder=1.5,
        )
    axes.axhline(bound * factor, color=style.GUIDE, linewidth=1.2, label=f"lower bound: {bound * factor:.4g} {unit}")
    axes.axhspan(0, bound * factor, color="#efefef", zorder=0)
    axes.set_ylim(bottom=0)
