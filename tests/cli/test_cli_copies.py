"""Plans with copies of experts on the command line: from files and by name, and who refuses them."""

import json

import numpy as np
import pytest

from jaxmoe.hardware import Mesh
from jaxmoe.placement import Placement, write_plan
from jaxmoe.placement.regions import region_copies, regions_named

MEMORY = ("--set", "hardware.die.memory_capacity_GB=1e-3", "--set", "hardware.die.memory_bandwidth_GB_per_s=1000")
NAMED = "regions_2x1_ep"


@pytest.fixture
def copies(tmp_path):
    """The copies of regions_1x2_tp in a file."""
    made = region_copies(regions_named("regions_1x2_tp"), np.ones((2, 4)), Mesh.uniform(1e9, 0.0, shape=(2, 2)))
    path = tmp_path / "halves.npz"
    write_plan(path, Placement.of_copies(made, (2, 2), (3, 5)))
    return path


def test_regions_in_model_and_simulator(run, scenario, copies, out, tmp_path):
    target = tmp_path / "layer.json"
    plans = ("--plan", copies, "--plan", NAMED, "--plan", "regions_1x2_tp")
    result = run("validate", scenario, *MEMORY, *plans, "--timeline", target, "--out", out)
    assert result.exit_code == 0, result.output
    for text in ("halves", NAMED, "memory of a node for experts, 2 layers", "least left for KV"):
        assert text in result.stdout
    told = json.loads((out / "summary.json").read_text())["strategies"]
    assert {each["mode"] for each in told.values()} == {"copies"}
    assert told["halves"]["batch_tokens"] == told["regions_1x2_tp"]["batch_tokens"]
    assert all(
        trial["agreement"]["total"]["mean_abs_error_percent"] < 2
        for each in told.values()
        for trial in each["batch_tokens"].values()
    )
    assert json.loads(target.read_text())["otherData"]["strategy"] == "halves"


@pytest.mark.slow
def test_copies_beside_the_usual_placements(run, scenario, copies, out):
    result = run("evaluate", scenario, *MEMORY, "--plan", copies, "--out", out)
    assert result.exit_code == 0, result.output
    told = json.loads((out / "summary.json").read_text())["strategies"]
    held, twice = (told[name]["memory"] for name in ("tp", "halves"))
    assert twice["weights_most_B"] == pytest.approx(2 * held["weights_most_B"])
    assert twice["left_B"] == pytest.approx(1e6 - twice["weights_most_B"])
    assert told["halves"]["mean"]["des_total_s"] == pytest.approx(told["halves"]["mean"]["des_model_total_s"], rel=0.02)


def test_the_static_system_serves_copies_and_others_refuse_them(run, scenario, copies, out):
    system = ("--set", "system.name=static")
    result = run("simulate", scenario, *system, "--plan", copies, "--iterations", 2, "--replay", 1, "--out", out)
    assert result.exit_code == 0, result.output
    static = json.loads((out / "summary.json").read_text())["runs"]["static"]
    assert static["agreement"]["mean_abs_error_percent"] < 2
    result = run("simulate", scenario, "--set", "system.name=hd_moe", "--plan", copies, "--out", out.parent / "other")
    assert result.exit_code == 2
    assert "plan halves has copies of experts, which the system hd_moe" in result.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--plan", "regions_3_tp"), "regions_3_tp on this machine: needs equal groups of 4 nodes; use one of 1, 2, 4"),
        (
            ("--plan", "regions_2_hybrid_3"),
            "the groups of regions_2_hybrid_3 in a region: needs equal groups of 2 nodes",
        ),
        (("--plan", "{copies}", *MEMORY, "--set", "hardware.die.memory_capacity_GB=1e-5"), "halves.npz: node 0 needs"),
        (("--plan", "{copies}", "--set", "hardware.mesh_shape=[4, 2]"), "halves.npz: mesh_shape is [2, 2]"),
    ],
)
def test_copies_that_do_not_suit_the_machine_are_refused(run, scenario, copies, out, given, message):
    arguments = [str(copies) if each == "{copies}" else each for each in given]
    result = run("validate", scenario, *arguments, "--out", out)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not out.parent.exists()


def test_tuning_with_copies(run, scenario, out):
    short = ("--set", "tuning.steps=25", "--set", "tuning.restarts=1", "--set", "tuning.refine_steps=0")
    result = run("tune", scenario, *MEMORY, *short, "--copies", 2, "--out", out)
    assert result.exit_code == 0, result.output
    told = json.loads((out / "summary.json").read_text())
    assert told["strategies"]["tuned"]["mode"] == told["strategies"]["regions"]["mode"] == "copies"
    held = {name: each["memory"]["weights_mean_B"] for name, each in told["strategies"].items()}
    assert held["tuned"] == pytest.approx(2 * held["tp"])
    assert held["regions"] == pytest.approx(held["tuned"])
    assert told["tuning"]["copies"] == 2
    front = told["tuning"]["front"]
    assert [each["weights_mean_B"] for each in front] == pytest.approx([held["tp"], held["tuned"]])
    assert front[0]["time_s"] > front[1]["time_s"] == told["tuning"]["stages"]["final_s"]["mean"]
    assert "bytes against time" in result.output
    again = run("evaluate", scenario, *MEMORY, "--plan", out / "plan.npz", "--out", out.parent / "again")
    assert again.exit_code == 0, again.output
    seen = json.loads((out.parent / "again" / "summary.json").read_text())["strategies"]["plan"]["mean"]["total_s"]
    assert seen == pytest.approx(told["strategies"]["tuned"]["mean"]["total_s"], rel=1e-5)


def test_copies_that_the_machine_cannot_have_are_told_before_any_work(run, scenario, out):
    result = run("tune", scenario, "--copies", 3, "--out", out)
    assert result.exit_code != 0
    assert "--copies 3: 3 regions do not divide" in result.output.replace("\n", " ")
    assert not out.exists()
