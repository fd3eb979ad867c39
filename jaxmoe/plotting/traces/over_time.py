"""Loads of nodes as tokens pass: Fig. 12 of "moentwine"."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxmoe.plotting import style

NAMED = 8  # lines that can be told apart


def plot_node_load(
    path: Path, tokens: np.ndarray, ratio: np.ndarray, title: str, sections: Mapping[str, float] | None = None
) -> None:
    """Load of every node over the mean of all, [time, node], by the tokens that have passed, [time].

    `sections` names what is served from a number of tokens on. Of many nodes, only the four of the highest mean have
    colours.
    """
    style.check_not_empty("tokens", tokens)
    style.check_lengths("ratio", ratio, "tokens", tokens)
    nodes = ratio.shape[1]
    figure = style.new_figure(10.0, 4.6, title)
    axes = figure.subplots()
    axes.axhline(1, color=style.INK, linewidth=1.4, linestyle=":", zorder=1, label="mean")
    named = range(nodes) if nodes <= NAMED else np.argsort(-ratio.mean(axis=0))[:4]
    if nodes > NAMED:
        axes.plot(tokens, ratio, color="#c9c9c9", linewidth=0.8)
    for node, colour in zip(named, style.PALETTE, strict=False):
        axes.plot(tokens, ratio[:, node], color=colour, linewidth=1.6, label=f"node {node}")
    style.dress(axes, "tokens passed", "load of the node over the mean")
    axes.set_ylim(0, float(ratio.max()) * 1.15 or 1.0)
    axes.margins(x=0.01)
    for name, start in (sections or {}).items():
        axes.axvline(start, color=style.INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            name,
            (start, 0.98),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=style.TICK_SIZE,
        )
    style.legend_below(figure, [axes], columns=6)
    style.save(figure, path)
