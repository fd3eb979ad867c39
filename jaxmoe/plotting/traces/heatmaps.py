"""Relations between experts as maps: what follows what, and what is chosen together.

After Fig. 4, 5, 6(a-d) and 8(a, b) of "wafer_scale_moe_data_movement" and Fig. 3(c) of "hd_moe".
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxmoe.plotting import style

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
