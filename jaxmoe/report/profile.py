"""Measured times of messages and the lines fitted to them (camoe Fig. 6)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from jaxmoe.report import style

Fit = tuple[Float[np.ndarray, " message"], Float[np.ndarray, " message"], float, float]
"""Bytes and seconds of messages, alpha in s and beta in s/B."""


def plot_fits(path: Path, fits: Mapping[str, Fit], title: str) -> None:
    """A panel for every pair: measured messages, and alpha + beta x bytes, on logarithmic axes."""
    style.check_not_empty("fits", fits)
    rows, columns = -(-len(fits) // 2), min(len(fits), 2)
    figure = style.new_figure(5.0 * columns, 3.4 * rows, title)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat[len(fits) :]:
        panel.set_visible(False)
    for panel, (name, (size, seconds, alpha, beta)) in zip(axes.flat, fits.items(), strict=False):
        panel.scatter(size / 1e3, 1e3 * seconds, s=18, color=style.PALETTE[0], label="measured", zorder=3)
        at = np.geomspace(size[size > 0].min(), size.max(), 200)
        line = 1e3 * (alpha + beta * at)
        label = f"{1e3 * alpha:.3g} ms + {1e9 * beta:.3g} ns/B"
        panel.plot(at[line > 0] / 1e3, line[line > 0], color=style.PALETTE[1], label=label)
        panel.set(xscale="log", yscale="log")
        panel.set_title(name, fontsize=style.PANEL_SIZE)
        style.dress(panel, "message [kB]", "time [ms]", grid="both")
        panel.legend(fontsize=style.TICK_SIZE, frameon=False)
    style.save(figure, path)
