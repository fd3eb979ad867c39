"""What colours stand for in pictures of networks: a measure with its unit, from zero to the largest value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from jaxmoe.plotting import style

MARK = "#00E5FF"  # in neither colour map


@dataclass(frozen=True)
class Measure:
    """A quantity of nodes or links: what it is called, and the unit that shows values up to a given one well."""

    label: str
    unit: Callable[[float], tuple[float, str]]

    def show(self, value: float) -> str:
        """The value with its unit."""
        factor, unit = self.unit(value)
        return f"{style.digits(value * factor)} {unit}"


NODE_TIME = Measure("node busy time", style.time_unit)
LINK_TIME = Measure("link busy time", style.time_unit)
NODE_BYTES = Measure("received by node", style.byte_unit)
LINK_BYTES = Measure("link load", style.byte_unit)


def scale_of(values: Sequence[np.ndarray]) -> Normalize:
    """One scale for all of these. From zero, so that an even load looks even, and a small difference small."""
    largest = max((float(np.max(some, initial=0)) for some in values), default=0.0)
    return Normalize(0, largest if largest > 0 else 1e-6)


def node_colours() -> Colormap:
    return _part_of("viridis_r", 0.0, 0.92)


def link_colours() -> Colormap:
    return _part_of("magma_r", 0.06, 0.95)


def _part_of(name: str, start: float, stop: float) -> Colormap:
    # The ends of the full maps would vanish on white or be too dark for writing on.
    return LinearSegmentedColormap.from_list(f"{name}_part", colormaps[name](np.linspace(start, stop, 256)))


def is_busiest(values: np.ndarray) -> np.ndarray:
    """Which value is the largest; none of them where all are zero."""
    busiest = np.zeros(values.shape, bool)
    if values.size and values.max() > 0:
        busiest[values.argmax()] = True
    return busiest


def edges(values: np.ndarray, usual: str) -> list[str]:
    """Colours of outlines, which mark the busiest."""
    return [MARK if busiest else usual for busiest in is_busiest(values)]


def colourbar(figure: Figure, panels: Sequence[Axes], scale: Normalize, colours: Colormap, measure: Measure) -> None:
    """The bar beside all panels that says what colours mean."""
    factor, unit = measure.unit(float(scale.vmax or 0))
    shown = ScalarMappable(Normalize(0, float(scale.vmax or 0) * factor), colours)
    bar = figure.colorbar(shown, ax=list(panels), fraction=0.05, pad=0.02, aspect=22)
    bar.set_label(f"{measure.label} [{unit}]", fontsize=style.LABEL_SIZE)
    bar.ax.tick_params(labelsize=style.TICK_SIZE)
