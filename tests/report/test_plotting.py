"""Figures are written whole or not at all, and refuse arrays that do not fit together."""

import re
import struct
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxmoe.hardware.networks import num_links, reverse_links
from jaxmoe.report import (
    MeshPanel,
    mesh_loads,
    plot_breakdown,
    plot_convergence,
    plot_layer_latency,
    plot_mesh_loads,
    plot_model_vs_simulation,
    plot_speedups,
    style,
)
from jaxmoe.report.html.comparison import STAGE_COLOURS

rng = np.random.default_rng(0)


def panel(shape, title="plan"):
    return MeshPanel(title, rng.random(shape[0] * shape[1]) * 1e-4, rng.random(num_links(shape)) * 1e-4)


def series(layers, names):
    return {name: rng.uniform(1e-4, 2e-4, layers) for name in names}


NINE = ["TP", "EP", "hybrid", "published", "greedy", "tuned", "entwined ring", "random", "annealed"]
HISTORY = {
    "descent": (np.arange(20), np.full(20, 2e-5)),
    "refinement": (np.arange(5), np.linspace(3, 2, 5) / 1e5),
}
STAGES = {"rounded": 3e-5, "repaired": 2.5e-5, "searched": 2e-5}
FIVE_NODES, SIX_LINKS = MeshPanel("a", np.ones(5), np.ones(8)), MeshPanel("a", np.ones(4), np.ones(6))
DRAWINGS = {
    "one mesh": lambda path: plot_mesh_loads(path, (2, 2), [panel((2, 2))], "mesh"),
    "three meshes": lambda path: plot_mesh_loads(path, (4, 8), [panel((4, 8), str(i)) for i in range(3)], "meshes"),
    "large mesh": lambda path: plot_mesh_loads(path, (16, 16), [panel((16, 16))], "large"),
    "line": lambda path: plot_mesh_loads(path, (1, 3), [panel((1, 3))], "line"),
    "one node": lambda path: plot_mesh_loads(path, (1, 1), [panel((1, 1))], "one node"),
    "idle mesh": lambda path: plot_mesh_loads(path, (2, 2), [MeshPanel("idle", np.zeros(4), np.zeros(8))], "idle"),
    "one layer": lambda path: plot_layer_latency(path, [3], series(1, NINE[:2]), "one layer"),
    "many layers": lambda path: plot_layer_latency(path, np.arange(110), series(110, NINE), "many layers"),
    "speed-ups": lambda path: plot_speedups(path, range(8), {"EP": rng.uniform(0.8, 2, 8)}, "speed-ups"),
    "breakdown": lambda path: plot_breakdown(path, dict.fromkeys(NINE, (1e-5, np.ones(3) * 2e-5, 0)), "breakdown"),
    "convergence": lambda path: plot_convergence(path, HISTORY, STAGES, 1e-5, "both"),
    "descent alone": lambda path: plot_convergence(path, {"descent": HISTORY["descent"]}, STAGES, 1e-5, "descent"),
    "scatter": lambda path: plot_model_vs_simulation(
        path, np.logspace(-6, -3, 9), np.logspace(-6, -3, 9) * 1.05, [*"aaabbbccc"], "scatter", "R2 = 0.999"
    ),
}  # fmt: skip


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


LARGE = ("large mesh", "three meshes", "many layers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in DRAWINGS]
)
def test_figure_is_written_as_a_png_with_something_on_it(tmp_path, name):
    path = tmp_path / "figure.png"
    DRAWINGS[name](path)
    width, height = png_size(path.read_bytes())
    assert 500 < width < 6000
    assert 250 < height < 6000
    pixels = imread(path)[:, :, :3]
    assert len(np.unique((pixels[::3, ::3] * 255).astype(int).reshape(-1, 3), axis=0)) > 20
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]


