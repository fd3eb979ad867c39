"""Heat maps of traces: pairs of experts, topics, loads."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from jaxmoe.report import style

# Relations between experts as maps: what follows what, and what is chosen together.
#
# After Fig. 4, 5, 6(a-d) and 8(a, b) of "wafer_scale_moe_data_movement" and Fig. 3(c) of "hd_moe".

ABOVE = 0.998  # of the cells, those above this quantile share the brightest colour
NOTHING = "#b5b5b5"
WIDEST = 4  # panels in a row
SIDE = 3.1  # inches of a panel


def plot_conditional(
    path: Path, panels: Mapping[str, np.ndarray], title: str, axes_names: tuple[str, str] = ("expert", "next expert")
) -> None:
    """Probability that the column's expert is chosen next, given the row's, [expert, expert] by name of the panel.

    `axes_names` say what rows and columns are, such as experts of token t and of token t + 1. One scale of colours
    for all panels; the few largest values are cut off. Rows of experts never chosen are NaN, and grey.
    """
    _draw(path, panels, title, axes_names, "probability, given the row's expert")


def plot_coactivation(path: Path, panels: Mapping[str, np.ndarray], title: str) -> None:
    """How often pairs of experts are chosen together, in units of 2 / (n (n - 1)), that of a random pair of n.

    Symmetric, [expert, expert] by name of the panel. An expert is no pair with itself: the diagonal stays grey.
    """
    apart = {name: np.where(np.eye(len(pairs), dtype=bool), np.nan, pairs) for name, pairs in panels.items()}
    _draw(path, apart, title, ("expert", "expert"), "probability over that of a random pair")


def _draw(path: Path, panels: Mapping[str, np.ndarray], title: str, names: tuple[str, str], measure: str) -> None:
    style.check_not_empty("panels", panels)
    for name, values in panels.items():
        if np.ndim(values) != 2 or np.shape(values)[0] != np.shape(values)[1] or np.size(values) == 0:
            raise ValueError(f"{name} has shape {np.shape(values)}, expected one row and one column for each expert")
    scale, extend = _scale(list(panels.values()))
    colours = colormaps["inferno"].with_extremes(bad=NOTHING)
    rows = -(-len(panels) // WIDEST)
    columns = -(-len(panels) // rows)
    figure = style.new_figure(max(SIDE * columns, 5.6) + 1.4, SIDE * rows + 0.9, title, layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for place, (axes, (name, values)) in enumerate(zip(grid, panels.items(), strict=False)):
        axes.imshow(values, cmap=colours, norm=scale, interpolation="nearest")
        axes.set_title(name, fontsize=style.PANEL_SIZE, color=style.INK)
        # Panels are of one kind: names stand at the left and lower edge only.
        last_of_column = place + columns >= len(panels)
        _label(axes, names[1] if last_of_column else "", names[0] if place % columns == 0 else "")
    _colourbar(figure, list(grid), scale, colours, extend, measure)
    style.save(figure, path)


def _scale(values: list[np.ndarray]) -> tuple[Normalize, str]:
    """One scale for all panels, and whether there is more above its end."""
    known = np.concatenate([np.ravel(some)[np.isfinite(np.ravel(some))] for some in values])
    if not known.size or known.max() <= 0:
        return Normalize(0, 1), "neither"
    end = np.quantile(known, ABOVE, method="higher") or known.max()
    return Normalize(0, end), "max" if known.max() > end else "neither"


def _label(axes: Axes, xlabel: str, ylabel: str) -> None:
    style.dress(axes, xlabel, ylabel)
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def _colourbar(
    figure: Figure, panels: list[Axes], scale: Normalize, colours: Colormap, extend: str, measure: str
) -> None:
    mappable = ScalarMappable(scale, colours)
    bar = figure.colorbar(mappable, ax=panels, fraction=0.05, pad=0.02, aspect=22, extend=extend)
    bar.set_label(measure, fontsize=style.LABEL_SIZE)
    bar.ax.tick_params(labelsize=style.TICK_SIZE)


# Which experts a topic makes popular: Fig. 7(b, c) of "wafer_scale_moe_data_movement".

OTHERS = "white"
MOST_SLANTED = 15  # topics whose names can stand beside each other


def plot_top_experts(path: Path, load_by_topic: Mapping[str, np.ndarray], title: str, top: int = 10) -> None:
    """The `top` experts of every topic, coloured by load over the topic's mean; loads [expert] of one layer.

    An expert popular in any topic is a line from side to side.
    """
    style.check_not_empty("load_by_topic", load_by_topic)
    first, *others = load_by_topic
    for name in others:
        style.check_lengths(name, load_by_topic[name], first, load_by_topic[first])
    load = np.stack([np.asarray(values, float) for values in load_by_topic.values()], axis=1)  # [expert, topic]
    mean = load.mean(axis=0)
    ratio = np.divide(load, mean, out=np.zeros_like(load), where=mean > 0)
    place = (-ratio).argsort(axis=0, kind="stable").argsort(axis=0)
    shown = np.ma.masked_where((place >= top) | (ratio == 0), ratio)
    slope = 40 if load.shape[1] <= MOST_SLANTED else 90
    names_in = 0.07 * max(map(len, load_by_topic)) * np.sin(np.radians(slope))  # their height
    height = float(np.clip(0.8 + 0.1 * len(load), 3.0, 8.0)) + names_in
    figure = style.new_figure(float(np.clip(3.4 + 0.45 * load.shape[1], 5.6, 14.0)), height, title)
    axes = figure.subplots()
    colours = style.link_colours().with_extremes(bad=OTHERS)
    image = axes.imshow(shown, aspect="auto", cmap=colours, norm=style.scale_of([ratio]), interpolation="nearest")
    style.dress(axes, "topic", "expert")
    axes.grid(visible=False)
    axes.set_xticks(
        range(load.shape[1]), list(load_by_topic), rotation=slope, ha="right", va="center", rotation_mode="anchor"
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.set_title(f"the {min(top, len(load))} busiest experts", fontsize=style.PANEL_SIZE, color=style.INK)
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=30)
    bar.set_label("load over the topic's mean", fontsize=style.LABEL_SIZE)
    bar.ax.tick_params(labelsize=style.TICK_SIZE)
    style.save(figure, path)


# Loads of experts: uneven in every layer, and the more so, the fewer tokens run together.
#
# After Fig. 7(a) of "wafer_scale_moe_data_movement", Fig. 3(a) of "hd_moe" and Fig. 2(b, c) of
# "expert_streaming_fse_dp".


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
    scale = style.scale_of([ratio])
    image = axes.imshow(ratio, aspect="auto", cmap=style.link_colours(), norm=scale, interpolation="nearest")
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
