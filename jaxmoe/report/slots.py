"""A placement in slots: how even ranks are loaded layer by layer, and how many copies experts have."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxmoe.report import style


def plot_slots(path: Path, layer_ids: Sequence[int], amount: np.ndarray, measure: str, copies: np.ndarray, title: str):
    """`amount` [layer, rank] as a map, and the mean number of copies [layer, expert] of the experts with most first."""
    style.check_lengths("amount", amount, "layers", layer_ids)
    figure = style.new_figure(10.0, 4.6, title)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    top = max(float(amount.max()), 1e-9)
    image = left.imshow(amount, aspect="auto", cmap=style.node_colours(), vmin=0, vmax=top, interpolation="nearest")
    figure.colorbar(image, ax=left, label=measure)
    rows = np.unique(np.linspace(0, len(layer_ids) - 1, min(len(layer_ids), 8)).round().astype(int))
    left.set_yticks(rows, [str(layer_ids[row]) for row in rows])
    left.set_xlabel("rank")
    left.set_ylabel("layer")
    ordered = -np.sort(-copies, axis=1)
    order = np.arange(1, copies.shape[1] + 1)
    right.fill_between(order, ordered.min(axis=0), ordered.max(axis=0), step="mid", color=style.PALETTE[4], alpha=0.35)
    right.step(order, ordered.mean(axis=0), where="mid", color=style.PALETTE[0], linewidth=1.8)
    right.set_ylim(0, float(copies.max()) * 1.08)
    style.dress(right, "expert of a layer, most copies first", "copies: mean, least and most over layers")
    style.save(figure, path)
