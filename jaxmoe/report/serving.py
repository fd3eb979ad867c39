"""Output tokens of a user against those of a GPU, by layout and requests in flight."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from jaxmoe.report import style

Plane = tuple[Float[np.ndarray, " _"], Float[np.ndarray, " _"]]  # tokens/s of a user and of a GPU


def plot_serving(
    path: Path,
    curves: Mapping[str, Plane],
    concurrencies: Sequence[int],
    title: str,
    device: str = "GPU",
) -> None:
    """Output tokens a second of one user and of one device, a curve for each layout over the requests in flight.

    Up and to the right is better. Every other point of the first curve tells its number of requests.
    """
    style.check_not_empty("curves", curves)
    colours, markers = style.strategy_colours(curves), style.strategy_markers(curves)
    figure = style.new_figure(7.8, 5.4, title)
    axes = figure.subplots()
    for name, (user, rate) in curves.items():
        axes.plot(user, rate, color=colours[name], marker=markers[name], markersize=5, linewidth=1.6, label=name)
    first = next(iter(curves.values()))
    for count, x, y in list(zip(concurrencies, *first, strict=True))[::2]:
        axes.annotate(f"{count}", (x, y), textcoords="offset points", xytext=(5, 4), fontsize=style.TICK_SIZE)
    style.dress(axes, "output tokens/s of a user", f"output tokens/s of a {device}", grid="both")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(
        loc="upper right",
        fontsize=style.TICK_SIZE,
        frameon=True,
        facecolor="white",
        edgecolor="none",
        title="numbers: requests in flight",
    )
    style.save(figure, path)


def plot_front(path: Path, points: Plane, front: Mapping[str, Plane], title: str) -> None:
    """Output tokens a second of one user and of one GPU, on logarithmic axes: all deployments, and those of the front.

    Up and to the right is better. `front` has a curve for each case.
    """
    style.check_not_empty("front", front)
    colours, markers = style.strategy_colours(front), style.strategy_markers(front)
    figure = style.new_figure(7.8, 5.4, title)
    axes = figure.subplots()
    axes.scatter(*points, s=4, color="#cccccc", linewidths=0, rasterized=True, label="all deployments", zorder=1)
    for name, (user, device) in front.items():
        marker, colour = markers[name], colours[name]
        axes.plot(user, device, color=colour, marker=marker, markersize=5, linewidth=1.4, label=name, zorder=3)
    axes.set(xscale="log", yscale="log")
    style.log_ticks(axes.xaxis, axes.yaxis)
    style.dress(axes, "output tokens/s of a user", "output tokens/s of a GPU", grid="both")
    axes.legend(loc="lower left", fontsize=style.TICK_SIZE, frameon=True, facecolor="white", edgecolor="none")
    style.save(figure, path)
