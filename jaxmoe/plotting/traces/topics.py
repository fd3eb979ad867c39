"""Which experts a topic makes popular: Fig. 7(b, c) of "wafer_scale_moe_data_movement"."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from jaxmoe.plotting import scales, style

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
    colours = scales.link_colours().with_extremes(bad=OTHERS)
    image = axes.imshow(shown, aspect="auto", cmap=colours, norm=scales.scale_of([ratio]), interpolation="nearest")
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
