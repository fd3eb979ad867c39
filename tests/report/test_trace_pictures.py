"""Pictures of traces: every kind of model can be drawn, says what it shows, and misfits are refused."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxmoe import report
from jaxmoe.report import style
from jaxmoe.report.trace_heatmaps import _scale

rng = np.random.default_rng(0)
SIZES = [(1, 1, 1), (32, 8, 1), (58, 256, 8)]  # layers, experts, top_k


def drawings(layers: int, experts: int, top_k: int) -> dict:
    """A call of every function, with arrays as a model of that size has them."""
    ids, load = np.arange(3, 3 + layers), rng.zipf(1.5, (layers, experts)).clip(max=500)
    pairs = {f"layer {i}": rng.dirichlet(np.ones(experts), experts) * top_k for i in ids[:5]}
    pairs["never chosen"] = np.full((experts, experts), np.nan)
    line = {name: rng.random(layers) for name in ("token to token", "layer to layer")}
    chance = {"token to token": rng.random(layers)}
    curve = {name: np.linspace(0, 1, experts**2 + 1) ** power for name, power in (("a", 0.3), ("b", 0.7))}
    topics = {f"topic {i}": load[0] * rng.random(experts) for i in range(layers)}
    batches = {size: rng.poisson(size * top_k / experts, (4, experts)) for size in (16, 256)}
    time, ratio = np.arange(20) * 64, rng.random((20, experts)) * 2
    return {
        "plot_conditional": (pairs, "what follows"),
        "plot_coactivation": (pairs, "what is chosen together"),
        "plot_coverage": (curve, {"a": curve["b"]}, "coverage"),
        "plot_stage_correlation": (ids, line, chance, "prefill and decode"),
        "plot_expert_load": (ids, load, "loads"),
        "plot_top_experts": (topics, "topics"),
        "plot_node_load": (time, ratio, "loads over time", {"chat": 0.0, "code": 640.0}),
        "plot_long_tail": (batches, "long tail"),
        "plot_reuse": (ids, line, chance, "reuse"),
        "plot_trace_comparison": (["skew", "nothing"], {"real": [1.5, 0.0], "made up": [1.4, 0.0]}, "comparison"),
    }


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that are saved, as they are."""
    figures: list[Figure] = []
    save = style.save
    monkeypatch.setattr(style, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    return figures


@pytest.mark.parametrize("name", drawings(1, 8, 2))
@pytest.mark.parametrize(
    "size",
    [SIZES[0], SIZES[1], pytest.param(SIZES[2], marks=pytest.mark.slow)],
    ids=lambda size: "L{}-E{}-K{}".format(*size),
)
def test_models_of_any_size_are_drawn_and_what_is_shown_is_named(tmp_path, drawn, name, size):
    getattr(report, name)(tmp_path / "figure.png", *drawings(*size)[name])
    height, width = imread(tmp_path / "figure.png").shape[:2]
    assert 500 < width < 3500
    assert 250 < height < 3000
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]
    (figure,) = drawn
    assert figure.get_suptitle()
    panels = [axes for axes in figure.axes if axes.axison]
    if name != "plot_trace_comparison":  # its bars carry their numbers
        assert any(axes.get_xlabel() for axes in panels)
        assert any(axes.get_ylabel() for axes in panels)


