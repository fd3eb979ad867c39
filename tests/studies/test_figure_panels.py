"""Pictures of several studies: panels of bars, dots and points, activation, recall; misfits are refused."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxmoe.report import style

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "figures"))
from activation import plot_activation, plot_recall
from panels import GroupPanel, ScatterPanel, plot_bar_panels, plot_dot_panels, plot_scatter_panels

sys.path.pop(0)
rng = np.random.default_rng(0)
BARS = GroupPanel(
    "bars", ["16", "32"], {"TP": np.array([1.0, 2.0]), "EP": np.array([3.0, np.nan])}, "time [s]", "batch"
)
NOTED = replace(BARS, reference=(1.5, "paper"), notes={"EP": ["3 s", "none"]})
DOTS = GroupPanel("dots", ["a", "b"], {"gap": np.array([[0.0, 1.0, 8.0], [2.0, 2.0, np.nan]])}, "gap [%]")
POINTS = {"a": (np.array([1.0, 2.0]), np.array([2.0, 4.0])), "b": (np.array([3.0, np.nan]), np.array([3.0, 1.0]))}
RECALL = {name: np.sort(rng.random(3)) for name in ("random", "next token", "frequency", "perfect")}
SCATTER = ScatterPanel("points", POINTS, "estimate [s]", "simulated [s]", {"a": 2.0}, {"a": "a: gamma 2"})


def activation(layers: int, experts: int) -> dict:
    """Arguments of `plot_activation` as a model of that size has them."""
    return {
        "layer_ids": np.arange(1, layers + 1),
        "frequency": {"layer 1": rng.random(experts), "layer 3": rng.random(experts)},
        "overlap": {"measured": rng.random(layers), "by chance": rng.random(layers)},
        "affinity": rng.random((experts, experts)),
        "accuracy": {"frequency": rng.random(layers)},
        "title": "activation",
    }


DRAWINGS = {
    "one panel of bars": lambda path: plot_bar_panels(path, [BARS], "bars"),
    "bars with notes": lambda path: plot_bar_panels(path, [NOTED] * 5, "bars", columns=2),
    "many bars": lambda path: plot_bar_panels(
        path, [GroupPanel(f"{i}", [*"abcdef"], {s: rng.random(6) for s in "uvwxy"}, "y") for i in range(9)], "bars"
    ),
    "logarithmic bars": lambda path: plot_bar_panels(path, [replace(BARS, scale="log")], "bars"),
    "dots": lambda path: plot_dot_panels(path, [DOTS, DOTS], "dots"),
    "dots from zero": lambda path: plot_dot_panels(path, [replace(DOTS, scale="symlog")], "dots"),
    "points": lambda path: plot_scatter_panels(path, [SCATTER] * 4, "points"),
    "logarithmic points": lambda path: plot_scatter_panels(
        path, [ScatterPanel("points", POINTS, "x", "y", logarithmic=True)], "points"
    ),
    "small model": lambda path: plot_activation(path, **activation(1, 2)),
    "recall": lambda path: plot_recall(path, np.array([2, 4, 8]), RECALL, 2, "recall"),
    "large model": lambda path: plot_activation(path, **activation(58, 256)),
}  # fmt: skip


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that are saved, as they are."""
    figures: list[Figure] = []
    save = style.save

    def keep(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(style, "save", keep)
    return figures


def labels_of(figure: Figure) -> list[str]:
    """Every label in the legends of a figure."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [text.get_text() for legend in legends if legend for text in legend.get_texts()]


LARGE = ("large model", "many bars", "bars with notes")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in DRAWINGS]
)
def test_figure_is_written_as_a_png_with_something_on_it(tmp_path, name):
    path = tmp_path / "figure.png"
    DRAWINGS[name](path)
    pixels = imread(path)[:, :, :3]
    height, width = pixels.shape[:2]
    assert 600 < width < 17 * style.DPI
    assert 500 < height < 15 * style.DPI
    assert len(np.unique((pixels[::3, ::3] * 255).astype(int).reshape(-1, 3), axis=0)) > 20
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]


def test_bars_have_their_values_colours_and_notes(tmp_path, drawn):
    plot_bar_panels(tmp_path / "f.png", [NOTED, replace(BARS, title="other")], "title")
    first, second = drawn[0].axes
    assert [bar.get_height() for bar in first.patches[:3]] == [1.0, 2.0, 3.0]
    assert to_hex(first.patches[0].get_facecolor()) == style.strategy_colours(["TP", "EP"])["TP"].lower()
    assert [text.get_text() for text in first.texts] == ["3 s"]  # a bar that is not drawn has none
    assert (first.get_ylabel(), second.get_ylabel()) == ("time [s]", "")
    assert first.get_xlabel() == second.get_xlabel() == "batch"
    assert first.get_ylim() == second.get_ylim()
    assert sorted(labels_of(drawn[0])) == ["EP", "TP", "paper"]  # once for both panels


def test_dots_mark_the_median_of_those_known(tmp_path, drawn):
    plot_dot_panels(tmp_path / "f.png", [DOTS], "title")
    dots, medians = drawn[0].axes[0].collections
    assert isinstance(dots, PathCollection)
    assert [float(line[0, 1]) for line in medians.get_segments()] == [1.0, 2.0]


def test_a_line_of_points_has_its_slope_and_both_axes_the_same_limits(tmp_path, drawn):
    plot_scatter_panels(tmp_path / "f.png", [SCATTER], "title")
    (axes,) = drawn[0].axes
    (line,) = axes.lines
    np.testing.assert_allclose(line.get_ydata(), 2 * np.asarray(line.get_xdata()))
    assert axes.get_xlim() == axes.get_ylim()
    assert labels_of(drawn[0]) == ["a: gamma 2", "b"]


def test_activation_hides_an_experts_affinity_to_itself_and_the_panel_that_has_no_predictor(tmp_path, drawn):
    plot_activation(tmp_path / "f.png", **activation(4, 8) | {"accuracy": {}})
    panels = drawn[0].axes
    np.testing.assert_array_equal(np.ma.getmaskarray(panels[2].images[0].get_array()), np.eye(8, dtype=bool))
    assert [axes.get_visible() for axes in panels[:4]] == [True, True, True, False]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: plot_bar_panels(p, [], ""), "panels is empty"),
        (lambda p: plot_bar_panels(p, [BARS, replace(BARS, groups=["16"])], ""), "TP has 2 values but groups has 1"),
        (lambda p: plot_bar_panels(p, [replace(BARS, series={})], ""), "series of 'bars' is empty"),
        (lambda p: plot_bar_panels(p, [DOTS], ""), r"gap of 'dots' has shape \(2, 3\), expected \[group\]"),
        (lambda p: plot_dot_panels(p, [BARS], ""), r"TP of 'bars' has shape \(2,\), expected \[group, repeat\]"),
        (lambda p: plot_bar_panels(p, [replace(BARS, notes={"EP": ["a"]})], ""), "notes of EP has 1 values"),
        (lambda p: plot_bar_panels(p, [replace(BARS, notes={"xx": ["a", "b"]})], ""), "for 'xx', which is none of TP"),
        (lambda p: plot_scatter_panels(p, [], ""), "panels is empty"),
        (
            lambda p: plot_scatter_panels(p, [replace(SCATTER, points={"a": (np.ones(2), np.ones(3))})], ""),
            "x of a has 2 values but y of a has 3",
        ),
        (lambda p: plot_scatter_panels(p, [replace(SCATTER, slopes={"c": 1.0})], ""), "for 'c', which is none of a, b"),
        (
            lambda p: plot_scatter_panels(
                p, [ScatterPanel("t", {"a": (-np.ones(1), np.zeros(1))}, "x", "y", logarithmic=True)], ""
            ),
            "'t' has no point to draw",
        ),
        (lambda p: plot_activation(p, **activation(4, 8) | {"affinity": np.ones((8, 7))}), r"shape \(8, 7\).* 8 exp"),
        (
            lambda p: plot_activation(p, **activation(4, 8) | {"overlap": {"measured": np.ones(3)}}),
            "measured has 3 values but layer_ids has 4",
        ),
        (lambda p: plot_activation(p, **activation(4, 8) | {"frequency": {}}), "frequency is empty"),
        (lambda p: plot_recall(p, np.arange(2), {"a": np.ones(3)}, 1, ""), "a has 3 values but sizes has 2"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []
