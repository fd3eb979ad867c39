"""One look for all figures: colours that colour-blind readers can tell apart, sizes, units, saving.

Figures are built on `matplotlib.figure.Figure`, which draws without a display and leaves pyplot's global
state, and so the caller's own figures, alone.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator
from numpy.typing import ArrayLike

from jaxmoe.files import as_pdf_too, atomic_write

DPI = 160
TITLE_SIZE = 13
CHARACTER_WIDTH = 0.107  # of the title, inches
PANEL_SIZE = 11
LABEL_SIZE = 10.5
TICK_SIZE = 9.5
INK = "#222222"
GUIDE = "#8a8a8a"

# Okabe and Ito (2008), with a grey and a brown for figures of up to ten lines, where markers help as well. The
# yellow comes last because it is faint on white.
PALETTE = (
    "#0072B2",  # blue
    "#D55E00",  # vermillion
    "#009E73",  # bluish green
    "#CC79A7",  # reddish purple
    "#E69F00",  # orange
    "#56B4E9",  # sky blue
    "#000000",  # black
    "#8a8a8a",  # grey
    "#7A4B2A",  # brown
    "#F0E442",  # yellow
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

# A strategy keeps its colour in every figure. Names are compared in lower case, letters and digits only.
_STRATEGY = {
    "tp": 6,
    "tensorparallel": 6,
    "tpbothways": 7,
    "ep": 0,
    "expertparallel": 0,
    "epbalanced": 0,
    "eprandom": 5,
    "hybrid": 4,
    "tpep": 4,
    "hybridring": 8,
    "published": 3,
    "hdmoe": 3,
    "tuned": 1,
    "tunedgathered": 2,
    "gradient": 1,
    "greedy": 2,
    "nodebalance": 2,
}


def strategy_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for every name: the fixed one where there is one and it is free, else the next free one.

    Colours differ for up to ten names, then repeat. Those kept for a strategy go to others last.
    """
    wanted = list(dict.fromkeys(names))
    colours: dict[str, str] = {}
    for name in wanted:
        fixed = _STRATEGY.get(_letters(name))
        if fixed is not None and PALETTE[fixed] not in colours.values():
            colours[name] = PALETTE[fixed]
    # Groups of another kind take the palette from its start; strategies of no fixed colour avoid those kept.
    kept = {*_STRATEGY.values(), len(PALETTE) - 1} if colours else set()
    unused = [index for index, colour in enumerate(PALETTE) if colour not in colours.values()]
    free = [PALETTE[index] for index in sorted(unused, key=lambda index: index in kept)] or list(PALETTE)
    others = [name for name in wanted if name not in colours]
    colours.update({name: free[i % len(free)] for i, name in enumerate(others)})
    return {name: colours[name] for name in wanted}


# A stage keeps its colour in every figure and page; "communication" is dispatch and combine together. Names are
# compared as those of strategies are.
_STAGE = {
    "dispatch": 0,
    "communication": 0,
    "dispatchandcombine": 0,
    "alltoall": 0,
    "compute": 4,
    "experts": 4,
    "combine": 2,
    "movement": 3,
    "migration": 3,
    "allreduce": 5,
    "attention": 8,
    "memory": 1,
}


def stage_colours(stages: Iterable[str]) -> dict[str, str]:
    """A colour for every stage: its own where it has one, else the next that no stage has."""
    wanted = list(dict.fromkeys(stages))
    known = {stage: _STAGE.get(_letters(stage)) for stage in wanted}
    free = [colour for index, colour in enumerate(PALETTE) if index not in _STAGE.values()]
    others = [stage for stage, index in known.items() if index is None]
    found = {stage: free[at % len(free)] for at, stage in enumerate(others)}
    return {stage: found[stage] if index is None else PALETTE[index] for stage, index in known.items()}


def are_stages(names: Iterable[str]) -> bool:
    """Whether all of these are stages that have colours of their own."""
    return all(_letters(name) in _STAGE for name in names)


def _letters(name: str) -> str:
    """Lower case, letters and digits only."""
    return "".join(c for c in name.lower() if c.isalnum())


def strategy_markers(names: Iterable[str]) -> dict[str, str]:
    """A marker for every name, so that lines differ by more than colour."""
    return {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(dict.fromkeys(names))}


