"""Loads of experts: uneven in every layer, and the more so, the fewer tokens run together.

After Fig. 7(a) of "wafer_scale_moe_data_movement", Fig. 3(a) of "hd_moe" and Fig. 2(b, c) of
"expert_streaming_fse_dp".
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from jaxmoe.plotting import scales, style


def plot_expert_load(path: Path, layer_ids: np.ndarray, load: np.ndarray, title: str) -> None:
    """Loads [layer, expert] over their layer's mean: as a map, sorted within each layer, and the largest by layer."""
    style.check_lengths("load", load, "layer_ids", layer_ids)
    style.check_not_empty("layer_ids", layer_ids)
    mean = np.mean(load, axis=1, keepdims=True)
    ratio = np.divide(load, mean, out=np.zeros(np.shape(load)), where=mean > 0)
    figure = style.new_figure(13.0, 4.6, title)
    panels = list(figure.subplots(1, 3, width_ratios=(1.5, 1.15, 1)))
    _draw_map(figure, panels[0], np.asarray(layer_ids), ratio)
    _draw_sorted(panels[1], np.asarray(layer_ids), ratio)
    _draw_largest(panels[2], np.asarray(layer_ids), ratio)
    style.save(figure, path)


def plot_long_tail(path: Path, tokens_per_expert: Mapping[int, np.ndarray], title: str) -> None:
    """Tokens of each expert in batches [batch, expert], sorted within a batch, by the number of tokens in a batch.

    Lines are means over batches, bands go from the least to the most. The scale is linear up to one token, and
    logarithmic from there.
    """
    style.check_not_empty("tokens_per_expert", tokens_per_expert)
    figure = style.new_figure(7.6, 4.8, title)
    axes = figure.subplots()
    sizes = sorted(tokens_per_expert)
    shades = colormaps["viridis_r"](np.linspace(0.15, 1.0, len(sizes)))
    for size, shade in zip(sizes, shades, strict=True):
        ordered = -np.sort(-np.asarray(tokens_per_expert[size], float), axis=1)
        place = np.arange(1, ordered.shape[1] + 1)
        idle = f"{np.mean(ordered == 0):.0%} of experts idle"
        axes.plot(place, ordered.mean(axis=0), color=shade, linewidth=1.8, label=f"{size} tokens: {idle}")
        axes.fill_between(place, ordered.min(axis=0), ordered.max(axis=0), color=shade, alpha=0.18, linewidth=0)
    style.dress(axes, "experts, the busiest first", "tokens of the expert")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    style.legend_below(figure, [axes], columns=3)
    style.save(figure, path)


def _draw_map(figure: Figure, axes: Axes, layer_ids: np.ndarray, ratio: np.ndarray) -> None:
    scale = scales.scale_of([ratio])
    image = axes.imshow(ratio, aspect="auto", cmap=scales.link_colours(), norm=scale, interpolation="nearest")
    style.dress(axes, "expert", "layer")
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    shown = np.unique(np.linspace(0, len(layer_ids) - 1, min(len(layer_ids), 9)).round().astype(int))
    axes.set_yticks(shown, [str(layer) for layer in layer_ids[shown]])
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label("load over the mean", fontsize=style.LABEL_SIZE)
    bar.ax.tick_params(labelsize=style.TICK_SIZE)
    axes.set_title("every expert", fontsize=style.PANEL_SIZE, color=style.INK)


def _draw_sorted(axes: Axes, layer_ids: np.ndarray, ratio: np.ndarray) -> None:
    ordered = -np.sort(-ratio, axis=1)
    place = np.arange(1, ordered.shape[1] + 1)
    axes.plot(place, ordered.T, color="#c9c9c9", linewidth=0.8)
    for layer, colour, name in (
        (int(ordered[:, 0].argmax()), style.PALETTE[1], "most uneven"),
        (int(ordered[:, 0].argmin()), style.PALETTE[0], "most even"),
    ):
        axes.plot(place, ordered[layer], color=colour, linewidth=2.0, label=f"{name}: layer {layer_ids[layer]}")
    axes.axhline(1, color=style.GUIDE, linewidth=1.2, linestyle="--", label="mean")
    style.dress(axes, "experts, the busiest first", "load over the mean")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=style.TICK_SIZE, frameon=False)
    axes.set_title("sorted, a line for each layer", fontsize=style.PANEL_SIZE, color=style.INK)


def _draw_largest(axes: Axes, layer_ids: np.ndarray, ratio: np.ndarray) -> None:
    axes.bar(layer_ids, ratio.max(axis=1), width=0.8, color=style.PALETTE[1])
    axes.axhline(1, color=style.GUIDE, linewidth=1.2, linestyle="--")
    style.dress(axes, "layer", "largest load over the mean")
    style.whole_number_ticks(axes, layer_ids[:: -(-len(layer_ids) // 8)])
    axes.set_title(f"largest, {ratio.max(axis=1).mean():.2f} on average", fontsize=style.PANEL_SIZE, color=style.INK)
