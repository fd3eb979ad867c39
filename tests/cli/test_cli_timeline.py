"""`jaxmoe validate --timeline`: what it writes, which run it shows, and the targets it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusal import told

from jaxmoe.cli import timeline, validate

pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.fixture
def target(tmp_path) -> Path:
    """A timeline in a folder of its own."""
    (tmp_path / "shown").mkdir()
    return tmp_path / "shown" / "layer.json"


def read(path):
    return json.loads(path.read_text())


def simulated(out, strategy, tokens=8):
    """Simulated seconds, [layer, batch]."""
    layers = read(out / "summary.json")["strategies"][strategy]["batch_tokens"][str(tokens)]["layers"]
    return np.array([[batch["simulated"]["total_s"] for batch in layer["batches"]] for layer in layers])


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_file_and_picture_of_the_slowest_layer(run, scenario, plan, out, target):
    result = run("validate", scenario, "--plan", plan, "--timeline", target, "--out", out)
    assert result.exit_code == 0, result.output
    assert {file.name for file in target.parent.iterdir()} == {"layer.json", "layer.png"}
    assert target.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    trace, seconds = read(target), simulated(out, "mine")
    slowest = int(seconds.mean(axis=1).argmax())
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] == "ns"
    facts = trace["otherData"]
    assert facts.pop("jaxmoe")
    assert facts.pop("total_s") == pytest.approx(seconds[slowest, 0], rel=1e-12)
    assert facts == {
        "scenario": "small",
        "strategy": "mine",
        "exchange": ["ring_both_ways", "lowest_host"][slowest],
        "layer_id": [3, 5][slowest],
        "batch": 0,
        "batch_tokens": 8,
    }
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(seconds[slowest, 0] * 1e6, abs=1e-5)
    assert {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"} == {"dispatch", "compute", "combine"}


@pytest.mark.slow
def test_a_given_plan_is_shown_before_the_usual_ones(run, scenario, plan, out, target):
    run("validate", scenario, "--standard", "--plan", plan, "--batch-tokens", "8,4", "--timeline", target, "--out", out)
    assert read(target)["otherData"]["strategy"] == "mine"
    assert read(target)["otherData"]["batch_tokens"] == 4


def test_without_a_plan_the_first_usual_one_is_shown(run, scenario, out, target):
    run("validate", scenario, "--standard", "--timeline", target, "--out", out)
    assert read(target)["otherData"]["strategy"] == "tp"


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "row"), [(3, 0), (5, 1)])
def test_any_layer_can_be_chosen(run, scenario, plan, out, target, layer, row):
    given = ("--standard", "--plan", f"a:b={plan}")
    for name in ("ep_balanced", "a:b"):
        chosen = ("--timeline", target, "--timeline-of", f"{name}:{layer}")
        assert run("validate", scenario, *given, *chosen, "--out", out).exit_code == 0
        facts = read(target)["otherData"]
        assert (facts["strategy"], facts["layer_id"]) == (name, layer)
        assert facts["total_s"] == pytest.approx(simulated(out, name)[row, 0], rel=1e-12)


def test_the_busiest_links_of_every_stage_are_drawn(run, scenario, out, target, monkeypatch):
    drawn = []
    monkeypatch.setattr(timeline, "DRAWN", 2)
    monkeypatch.setattr(timeline, "plot_gantt", lambda path, rows, *_: drawn.extend(rows))
    run("validate", scenario, "--standard", "--timeline", target, "--timeline-of", "hybrid:5", "--out", out)
    links, nodes = drawn[:2], drawn[2:]
    assert {stage for row in links for stage in row.stage} == {"dispatch", "combine"}
    assert [{*row.stage} for row in nodes] == [{"compute"}] * 2
    assert [row.label.split()[0] for row in drawn] == ["link", "link", "node", "node"]
    # The longest computation is that of the layer, and on top.
    spent = [float((row.end_s - row.begin_s).sum()) for row in nodes]
    compute = [e["dur"] for e in read(target)["traceEvents"] if e["name"] == "compute"]
    assert spent[0] >= spent[1]
    assert spent[0] * 1e6 == pytest.approx(max(compute), abs=1e-5)


def test_timeline_among_the_results(run, scenario, plan, out):
    result = run("validate", scenario, "--plan", plan, "--timeline", out / "layer.json", "--out", out)
    assert result.exit_code == 0, result.output
    assert {"layer.json", "layer.png", "summary.json"} <= {file.name for file in out.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["router.switching=cut_through", "ports.ejection_GB_per_s=5"])
def test_every_kind_of_network_has_a_timeline(run, scenario, plan, out, target, change):
    given = ("--plan", plan, "--set", f"hardware.{change}")
    result = run("validate", scenario, *given, "--timeline", target, "--out", out)
    assert result.exit_code == 0, result.output
    rows = {event["args"].get("name") for event in read(target)["traceEvents"] if event["ph"] == "M"}
    assert ("ejection port" in rows) == change.startswith("ports")


@pytest.fixture
def no_simulation(monkeypatch):
    """Fails the test if anything is simulated."""
    monkeypatch.setattr(validate, "run_trial", lambda *_: pytest.fail("simulated before the target was checked"))


def bad_targets(folder: Path) -> dict[str, tuple[Path, str]]:
    (folder / "file").write_text("mine")
    (folder / "folder.json").mkdir()
    (folder / "picture.png").mkdir()
    return {
        "no folder": (folder / "none" / "t.json", f"there is no folder {folder / 'none'}"),
        "in a file": (folder / "file" / "t.json", f"there is no folder {folder / 'file'}"),
        "a folder": (folder / "folder.json", f"{folder / 'folder.json'} is a folder"),
        "picture is a folder": (folder / "picture.json", f"{folder / 'picture.png'} is a folder"),
        "another ending": (folder / "t.txt", "ends in .json"),
        "no ending": (folder / "t", "ends in .json"),
        "that of the results": (folder / "summary.json", "another name"),
    }


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize(
    "kind",
    ["no folder", "in a file", "a folder", "picture is a folder", "another ending", "no ending", "that of the results"],
)
def test_bad_target(run, scenario, plan, out, target, kind):
    path, expected = bad_targets(target.parent)[kind]
    before = {*target.parent.rglob("*")}
    told(run("validate", scenario, "--plan", plan, "--timeline", path, "--out", out), "--timeline", expected)
    assert {*target.parent.rglob("*")} == before
    assert not out.parent.exists()


@pytest.mark.usefixtures("no_simulation")
def test_folder_that_is_not_writable(run, scenario, plan, out, target, monkeypatch):
    touch = Path.touch

    def refuse(self, *arguments, **options):
        if self.parent == target.parent:
            raise PermissionError(13, "Permission denied")
        touch(self, *arguments, **options)

    monkeypatch.setattr("jaxmoe.cli.timeline.Path.touch", refuse)
    told(run("validate", scenario, "--plan", plan, "--timeline", target, "--out", out), "Permission denied")
    assert [*target.parent.iterdir()] == []
    assert not out.parent.exists()


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("of", ["mine:4", "yours:3", "mine", "3", "mine:"])
def test_layer_that_is_not_replayed(run, scenario, plan, out, target, of):
    given = ("--plan", plan, "--timeline", target, "--timeline-of", of)
    told(run("validate", scenario, *given, "--out", out), repr(of), "STRATEGY:LAYER", "mine", "3, 5")
    assert [*target.parent.iterdir()] == []


@pytest.mark.usefixtures("no_simulation")
def test_choosing_a_layer_without_a_timeline(run, scenario, plan, out):
    told(run("validate", scenario, "--plan", plan, "--timeline-of", "mine:3", "--out", out), "without --timeline")


def test_a_failed_write_keeps_the_old_file(run, scenario, plan, out, target, monkeypatch):
    target.write_text("old")
    replace = Path.replace

    def breaks(self, other):
        if other == target:
            raise OSError(28, "No space left on device")
        return replace(self, other)

    monkeypatch.setattr("jaxmoe.cli.timeline.Path.replace", breaks)
    told(run("validate", scenario, "--plan", plan, "--timeline", target, "--out", out), "No space left")
    assert target.read_text() == "old"
    assert [file.name for file in target.parent.iterdir()] == ["layer.json"]