def labels_of(figure: Figure) -> set[str]:
    """Every label in the legends of a figure."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return {text.get_text() for legend in legends if legend for text in legend.get_texts()}


def test_coverage_tells_its_values_at_the_mark(tmp_path, drawn):
    curve = np.array([0, 0.5, 0.8, 1.0, 1.0, 1.0])
    report.plot_coverage(tmp_path / "f.png", {"m": curve}, {"m": np.linspace(0, 1, 11)}, "t", mark=0.1)
    assert "m: 25% on the top 10% (by chance 10%)" in labels_of(drawn[0])


def test_the_tail_tells_how_many_experts_are_idle(tmp_path, drawn):
    report.plot_long_tail(tmp_path / "f.png", {16: np.array([[3, 0], [0, 0]])}, "t")
    assert labels_of(drawn[0]) == {"16 tokens: 75% of experts idle"}


def test_loads_are_shown_over_their_layers_mean(tmp_path, drawn):
    report.plot_expert_load(tmp_path / "f.png", np.array([4, 9]), np.array([[1, 3], [20, 20]]), "t")
    image = drawn[0].axes[0].images[0].get_array()
    np.testing.assert_allclose(image, [[0.5, 1.5], [1, 1]])
    assert labels_of(drawn[0]) == {"most uneven: layer 4", "most even: layer 9", "mean"}


def test_only_the_busiest_experts_of_a_topic_are_coloured(tmp_path, drawn):
    load = {"a": np.array([5, 1, 3, 0]), "b": np.array([0, 0, 9, 0])}
    report.plot_top_experts(tmp_path / "f.png", load, "t", top=2)
    shown = drawn[0].axes[0].images[0].get_array()
    assert (~shown.mask).tolist() == [[True, False], [False, False], [True, True], [False, False]]


def test_an_expert_is_no_pair_with_itself(tmp_path, drawn):
    report.plot_coactivation(tmp_path / "f.png", {"layer 0": np.full((4, 4), 2.0)}, "t")
    assert np.isnan(np.diag(drawn[0].axes[0].images[0].get_array().filled(np.nan))).all()


def test_many_nodes_are_grey_but_for_the_busiest(tmp_path, drawn):
    report.plot_node_load(tmp_path / "f.png", np.arange(3), np.tile(np.arange(12.0), (3, 1)), "t")
    assert labels_of(drawn[0]) == {"mean", "node 8", "node 9", "node 10", "node 11"}


@pytest.mark.parametrize(
    ("values", "end", "extend"),
    [
        ([np.full((2, 2), np.nan)], 1, "neither"),
        ([np.zeros((2, 2))], 1, "neither"),
        ([np.full((2, 2), 0.5)], 0.5, "neither"),
        ([np.eye(8), np.full((8, 8), np.nan)], 1, "neither"),
        ([np.append(np.ones(9999), 50).reshape(100, 100)], 1, "max"),
        ([np.append(np.zeros(9999), 50).reshape(100, 100)], 50, "neither"),
    ],
)
def test_colours_end_where_few_values_are_larger(values, end, extend):
    scale, beyond = _scale(values)
    assert (scale.vmax, beyond) == (end, extend)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: report.plot_conditional(p, {}, ""), "panels is empty"),
        (lambda p: report.plot_conditional(p, {"a": np.ones((2, 3))}, ""), r"a has shape \(2, 3\)"),
        (lambda p: report.plot_coactivation(p, {"a": np.ones((0, 0))}, ""), r"a has shape \(0, 0\)"),
        (lambda p: report.plot_coverage(p, {"a": np.ones(1)}, {}, ""), "a has 1 points"),
        (lambda p: report.plot_coverage(p, {}, {}, ""), "curves is empty"),
        (lambda p: report.plot_reuse(p, np.arange(2), {"a": np.ones(3)}, {}, ""), "a has 3 .* layer_ids has 2"),
        (lambda p: report.plot_reuse(p, np.arange(2), {}, {}, ""), "values by layer is empty"),
        (
            lambda p: report.plot_stage_correlation(p, np.arange(2), {"a": np.ones(2)}, {"a": np.ones(1)}, ""),
            "a has 1 values but layer_ids has 2",
        ),
        (lambda p: report.plot_expert_load(p, np.arange(2), np.ones((3, 4)), ""), "load has 3 values"),
        (lambda p: report.plot_top_experts(p, {"a": np.ones(3), "b": np.ones(4)}, ""), "b has 4 values but a has 3"),
        (lambda p: report.plot_node_load(p, np.arange(2), np.ones((3, 4)), ""), "ratio has 3 values"),
        (lambda p: report.plot_long_tail(p, {}, ""), "tokens_per_expert is empty"),
        (lambda p: report.plot_trace_comparison(p, ["x"], {"real": np.ones(2)}, ""), "real has 2 values"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []
