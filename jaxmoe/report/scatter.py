"""Points on logarithmic axes: model against simulation, and measured messages with the lines fitted to them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from jaxmoe.report import style

# The model against the event simulation, point by point.

BAND = 0.1


def plot_model_vs_simulation(
    path: Path,
    simulated_s: np.ndarray,
    predicted_s: np.ndarray,
    groups: Sequence[str],
    title: str,
    annotation: str = "",
    labels: tuple[str, str] = ("simulated time", "predicted time"),
    unit: str | None = None,
) -> None:
    """Predicted over simulated seconds on logarithmic axes, coloured by group, with the line of agreement.

    `annotation` is text for the empty corner, such as R2 and the mean error; it is not computed here. `labels`
    are those of the axes. Times in a `unit` of their own, such as cycles, are shown as they are.
    """
    style.check_not_empty("simulated_s", simulated_s)
    style.check_lengths("simulated_s", simulated_s, "predicted_s", predicted_s)
    style.check_lengths("groups", groups, "simulated_s", simulated_s)
    both = np.concatenate([np.asarray(simulated_s, float), np.asarray(predicted_s, float)])
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError("logarithmic axes need finite times above 0 s")
    factor, unit = (1.0, unit) if unit else style.time_unit(float(np.median(both)))
    figure = style.new_figure(7.6, 5.8, title, layout="compressed")
    axes = figure.subplots()
    _draw_agreement(axes, both.min() * factor / 1.5, both.max() * factor * 1.5)
    _draw_groups(axes, np.asarray(simulated_s) * factor, np.asarray(predicted_s) * factor, list(groups))
    style.dress(axes, f"{labels[0]} [{unit}]", f"{labels[1]} [{unit}]", grid="both")
    axes.tick_params(axis="x", which="minor", rotation=60)  # labels of neighbours would overlap
    if annotation:
        _annotate(axes, annotation)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=style.TICK_SIZE, frameon=False)
    style.save(figure, path)


def _draw_agreement(axes: Axes, low: float, high: float) -> None:
    ends = np.array([low, high])
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    style.log_ticks(axes.xaxis, axes.yaxis)
    axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="#ececec", label=f"within {BAND:.0%}", zorder=0)
    axes.plot(ends, ends, color=style.GUIDE, linewidth=1.2, label="equal", zorder=1)


def _draw_groups(axes: Axes, simulated: np.ndarray, predicted: np.ndarray, groups: list[str]) -> None:
    colours, markers = style.strategy_colours(groups), style.strategy_markers(groups)
    for group, colour in colours.items():
        member = np.array([name == group for name in groups])
        axes.scatter(
            simulated[member],
            predicted[member],
            s=34,
            color=colour,
            marker=markers[group],
            edgecolors="white",
            linewidths=0.5,
            alpha=0.85,
            label=group,
            zorder=3,
        )


def _annotate(axes: Axes, text: str) -> None:
    # Points near the line of agreement leave the upper left corner empty.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 3}
    axes.text(
        0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=style.LABEL_SIZE, color=style.INK, bbox=box
    )


# Measured times of messages and the lines fitted to them: Fig. 6 of "camoe".

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
        style.log_ticks(panel.xaxis, panel.yaxis)
        panel.set_title(name, fontsize=style.PANEL_SIZE)
        style.dress(panel, "message [kB]", "time [ms]", grid="both")
        panel.legend(fontsize=style.TICK_SIZE, frameon=False)
    style.save(figure, path)