def time_unit(largest_s: float) -> tuple[float, str]:
    """Units per second and the name of the unit that shows times up to `largest_s` as handy numbers."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if largest_s * factor >= 1:
            return factor, name
    return (1e9, "ns") if largest_s > 0 else (1e6, "µs")


def energy_unit(largest_J: float) -> tuple[float, str]:
    """Units per joule and the name of the unit that shows energies up to `largest_J` as handy numbers."""
    for factor, name in ((1.0, "J"), (1e3, "mJ"), (1e6, "µJ"), (1e9, "nJ")):
        if largest_J * factor >= 1:
            return factor, name
    return 1e12, "pJ"


def byte_unit(largest_B: float) -> tuple[float, str]:
    """Units per byte and the name of the unit that shows sizes up to `largest_B` as handy numbers."""
    for factor, name in ((1e-12, "TB"), (1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB")):
        if largest_B * factor >= 1:
            return factor, name
    return 1.0, "B"


def digits(value: float, significant: int = 3) -> str:
    """The value for people: that many digits, or more where it would need an exponent for being large."""
    return f"{value:.0f}" if value >= 10**significant else f"{value:.{significant}g}"


def aligned(values: Iterable[float | None], significant: int = 4) -> list[str]:
    """A column of numbers for people: as many decimals in all as give the largest that many digits; - for `None`."""
    values = [*values]
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    whole = math.floor(math.log10(largest)) + 1 if largest > 0 else 1
    decimals = max(significant - whole, 0)
    return ["-" if value is None else f"{value:,.{decimals}f}" for value in values]


def check_lengths(first: str, first_values: Sized, second: str, second_values: Sized) -> None:
    """Raise `ValueError` naming both lengths where two arrays that belong together differ in length."""
    if len(first_values) != len(second_values):
        raise ValueError(f"{first} has {len(first_values)} values but {second} has {len(second_values)}")


def check_not_empty(what: str, values: Sized) -> None:
    """Raise `ValueError` where there is nothing to draw."""
    if len(values) == 0:
        raise ValueError(f"{what} is empty, so there is nothing to draw")


def new_figure(width: float, height: float, title: str, layout: str = "constrained") -> Figure:
    """A white figure, sizes in inches, with its title."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout=layout, facecolor="white")  # type: ignore[arg-type]
    wrapped = textwrap.fill(title, max(int(width / CHARACTER_WIDTH), 20))
    figure.suptitle(wrapped, fontsize=TITLE_SIZE, fontweight="bold", color=INK)
    return figure


def dress(axes: Axes, xlabel: str, ylabel: str, grid: str = "y") -> None:
    """Labels, sizes, a light grid behind the data, and no frame where no axis is."""
    axes.set_xlabel(xlabel, fontsize=LABEL_SIZE, color=INK)
    axes.set_ylabel(ylabel, fontsize=LABEL_SIZE, color=INK)
    axes.tick_params(labelsize=TICK_SIZE, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#e3e3e3", linewidth=0.8)  # type: ignore[arg-type]


def marked_line(
    axes: Axes, x: ArrayLike, y: ArrayLike, label: str, colour: str, marker: str, size: float = 6.0, width: float = 1.5
) -> None:
    """A line with a marker at every point, as all strategies and traces are drawn."""
    (line,) = axes.plot(np.asarray(x), np.asarray(y), label=label, color=colour, marker=marker, linewidth=width)
    line.set(markersize=size, markeredgecolor="white", markeredgewidth=0.4)


class _PlainNumbers(LogFormatter):
    """The ticks that `LogFormatter` labels, as plain numbers: 0.3 and 30, not powers of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def log_ticks(*axes: Axis, few: float = 2.0) -> None:
    """Plain numbers at the ticks of logarithmic axes, at those between powers of ten too where these are `few`."""
    for axis in axes:
        for formatted in (axis.set_major_formatter, axis.set_minor_formatter):
            formatted(_PlainNumbers(labelOnlyBase=False, minor_thresholds=(few, few / 4)))


def whole_number_ticks(axes: Axes, values: np.ndarray) -> None:
    """Ticks of the x axis on whole numbers only: each value where they are few, else a round selection."""
    if len(values) <= 16:
        axes.set_xticks(np.unique(values))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))


def legend_below(figure: Figure, panels: Sequence[Axes], columns: int = 5) -> None:
    """One legend for all panels under the figure, where it covers no data; each label once."""
    entries: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(str(label), handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=min(columns, max(len(entries), 1)),
        fontsize=TICK_SIZE,
        frameon=False,
        handlelength=3.0,
    )


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, and as PDF beside it where that is wanted.

    An older file of that name is replaced at once, or not at all.
    """
    # Without the name of the drawing library, its version and the date, the same data give the same bytes.
    unsaid = {"png": {"Software": None}, "pdf": {"Creator": None, "Producer": None, "CreationDate": None}}
    targets = {"png": path} | ({"pdf": path.with_suffix(".pdf")} if as_pdf_too.get() else {})
    for kind, target in targets.items():
        with atomic_write(target) as aside:
            figure.savefig(aside, format=kind, dpi=DPI, metadata=unsaid[kind], bbox_inches="tight", pad_inches=0.12)


# What colours stand for in pictures of networks: a measure with its unit, from zero to the largest value.

MARK = "#00E5FF"  # in neither colour map


@dataclass(frozen=True)
class Measure:
    """A quantity of nodes or links: what it is called, and the unit that shows values up to a given one well.

    A `number` only tells things apart, such as groups: it has no unit, and its largest is not marked.
    """

    label: str
    unit: Callable[[float], tuple[float, str]]
    number: bool = False

    def show(self, value: float) -> str:
        """The value with its unit."""
        factor, unit = self.unit(value)
        return f"{digits(value * factor)} {unit}"


NODE_TIME = Measure("node busy time", time_unit)
LINK_TIME = Measure("link busy time", time_unit)
NODE_BYTES = Measure("received by node", byte_unit)
LINK_BYTES = Measure("link load", byte_unit)


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
    bar.set_label(measure.label if measure.number else f"{measure.label} [{unit}]", fontsize=LABEL_SIZE)
    bar.ax.tick_params(labelsize=TICK_SIZE)