def test_same_data_give_the_same_bytes(tmp_path):
    data = series(4, NINE[:3])
    for name in ("one.png", "two.png"):
        plot_layer_latency(tmp_path / name, range(4), data, "title")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_a_failed_drawing_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def breaks(self, aside, **_):
        aside.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", breaks)
    with pytest.raises(OSError, match="disk full"):
        DRAWINGS["one layer"](path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: plot_mesh_loads(p, (2, 2), [FIVE_NODES], ""), r"'a' has shape \(5,\).*\(4,\)"),
        (lambda p: plot_mesh_loads(p, (2, 2), [SIX_LINKS], ""), r"\(6,\).*needs \(8,\)"),
        (lambda p: plot_layer_latency(p, [1, 2], {"EP": np.ones(3)}, ""), "EP has 3 values but layer_ids has 2"),
        (lambda p: plot_speedups(p, [1, 2], {"EP": np.ones(1)}, ""), "EP has 1 values but layer_ids has 2"),
        (lambda p: plot_breakdown(p, {"EP": (1.0, 2.0)}, ""), "EP has 2 parts, expected 3"),
        (lambda p: plot_convergence(p, {}, {}, 1.0, ""), "history is empty"),
        (
            lambda p: plot_convergence(p, {"descent": (np.arange(3), np.ones(4))}, {}, 1.0, ""),
            "values of descent has 4 values but steps of descent has 3",
        ),
        (lambda p: plot_model_vs_simulation(p, np.ones(2), np.ones(3), ["a"] * 2, ""), "has 2 .* predicted_s has 3"),
        (lambda p: plot_model_vs_simulation(p, np.ones(2), np.ones(2), ["a"], ""), "groups has 1 .* simulated_s has 2"),
        (lambda p: plot_model_vs_simulation(p, np.zeros(1), np.ones(1), ["a"], ""), "above 0"),
        (lambda p: plot_mesh_loads(p, (2, 2), [], ""), "panels is empty"),
        (lambda p: plot_layer_latency(p, [], {}, ""), "layer_ids is empty"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", range(1, 11))
def test_colours_of_one_figure_are_distinct(count):
    names = [*NINE, "tenth"][:count]
    assert len(set(style.strategy_colours(names).values())) == count
    assert len(set(style.strategy_colours([f"mesh {i}" for i in range(count)]).values())) == count
    assert len(set(style.strategy_markers(names).values())) == count


def test_a_strategy_keeps_its_colour_from_figure_to_figure():
    few, many = style.strategy_colours(["EP", "tuned"]), style.strategy_colours(["annealed", *NINE])
    assert {name: many[name] for name in few} == few
    assert style.strategy_colours(["HD-MoE"])["HD-MoE"] == style.strategy_colours(["hd_moe"])["hd_moe"]


@pytest.mark.parametrize(
    ("largest", "unit"), [(2.0, "s"), (0.5, "ms"), (1e-3, "ms"), (9e-4, "µs"), (3e-8, "ns"), (0.0, "µs")]
)
def test_time_unit_gives_handy_numbers(largest, unit):
    factor, name = style.time_unit(largest)
    assert name == unit
    assert largest == 0 or 1 <= largest * factor <= 1000


def test_opposite_arrows_do_not_overlap():
    arrows = mesh_loads._arrows((3, 4), np.full(num_links((3, 4)), mesh_loads.THICKEST))
    low, high = arrows.min(axis=1), arrows.max(axis=1)
    for link, other in enumerate(reverse_links((3, 4))):
        assert (np.minimum(high[link], high[other]) <= np.maximum(low[link], low[other])).any()


@pytest.mark.parametrize(("shape", "numbered"), [((2, 3), True), ((3, 12), False)])
def test_a_mesh_names_its_rows_and_columns_and_tells_nodes_apart(monkeypatch, tmp_path, shape, numbered):
    kept = []
    monkeypatch.setattr(style, "save", lambda figure, path: kept.append(figure.axes[0]))
    plot_mesh_loads(tmp_path / "mesh.png", shape, [panel(shape)], "mesh")
    (axes,) = kept
    assert axes.get_ylabel() == "row"
    assert axes.get_xlabel() == ("column" if numbered else "column (node 12 row + column)")
    places = {text.get_text(): text.get_position() for text in axes.texts}
    expected = {"0": (0, 0), "1": (1, 0), "2": (2, 0), "3": (0, 1), "4": (1, 1), "5": (2, 1)}  # (column, row)
    assert places == (expected if numbered else {})
    down, up = axes.get_ylim()
    assert down > up  # rows go down the page


def test_a_stage_has_one_colour_under_all_its_names():
    colours = style.stage_colours(["dispatch", "compute", "combine", "movement", "all_reduce", "attention", "memory"])
    assert len(set(colours.values())) == 7
    for name, stage in {"experts": "compute", "all-reduce": "all_reduce", "migration": "movement"}.items():
        assert style.stage_colours([name])[name] == colours[stage]
    others = style.stage_colours(["compute", "gate", "shared experts"])
    assert others["compute"] == colours["compute"]
    assert len({*others.values()} | {*colours.values()}) == 9  # those of no colour of their own take nobody's
    assert style.are_stages(["dispatch", "All-to-all"])
    assert not style.are_stages(["dispatch", "tuned"])


def test_stages_have_one_palette_in_pictures_and_pages(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(style, "save", lambda figure, path: kept.append(figure.axes[0]))
    plot_breakdown(tmp_path / "bars.png", {"tp": (1.0, 2.0, 3.0)}, "bars")
    drawn = {bars.get_label(): to_hex(bars.patches[0].get_facecolor()) for bars in kept[0].containers}
    assert drawn == {stage: colour.lower() for stage, colour in style.stage_colours(drawn).items()}
    assert style.stage_colours(STAGE_COLOURS) == STAGE_COLOURS
    assert drawn == {stage: colour.lower() for stage, colour in STAGE_COLOURS.items()}


def test_drawing_leaves_the_global_state_of_matplotlib_alone():
    code = (
        "import sys, pathlib, tempfile; from jaxmoe.report import plot_layer_latency as p;"
        "p(pathlib.Path(tempfile.mkdtemp()) / 'f.png', [0], {'EP': [1e-3]}, 't');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((77.18, 30.4, 2.736), ["77.18", "30.40", "2.74"]),
        ((12345.6, 2.0), ["12,346", "2"]),
        ((0.5, None), ["0.5000", "-"]),
    ],
)
def test_numbers_of_a_column_have_one_precision(values, shown):
    assert style.aligned(values) == shown


def test_ticks_of_logarithmic_axes_are_plain_numbers():
    figure = style.new_figure(4.0, 3.0, "ticks")
    axes = figure.subplots()
    axes.set(yscale="log", ylim=(0.7, 40))
    style.log_ticks(axes.yaxis)
    figure.canvas.draw()
    told = [label.get_text() for which in ("major", "minor") for label in axes.get_yticklabels(which=which)]
    assert {"1", "10"} <= {*told}
    assert all(re.fullmatch(r"[\d.]*", text) for text in told)
