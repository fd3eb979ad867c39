"""The report's page: what users put in stays text, nothing is loaded, numbers and directions are right."""

import json
import re
from html.parser import HTMLParser

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware import Mesh, switch
from jaxmoe.hardware.networks import num_links, torus
from jaxmoe.report.html import (
    Figure,
    Folded,
    MachineLoads,
    Note,
    Page,
    ReportError,
    SweepData,
    TableBlock,
    loads_block,
    read_loads,
    sweep_blocks,
    write_loads,
    write_page,
)
from jaxmoe.report.html.blocks import choices, escaped, figure, rounded
from jaxmoe.report.html.page import in_script
from jaxmoe.report.html.summaries import whole_model_blocks
from jaxmoe.report.html.sweep import column, label_of

EVIL = "</script><script>alert(1)</script><img src=http://example.com/x onerror=alert(2)>&\u2028'\""


class Loaded(HTMLParser):
    """Elements of a page, their attributes, and its plain text."""

    def __init__(self):
        super().__init__()
        self.elements, self.text, self._within = [], [], []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._within.append(tag)

    def handle_endtag(self, tag):
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data):
        if self._within[-1:] not in (["script"], ["style"]):
            self.text.append(data)


def parsed(path):
    page = Loaded()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture
def evil_page(tmp_path):
    bars = figure([{"type": "bar", "x": [EVIL], "y": [1.0], "name": EVIL}])
    drawn = Figure(EVIL, EVIL, {"figure": bars, "choices": choices(EVIL, [(EVIL, {"y": [[2.0]]})])})
    blocks = [drawn, TableBlock(EVIL, [EVIL], [[EVIL], [None], [1.5]], EVIL), Note(EVIL), Folded(EVIL, EVIL)]
    path = tmp_path / "report.html"
    write_page(path, Page(EVIL, [(EVIL, EVIL)], [(EVIL, blocks)]))
    return path


def test_what_users_put_in_is_text(evil_page):
    page = parsed(evil_page)
    assert sum(tag == "script" for tag, _ in page.elements) == 4  # the look, data, Plotly, our own
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in page.elements)
    assert "".join(page.text).count(EVIL) == 15


def test_a_page_loads_nothing(evil_page):
    attributes = [(tag, key, value) for tag, found in parsed(evil_page).elements for key, value in found.items()]
    loading = [value for _, key, value in attributes if key in ("src", "href", "data", "srcset", "action")]
    assert [value for value in loading if not value.startswith(("#", "data:"))] == []
    policies = [value for _, key, value in attributes if key == "content" and "default-src" in value]
    (policy,) = policies
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert evil_page.read_text(encoding="utf-8").count("plotly.js v") == 1


def test_json_in_a_script_is_the_same_and_ends_nothing():
    text = in_script({"a": [EVIL, 1.5, None]})
    assert json.loads(text) == {"a": [EVIL, 1.5, None]}
    assert not set("<>&\u2028") & set(text)


def test_no_text_in_a_figure_is_markup_but_in_templates():
    shown = figure([{"type": "bar", "x": ["<b>x</b>"], "y": [1], "hovertemplate": "%{x}<br>"}])
    assert shown["data"][0]["x"] == ["&lt;b&gt;x&lt;/b&gt;"]
    assert shown["data"][0]["hovertemplate"] == "%{x}<br>"
    assert escaped({"title": {"text": "a<b & c"}}) == {"title": {"text": "a&lt;b &amp; c"}}


def test_a_figure_is_checked_by_the_schema_of_plotly():
    with pytest.raises(ValueError, match="no_such"):
        figure([{"type": "bar", "no_such": 1}])


def test_an_older_page_stays_where_writing_fails(evil_page, monkeypatch):
    before = evil_page.read_bytes()
    with pytest.raises(TypeError):
        write_page(evil_page, Page("title", [], [("heading", [Figure("", "", {"figure": object()})])]))
    assert evil_page.read_bytes() == before
    assert [file.name for file in evil_page.parent.iterdir()] == ["report.html"]


