"""A traffic matrix as a heat map."""

from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from jaxmoe.plotting import scales, style
from jaxmoe.plotting.scales import Measure

SENT = Measure("bytes from source to destination", style.byte_unit)
NOTHING = "white"


def plot_traffic(path: Path, traffic_B: np.ndarray, title: str) -> None:
    """Bytes from every source, a row, to every destination, a column. Pairs that send nothing stay white.

    What a node sends itself is left out.
    """
    if np.ndim(traffic_B) != 2 or len(set(np.shape(traffic_B))) != 1:
        raise ValueError(f"traffic_B has shape {np.shape(traffic_B)}, expected one row and one column for each node")
    style.check_not_empty("traffic_B", traffic_B)
    away = np.where(np.eye(len(traffic_B), dtype=bool), 0.0, traffic_B)
    scale, colours = scales.scale_of([away]), scales.link_colours().with_extremes(bad=NOTHING)
    figure = style.new_figure(7.4, 6.2, title, layout="compressed")
    axes = figure.subplots()
    axes.imshow(np.ma.masked_equal(away, 0), cmap=colours, norm=scale, interpolation="nearest")
    style.dress(axes, "destination node", "source node")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    scales.colourbar(figure, [axes], scale, colours, SENT)
    style.save(figure, path)
