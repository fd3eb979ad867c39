"""Blocks of an HTML report: figures, tables, notes, text, folded text and pictures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from jaxmoe.errors import InputError
from jaxmoe.report.style import INK, PALETTE, time_unit

DIGITS = 5  # significant, of numbers in the page: what a screen cannot show is not worth its bytes
TEMPLATES = ("hovertemplate",)  # keys whose texts are ours alone, with markup


class ReportError(InputError):
    """A report that cannot be written. The message names the file and says why and what to do."""


@dataclass(frozen=True)
class Figure:
    """A figure that `page.js` draws. `kind` names the function that does, `data` is what it is given.

    `data` has a Plotly `figure`, and what the controls of the kind need.
    """

    title: str
    caption: str
    data: Mapping[str, Any]
    kind: str = "plain"
    height: int = 360  # CSS pixels
    least_width: int = 0  # CSS pixels that what is written in it needs; a smaller screen scrolls the figure
    wide: bool = False  # takes the width of the page, while others stand side by side


Cell = str | int | float | None


@dataclass(frozen=True)
class TableBlock:
    """A table that sorts by a click on a heading. Cells are text, numbers, or `None` where there is nothing."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True)
class Note:
    """A line that a reader has to know."""

    text: str


@dataclass(frozen=True)
class Folded:
    """Text of fixed width, folded until a reader opens it."""

    title: str
    text: str


@dataclass(frozen=True)
class Prose:
    """Text as HTML, of Markdown without markup of its own."""

    html: str


@dataclass(frozen=True)
class FoldedProse:
    """Text as HTML, like `Prose`, folded under its title until a reader opens it."""

    title: str
    html: str


@dataclass(frozen=True)
class Picture:
    """An image that the page holds, as a data URI of so many pixels (width, height); a click leads to `link`."""

    key: str
    data: str
    caption: str
    link: str
    size: tuple[int, int]


Block = Figure | TableBlock | Note | Folded | Prose | FoldedProse | Picture


# Figures for Plotly: one look for all.


def figure(data: Sequence[Mapping[str, Any]], **layout: Any) -> dict[str, Any]:
    """Traces and layout as Plotly has them, checked by Plotly's own schema, in the look of all figures.

    No text in it is taken for markup, but for that of templates, which hold no text of users.
    """
    import plotly.graph_objects as go

    look = {
        "template": "none",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "margin": {"l": 56, "r": 16, "t": 8, "b": 48},
        "hoverlabel": {"font": {"family": "system-ui, sans-serif", "size": 12}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "colorway": list(PALETTE),
        "dragmode": False,
    }
    return escaped(go.Figure(list(data), look | layout).to_plotly_json())


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title, a light grid, and as much room as its labels need."""
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "gridcolor": "#e3e3e3",
        "zerolinecolor": "#c8c8c8",
    } | more


def escaped(value: object) -> Any:
    """A copy for Plotly, in which no text is markup and all numbers are plain ones."""
    if isinstance(value, dict):
        return {key: each if key in TEMPLATES else escaped(each) for key, each in value.items()}
    if isinstance(value, str):
        return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    if isinstance(value, list | tuple):
        return [escaped(each) for each in value]
    return rounded(value)


def rounded(values: object) -> Any:
    """Numbers of a nested list or an array, with as many digits as a page needs; `None` for what is not finite."""
    if isinstance(values, np.ndarray | np.generic):
        return rounded(values.tolist())
    if isinstance(values, list | tuple):
        return [rounded(each) for each in values]
    if isinstance(values, float):
        return float(f"{values:.{DIGITS}g}") if isfinite(values) else None
    return values


def choices(label: str, options: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """A choice that changes a figure: name of each option, and by attribute the values of every trace."""
    shown = [{"name": name, "update": {key: escaped(each) for key, each in update.items()}} for name, update in options]
    return {"label": label, "options": shown}


def seconds_unit(values: Iterable[float]) -> tuple[float, str]:
    """Units per second and the name of the unit that suits the largest of these seconds."""
    return time_unit(max((value for value in values if value is not None), default=0.0))