def test_numbers_have_the_digits_of_a_screen():
    values = [1 / 3, -123456.7, 0.0, np.nan, np.inf, 7]
    expected = [0.33333, -123460.0, 0.0, None, None, 7]
    assert rounded(values) == expected
    assert rounded(np.array(values[:5])) == expected[:5]
    assert rounded([["a", np.float32(0.25)], None]) == [["a", 0.25], None]


def test_a_column_has_one_precision_where_its_numbers_are_of_like_size(tmp_path):
    rows = [["a", 77.18, 3, 1e-6], ["b", 2.5, 10, 4.0], ["c", None, 7, 0.0]]
    write_page(tmp_path / "p.html", Page("t", [], [("h", [TableBlock("t", ["name", "x", "n", "y"], rows)])]))
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text)
    assert cells == ["a", "77.18", "3", "1e-06", "b", "2.50", "10", "4", "c", "-", "7", "0"]


# The machine.


def mesh(shape):
    return Mesh(jnp.full(num_links(shape), 1e9), jnp.zeros(num_links(shape)), shape=shape)


def loads_of(topology, names=("one", "two"), frames=3, unit="s"):
    rng = np.random.default_rng(0)
    nodes, links = topology.num_nodes, topology.num_links
    return MachineLoads(
        names=list(names),
        frames=[f"layer {frame}" for frame in range(frames)],
        node=rng.random((len(names), frames, nodes)) * 1e-5,
        link=rng.random((len(names), frames, links)) * 1e-5,
        link_ends=np.asarray(topology.link_ends),
        positions=np.asarray(topology.positions()),
        unit=unit,
        grid=topology.grid or (),
    )


def test_loads_are_read_as_they_were_written(tmp_path):
    loads = loads_of(mesh((2, 3)))
    write_loads(tmp_path / "loads.npz", loads)
    again = read_loads(tmp_path / "loads.npz")
    assert (again.names, again.frames, again.unit) == (loads.names, loads.frames, "s")
    np.testing.assert_allclose(again.node, loads.node, rtol=1e-6)
    np.testing.assert_allclose(again.link, loads.link, rtol=1e-6)
    np.testing.assert_array_equal(again.link_ends, loads.link_ends)
    assert again.grid == (2, 3)


def test_loads_of_a_version_without_grids_are_read(tmp_path):
    arrays = {key: np.asarray(value) for key, value in vars(loads_of(mesh((2, 3)))).items() if key != "grid"}
    np.savez(tmp_path / "loads.npz", **arrays)
    again = read_loads(tmp_path / "loads.npz")
    assert again.grid == ()
    assert again.sides == (2, 3)  # as its positions say


def test_a_network_without_rows_and_columns_has_axes_without_names():
    loads = loads_of(switch(4, 1e9, 0.0))
    assert loads.sides == ()
    assert "title" not in loads_block(loads, ["one"]).data["figure"]["layout"]["xaxis"]


