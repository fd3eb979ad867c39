"""Bars over time: one row for each link or node, coloured by stage."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from jaxmoe.report import GanttRow, plot_gantt, timeline
from jaxmoe.report.layers import PARTS
from jaxmoe.report.style import stage_colours

ROWS = [
    GanttRow("link 0 -> 1", np.array([0.0, 2e-6, 9e-6]), np.array([1e-6, 3e-6, 1e-5]), ["dispatch"] * 2 + ["combine"]),
    GanttRow("link 1 -> 0", np.array([]), np.array([]), []),
    GanttRow("node 0", np.array([3e-6]), np.array([9e-6]), ["compute"]),
]


def fills(path, colour: str) -> bool:
    """Whether areas have this colour, not just the edges of letters."""
    same = np.abs(imread(path)[:, :, :3] - to_rgb(colour)) < 1e-3
    return same.all(axis=-1).sum() > 1000


@pytest.mark.parametrize("count", [1, 2, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_bars_have_the_colours_of_their_stages(tmp_path, count):
    path = tmp_path / "gantt.png"
    rows = (ROWS * count)[:count]
    plot_gantt(path, rows, "a layer")
    assert [file.name for file in tmp_path.iterdir()] == ["gantt.png"]
    drawn = {stage for row in rows for stage in row.stage}
    assert {stage for stage, colour in PARTS.items() if fills(path, colour)} == drawn


def test_stages_of_other_kinds_have_colours_too(tmp_path):
    plot_gantt(tmp_path / "a.png", [GanttRow("link 0 -> 1", np.zeros(1), np.ones(1), ["transfer"])], "traffic")
    colour = stage_colours(["transfer"])["transfer"]
    assert fills(tmp_path / "a.png", colour)
    assert colour not in PARTS.values()


def test_nothing_but_idle_rows_can_be_drawn(tmp_path):
    plot_gantt(tmp_path / "a.png", ROWS[1:2], "idle")
    assert (tmp_path / "a.png").exists()


def test_the_axis_reaches_as_far_as_asked(tmp_path):
    for name, until in (("short", 0.0), ("as long", 1e-5), ("long", 2e-5)):
        plot_gantt(tmp_path / name, ROWS, "title", until)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn["short"] == drawn["as long"] != drawn["long"]


def test_same_data_give_the_same_bytes(tmp_path):
    for name in ("one.png", "two.png"):
        plot_gantt(tmp_path / name, ROWS, "title")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        ([], [], []),
        ([1], [2], [(1, 2)]),
        ([0, 1, 3, 4, 5], [1, 2, 4, 5, 6], [(0, 2), (3, 6)]),
        ([0, 2], [1, 3], [(0, 1), (2, 3)]),
    ],
)
def test_bars_that_touch_are_one(begin, end, expected):
    joined = timeline._joined(np.array(begin, float), np.array(end, float))
    assert list(zip(*(column.tolist() for column in joined), strict=True)) == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows is empty"),
        ([GanttRow("node 3", np.zeros(2), np.ones(3), ["a"] * 2)], "end_s of node 3 has 3 values but begin_s has 2"),
        ([GanttRow("node 3", np.zeros(2), np.ones(2), ["a"])], "stage of node 3 has 1 values but begin_s has 2"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        plot_gantt(tmp_path / "a.png", rows, "")
    assert list(tmp_path.iterdir()) == []
