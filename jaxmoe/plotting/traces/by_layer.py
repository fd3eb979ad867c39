"""Measures of every layer beside what they would be by chance.

After Fig. 6(e, f) of "wafer_scale_moe_data_movement" and Fig. 3(b) of "hd_moe".
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from jaxmoe.plotting import style

STRONG, MODERATE = 0.7, 0.4  # bounds of Spearman's correlation, as the paper has them


def plot_stage_correlation(
    path: Path,
    layer_ids: np.ndarray,
    correlations: Mapping[str, np.ndarray],
    baselines: Mapping[str, np.ndarray],
    title: str,
    phases: str = "prefill and decode",
) -> None:
    """Spearman's correlation of two `phases`, [layer] by name, with the bounds of strong and moderate.

    A baseline of the same name is dashed: the same of two samples of one and the same thing, which is the most that
    can be expected.
    """
    figure, axes = _lines(layer_ids, correlations, baselines, title, "stretches dealt at random")
    style.dress(axes, "layer", f"Spearman's correlation of\n{phases}")
    lowest = min(0.0, *(float(np.nanmin(values)) for values in (*correlations.values(), *baselines.values())))
    axes.set_ylim(max(lowest * 1.1, -1.0), 1.02)
    for bound, name in ((STRONG, "strong"), (MODERATE, "moderate")):
        axes.axhline(bound, color=style.INK, linewidth=1.0, linestyle=":", zorder=1)
        axes.annotate(
            f"{name} from {bound}",
            (1.01, bound),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=style.TICK_SIZE,
        )
    style.legend_below(figure, [axes], columns=3)
    style.save(figure, path)


def plot_reuse(
    path: Path, layer_ids: np.ndarray, reuse: Mapping[str, np.ndarray], baselines: Mapping[str, np.ndarray], title: str
) -> None:
    """The mean part of a token's experts that the token before chose too, [layer] by name; chance is dashed."""
    figure, axes = _lines(layer_ids, reuse, baselines, title, "by chance")
    style.dress(axes, "layer", "experts shared with the token before")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    style.legend_below(figure, [axes], columns=3)
    style.save(figure, path)


def _lines(
    layer_ids: np.ndarray,
    series: Mapping[str, np.ndarray],
    baselines: Mapping[str, np.ndarray],
    title: str,
    baseline: str,
) -> tuple[Figure, Axes]:
    style.check_not_empty("layer_ids", layer_ids)
    style.check_not_empty("values by layer", series)
    for name, values in (*series.items(), *baselines.items()):
        style.check_lengths(name, values, "layer_ids", layer_ids)
    figure = style.new_figure(float(np.clip(6.5 + 0.07 * len(layer_ids), 7.0, 13.0)), 4.6, title)
    axes = figure.subplots()
    colours, markers = style.strategy_colours(series), style.strategy_markers(series)
    for name, values in series.items():
        axes.plot(
            layer_ids,
            values,
            label=name,
            color=colours[name],
            marker=markers[name],
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.4,
            linewidth=1.6,
        )
        if name in baselines:
            axes.plot(
                layer_ids,
                baselines[name],
                color=colours[name],
                marker=markers[name],
                markersize=3,
                linewidth=1.2,
                linestyle="--",
            )
    if baselines:
        axes.plot([], [], color=style.GUIDE, linewidth=1.2, linestyle="--", label=baseline)
    style.whole_number_ticks(axes, layer_ids)
    axes.margins(x=0.02 if len(layer_ids) > 1 else 0.5)
    return figure, axes