@pytest.mark.parametrize(
    "change",
    [
        {"node": np.zeros((2, 3))},
        {"link": np.zeros((2, 3, 5))},
        {"positions": np.zeros((2, 2))},
        {"names": np.array([{}])},
        {"frames": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_loads_that_do_not_fit_are_one_error(tmp_path, change):
    arrays = {key: np.asarray(value) for key, value in vars(loads_of(mesh((2, 3)))).items()}
    arrays = {key: value for key, value in (arrays | change).items() if value is not None}
    np.savez(tmp_path / "loads.npz", **arrays)
    with pytest.raises(ReportError, match=r"loads\.npz is not as jaxmoe writes it"):
        read_loads(tmp_path / "loads.npz")


def test_arrows_stand_on_the_right_of_their_way_and_point_along_it():
    topology = mesh((2, 2))
    arrows = loads_block(loads_of(topology), ["one"]).data["figure"]["data"][2]
    positions, angle = np.asarray(topology.positions()), np.radians(arrows["marker"]["angle"])
    for (start, end), x, y, turned in zip(np.asarray(topology.link_ends), arrows["x"], arrows["y"], angle, strict=True):
        along = positions[end] - positions[start]
        np.testing.assert_allclose([np.sin(turned), -np.cos(turned)], along, atol=1e-4)  # clockwise from up, y down
        beside = np.array([x, y]) - (positions[start] + positions[end]) / 2
        assert beside @ along == pytest.approx(0, abs=1e-4)
        assert along[0] * beside[1] - along[1] * beside[0] > 0  # y runs down: this is to the right


@pytest.mark.parametrize("sides", [(4, 4), (3, 5)])
def test_links_round_the_edge_of_a_torus_have_a_place_of_their_own(sides):
    """Their line runs over those of other links; nodes are numbered as those of a mesh."""
    topology = torus(sides, 1e9, 0.0)
    block = loads_block(loads_of(topology), ["one"])
    _, nodes, arrows = block.data["figure"]["data"][:3]
    places = np.array([[*arrows["x"], *nodes["x"]], [*arrows["y"], *nodes["y"]]]).T
    apart = np.linalg.norm(places[:, None] - places, axis=-1) + np.eye(len(places))
    assert apart.min() > 0.19  # of the least distance of nodes; lanes of one pair are 0.28 apart
    assert f"Node {sides[1]} x row + column; rows go down. Outer arrows are of links round" in block.caption
    assert "Outer arrows" not in loads_block(loads_of(mesh(sides)), ["one"]).caption
    assert block.data["figure"]["layout"]["yaxis"]["title"]["text"] == "row"


def test_loads_are_told_in_a_unit_that_suits_them():
    loads = loads_of(mesh((2, 2)))
    block = loads_block(loads, ["two", "one"])
    assert block.data["shown"] == [1, 0]
    np.testing.assert_allclose(block.data["node"], loads.node * 1e6, rtol=1e-4)
    titles = [trace["marker"]["colorbar"]["title"]["text"] for trace in block.data["figure"]["data"][1:3]]
    assert titles == ["node busy time [µs]", "link busy time [µs]"]


def test_of_too_many_frames_evenly_spaced_ones_are_shown_and_told(monkeypatch):
    topology = mesh((2, 2))
    monkeypatch.setattr("jaxmoe.report.html.loads.MOST_NUMBERS", 3 * 2 * (4 + topology.num_links))
    block = loads_block(loads_of(topology, frames=9), ["one"])
    assert block.data["frames"] == ["layer 0", "layer 4", "layer 8"]
    assert "3 of 9 are shown" in block.caption


def test_switches_are_drawn_beside_nodes():
    block = loads_block(loads_of(switch(4, 1e9, 0.0)), ["one"])
    assert block.data["figure"]["data"][3]["text"] == ["switch 4"]
    assert len(block.data["figure"]["data"][1]["x"]) == 4


# Sweeps.


@pytest.mark.parametrize(
    ("key", "others", "expected"),
    [
        ("hardware.die.compute_TFLOPs_per_s", [], "compute [TFLOPs/s]"),
        ("hardware.link.bandwidth_GB_per_s", ["hardware.wafer.bandwidth_GB_per_s"], "link bandwidth [GB/s]"),
        ("hardware.link.latency_ns", [], "latency [ns]"),
        ("workload.batch_tokens", [], "batch tokens"),
        ("energy_pJ_per_B", [], "energy [pJ/B]"),
        ("total_s", [], "total [s]"),
    ],
)
def test_keys_are_told_with_their_units(key, others, expected):
    assert label_of(key, [key, *others]) == expected


def test_columns_are_numbers_on_a_scale_or_names():
    rows = [{"a": 1.0, "b": "x", "t_s": 2e-6}, {"a": 100.0, "b": "w", "t_s": 4e-6}]
    assert column(rows, "a", "a") == {"label": "a", "scale": "log", "values": [1.0, 100.0]}
    assert column(rows, "b", "b") == {"label": "b", "names": ["w", "x"], "values": [1, 0]}
    assert column(rows, "t_s", "t [s]", is_time=True) == {"label": "t [µs]", "scale": "linear", "values": [2.0, 4.0]}
    assert column([{"a": None}, {"a": 0.0}], "a", "a")["values"] == [None, 0.0]


def sweep_of(count, able, **more):
    rows = [
        {"hash": f"{at:016x}", "strategy": ("ep", "tp")[at % 2], "exchange": "ring", "size": float(at % 3)}
        | {"total_s": 1e-6 * (at + 1), "utilisation": 0.1 * at}
        for at in range(count)
    ]
    given = {
        "rows": rows,
        "points": able,
        "able": able,
        "axes": ["size", "strategy"],
        "metrics": {"total": "total_s", "utilisation": "utilisation"},
        "fronts": {("total", "utilisation"): list(range(count))},
        "best": {"total": rows[0]},
        "winners": rows[:2],
        "behind": [0.5, np.inf],
        "wins": {"ep": (1, 0.5), "tp": (1, None)},
        "worth": {"total": {"size": (-1.0, -0.5, 0.0)}},
        "limits": {"ep": {"memory: ddr": 2, "link": 1}, "tp": {"link": 3}},
        "notes": [],
    }
    return sweep_blocks(SweepData(**given | more))


def test_a_sample_is_told_and_a_whole_is_not():
    assert any("6 of 900 points" in each.text for each in sweep_of(6, 900)["Points"] if isinstance(each, Note))
    assert not [each for each in sweep_of(6, 6)["Points"] if isinstance(each, Note)]


def test_the_linked_figures_have_all_rows_and_the_front():
    (block,) = sweep_of(6, 6)["Pareto front and parallel coordinates"]
    assert len(block.data["hash"]) == 6
    assert block.data["fronts"] == [{"pair": ["total", "utilisation"], "rows": [0, 1, 2, 3, 4, 5]}]
    labels = [each["label"] for each in block.data["columns"]]
    assert labels == ["size", "total [µs]", "utilisation"]
    assert [labels[each["column"]] for each in block.data["metrics"]] == ["total [µs]", "utilisation"]


def test_the_map_has_a_colour_for_every_strategy_and_no_infinity():
    _, block = sweep_of(6, 6)["Who wins where"]
    assert block.data["winner"] == [0, 1]
    assert block.data["behind"] == [50.0, None]
    assert len(set(block.data["colours"])) == 2


def test_elasticities_reach_from_the_low_to_the_high_percentile():
    (block,) = sweep_of(6, 6)["What numbers are worth"]
    bar = block.data["figure"]["data"][0]
    assert (bar["x"], bar["error_x"]["array"], bar["error_x"]["arrayminus"]) == ([-0.5], [0.5], [0.5])


def test_a_sweep_without_any_metrics_has_its_table_alone():
    none: dict = {"rows": [], "fronts": {}, "best": {}, "winners": [], "behind": [], "wins": {}, "worth": {}}
    none |= {"limits": {}}
    assert [*sweep_of(1, 6, **none)] == ["Points"]


def test_a_sweep_and_a_step_tell_what_limits_and_what_is_counted():
    (table,) = sweep_of(3, 3)["What limits"]
    assert table.columns == ["strategy", "link", "memory: ddr"]
    assert table.rows == [["ep", 1, 2], ["tp", 3, 0]]
    step = {"step_s": 2e-3, "tokens_per_s": 4000.0, "tokens_per_s_device": 1000.0}
    (table,) = whole_model_blocks({"whole_model": {"best": {"tp": step}, "counted": "counted: all"}}, "best")
    assert (table.rows, table.columns[1]) == ([["tp", 2.0, 4000.0, 1000.0]], "a token [ms]")
    assert table.caption == "counted: all"
    assert whole_model_blocks({}, "best") == []  # a summary of an earlier version
