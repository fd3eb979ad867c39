"""What links and nodes do over time, as a chart of bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from jaxmoe.plotting import style
from jaxmoe.plotting.layers import PARTS

BAR = 0.72  # height, where rows are 1 apart
TOUCHING = 1e-6  # µs


@dataclass(frozen=True)
class GanttRow:
    """What one link or node does: seconds at which each slice begins and ends, in order, and its stage."""

    label: str
    begin_s: np.ndarray  # [slice]
    end_s: np.ndarray
    stage: Sequence[str]


def plot_gantt(path: Path, rows: Sequence[GanttRow], title: str, until_s: float = 0.0) -> None:
    """Draw the rows below each other, the first on top, over the time in µs, coloured by stage.

    What is busy on and off, faster than can be drawn, is as much paler. The time axis ends with the last slice, or
    at `until_s` if that is later.
    """
    style.check_not_empty("rows", rows)
    for row in rows:
        style.check_lengths(f"end_s of {row.label}", row.end_s, "begin_s", row.begin_s)
        style.check_lengths(f"stage of {row.label}", row.stage, "begin_s", row.begin_s)
    figure = style.new_figure(11.0, 1.8 + 0.23 * len(rows), title)
    axes = figure.subplots()
    for stage, colour in _colours(rows).items():
        bars = np.concatenate([_bars(row, stage, at) for at, row in enumerate(rows)])
        axes.add_collection(PolyCollection(list(bars), facecolors=colour, linewidths=0, snap=False, label=stage))
    _frame(axes, rows, until_s)
    style.legend_below(figure, [axes])
    style.save(figure, path)


def _colours(rows: Sequence[GanttRow]) -> dict[str, str]:
    """Stages of a layer keep the colours they have in other figures; others take the palette."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.stage))
    others = [stage for stage in stages if stage not in PARTS]
    return {stage: PARTS[stage] for stage in PARTS if stage in stages} | style.strategy_colours(others)


def _bars(row: GanttRow, stage: str, at: int) -> np.ndarray:
    """Corners of the bars of one stage, float [bar, 4, 2]."""
    chosen = np.array([name == stage for name in row.stage], bool)
    begin, end = _joined(np.asarray(row.begin_s)[chosen] * 1e6, np.asarray(row.end_s)[chosen] * 1e6)
    across = np.stack([begin, end, end, begin], axis=-1)
    down = np.broadcast_to(at + BAR / 2 * np.array([-1, -1, 1, 1]), across.shape)
    return np.stack([across, down], axis=-1)


def _joined(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slices that touch as one: drawn side by side they would show a seam. They come in order of time."""
    apart = begin[1:] - end[:-1] > TOUCHING
    return begin[np.append(True, apart)[: len(begin)]], end[np.append(apart, True)[: len(end)]]


def _frame(axes: Axes, rows: Sequence[GanttRow], until_s: float) -> None:
    latest = max(until_s, *(float(np.max(row.end_s, initial=0.0)) for row in rows))
    axes.set_xlim(0, latest * 1e6 or 1.0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    style.dress(axes, "time [µs]", "", grid="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
