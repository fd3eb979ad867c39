"""How a tuner came to its plan: descent, rounding, repair, refinement, and the bound below them all."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from jaxmoe.plotting import style

_DASHES = ((0, (6, 2)), (0, (4, 1.5, 1, 1.5)), (0, (2, 1.5)), (0, (1, 1.2)))
_STAGE_COLOURS = ("#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#E69F00")


def plot_convergence(
    path: Path,
    step: np.ndarray,
    relaxed: np.ndarray,
    stages: Mapping[str, float],
    bound: float,
    title: str,
    refinement: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Seconds by step of the descent, then, where given, of the best plan by step of the refinement.

    `relaxed` [step] is the relaxed value; `stages` are exact values after each stage (rounded, repaired, ...)
    and `bound` a lower bound, drawn as horizontal lines with their values in the legend. `refinement` is
    (step, exact value of the best plan so far).
    """
    style.check_not_empty("step", step)
    style.check_lengths("relaxed", relaxed, "step", step)
    if refinement is not None:
        style.check_lengths("refinement values", refinement[1], "refinement steps", refinement[0])
    refines = refinement is not None and len(refinement[0]) > 0
    factor, unit = style.time_unit(max([float(np.max(relaxed)), *stages.values()]))
    figure = style.new_figure(10.0 if refines else 7.5, 4.8, title)
    panels = list(figure.subplots(1, 2 if refines else 1, sharey=True, squeeze=False)[0])
    panels[0].plot(step, np.asarray(relaxed) * factor, color="#0072B2", linewidth=1.8, label="relaxed value")
    style.dress(panels[0], "step of the descent", f"time of the layer [{unit}]")
    if refines and refinement is not None:
        _draw_refinement(panels[1], refinement, factor)
    for axes in panels:
        _draw_levels(axes, stages, bound, factor, unit)
    style.legend_below(figure, panels, columns=3)
    style.save(figure, path)


def _draw_refinement(axes: Axes, refinement: tuple[np.ndarray, np.ndarray], factor: float) -> None:
    values = np.asarray(refinement[1]) * factor
    # The best so far holds until a better one is found, so it is a staircase.
    axes.step(
        refinement[0],
        values,
        where="post",
        color=style.INK,
        linewidth=1.8,
        label="best plan, exact value",
    )
    style.dress(axes, "step of the refinement", "")


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
