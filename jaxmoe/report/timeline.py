"""Timelines of replayed layers, and the outlines of arrows that stand for directed links."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from jaxmoe.report import style
from jaxmoe.report.mesh_loads import HEAD_LENGTH, LANE_OFFSET, NODE_SIDE

# Outlines of the arrows that stand for directed links between vertices anywhere in the plane.

GAP = 0.03  # between a vertex and its arrows
BEND = 0.34  # how far a link that would run over other vertices keeps off them
CLIMB = 0.6  # over which length it gets there
STEPS = 48  # of a curved arrow


def arrows(
    ends: Int[np.ndarray, "link 2"], points: Float[np.ndarray, "vertex 2"], width: Float[np.ndarray, " link"]
) -> list[Float[np.ndarray, "corner 2"]]:
    """Outlines of arrows with shafts of these widths, on the right of their way as one walks it.

    Points are [right, down], about a unit apart. Links that are bent have half the width: many pass side by side.
    """
    return [
        _outline(_curve(points[start], points[end]), shaft / 2)
        if bent
        else _outline(_straight(points[start], points[end]), shaft)
        for (start, end), bent, shaft in zip(ends, bends(ends, points), width, strict=True)
    ]


def bends(ends: Int[np.ndarray, "link 2"], points: Float[np.ndarray, "vertex 2"]) -> Bool[np.ndarray, " link"]:
    """Links that are bent because straight ones would run over another vertex, as those round the edge of a torus."""
    start, along = points[ends[:, 0]], points[ends[:, 1]] - points[ends[:, 0]]  # [link, 2]
    length = np.linalg.norm(along, axis=1)
    from_start = points[None] - start[:, None]  # [link, vertex, 2]
    reach = np.einsum("lvi,li->lv", from_start, along) / length[:, None]
    across = np.einsum("lvi,li->lv", from_start, np.stack([-along[:, 1], along[:, 0]], axis=1)) / length[:, None]
    between = (reach > NODE_SIDE) & (reach < length[:, None] - NODE_SIDE)
    return (between & (np.abs(across) < NODE_SIDE / 2 + LANE_OFFSET)).any(axis=1)


def _straight(start: np.ndarray, end: np.ndarray) -> Float[np.ndarray, "point 2"]:
    """Centre line of an arrow from the edge of one vertex to that of the next."""
    forward = (end - start) / np.linalg.norm(end - start)
    edge = (NODE_SIDE / 2 / np.abs(forward).max() + GAP) * forward
    return np.stack([start + edge, end - edge]) + LANE_OFFSET * _right(forward)


def _curve(start: np.ndarray, end: np.ndarray) -> Float[np.ndarray, "point 2"]:
    """Centre line of an arrow that leaves a vertex sideways and passes beside those between."""
    length = np.linalg.norm(end - start)
    forward = (end - start) / length
    walked = np.linspace(0, length, STEPS)
    climbed = np.clip(np.minimum(walked, length - walked) / CLIMB, 0, 1)
    foot = NODE_SIDE / 2 + GAP
    side = foot + (BEND - foot) * np.sin(np.pi / 2 * climbed)
    return start + walked[:, None] * forward + side[:, None] * _right(forward)


def _right(forward: np.ndarray) -> np.ndarray:
    # The second axis points down the page, so this is the right-hand side of who walks this way.
    return np.array([-forward[1], forward[0]])


def _outline(line: Float[np.ndarray, "point 2"], width: float) -> Float[np.ndarray, "corner 2"]:
    """Corners of an arrow round its centre line; one too short for a shaft is all head."""
    walked = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(line, axis=0), axis=1))])
    head = min(HEAD_LENGTH, 0.5 * walked[-1])
    shaft = np.linspace(0, walked[-1] - head, len(line))
    middle = np.stack([np.interp(shaft, walked, line[:, axis]) for axis in range(2)], axis=1)
    forward = np.gradient(middle, axis=0)
    forward /= np.linalg.norm(forward, axis=1, keepdims=True)
    right = np.stack([-forward[:, 1], forward[:, 0]], axis=1)
    half, barb = width / 2, min(width / 2 + 0.045, LANE_OFFSET - 0.006)
    tip = np.stack([middle[-1] + barb * right[-1], line[-1], middle[-1] - barb * right[-1]])
    return np.concatenate([middle + half * right, tip, (middle - half * right)[::-1]])


# What links and nodes do over time, as a chart of bars.

BAR = 0.72  # height, where rows are 1 apart
TOUCHING = 1e-6  # µs


@dataclass(frozen=True)
class GanttRow:
    """Bars of one link or node: begin and end of every slice, s, in order of time, and the stage of each."""

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
    for stage, colour in style.stage_colours(stage for row in rows for stage in row.stage).items():
        bars = np.concatenate([_bars(row, stage, at) for at, row in enumerate(rows)])
        axes.add_collection(PolyCollection(list(bars), facecolors=colour, linewidths=0, snap=False, label=stage))
    _frame(axes, rows, until_s)
    style.legend_below(figure, [axes])
    style.save(figure, path)


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
