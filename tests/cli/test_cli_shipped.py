"""What ships runs: every scenario by its plain command, and all of it from a wheel, away from any clone."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.config import load_scenario
from jaxmoe.config.files import shipped_names
from jaxmoe.experiment import inputs
from jaxmoe.experiment.inputs import check_paths
from jaxmoe.experiment.simulation import check_iterations

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = shipped_names("scenarios")
MOST_MEMORY = 8 * 2**30
# The plain command, on a layer, two batches and one exchange, without pictures: all of them in full take an hour.
SHORTER = tuple(
    f"--set={setting}"
    for setting in (
        "evaluation.batches=2",
        "evaluation.iterations=2",
        "validation.batches=1",
        "tuning.exchanges=[token_home]",
    )
)


def verb_of(name: str) -> str:
    """What runs a scenario, as configs/README.md says: `serve`, `simulate` for one with a system, or `evaluate`."""
    scenario = load_scenario(name)
    if scenario.serving is not None:
        return "serve"
    return "evaluate" if scenario.system.name == "static" else "simulate"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENARIOS if verb_of(name) == "serve"])
def test_a_served_scenario_keeps_its_limits_by_its_plain_command(run, name, tmp_path):
    done = run("serve", name, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    served = load_scenario(name).serving
    assert summary["within_limits"] >= served.limits.part
    assert summary["highest_rate_per_s"] >= served.arrivals.rate_per_s


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", [name for name in SCENARIOS if verb_of(name) != "serve"])
def test_a_scenario_runs_by_its_plain_command(run, name, tmp_path):
    layer = load_scenario(name).model.moe_layer_ids.ids[0]
    done = run(verb_of(name), name, *SHORTER, "--layers", layer, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "summary.json").read_text())["layer_ids"] == [layer]


def test_every_scenario_has_the_requests_and_the_memory_that_its_iterations_take(monkeypatch):
    monkeypatch.setattr(inputs, "device_memory", lambda: MOST_MEMORY)
    for name in SCENARIOS:
        if verb_of(name) == "simulate":
            check_iterations(load_scenario(name), None, None)


@pytest.mark.parametrize(
    ("scenario", "given", "said"),
    [
        ("wafer_gpu/deepseek-v3_dojo_5x5", "iterations=100", "512 requests of 100 tokens each is more than the 176"),
        ("wafer_gpu/gpt-oss-20b_dojo_5x5", "iterations=100", "512 requests of 100 tokens each is more than the 320"),
        ("moentwine/deepseek-v3_4x8x8", "iterations=1000000", "1000000 iterations of 4096 tokens need about"),
    ],
)
def test_what_cannot_be_is_told_before_a_trace_is_drawn(run, scenario, given, said, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmoe.cli.simulate.inputs_of", lambda *_: pytest.fail("work was begun"))
    done = run("simulate", scenario, "--set", f"evaluation.{given}", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["evaluate", "tune"])
def test_batches_that_memory_does_not_hold_are_told_before_a_trace_is_drawn(run, verb, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "drawn_trace", lambda *_: pytest.fail("work was begun"))
    done = run(verb, "quickstart", "--set", "evaluation.batches=1000000000", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "1000000000 batches of 128 tokens need about" in " ".join(done.stderr.split())
    assert "lower evaluation.batches" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("verb", "scenario"), [("evaluate", "quickstart"), ("simulate", "expert_streaming/hd_moe_2x2")]
)
def test_a_mesh_whose_paths_memory_does_not_hold_is_told_before_a_trace_is_drawn(
    run, verb, scenario, tmp_path, monkeypatch
):
    """64 x 64 nodes: 4096 squared pairs, 2 (64 - 1/64) / 3 links each on average, 48 B each."""
    monkeypatch.setattr(inputs, "drawn_trace", lambda *_: pytest.fail("work was begun"))
    monkeypatch.setattr(inputs, "device_memory", lambda: 24e9)
    done = run(verb, scenario, "--set", "hardware.mesh_shape=[64,64]", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    told = "hardware has 4096 nodes; all paths between them, for the event simulator, need about 34 GB"
    assert told in " ".join(done.stderr.split())
    monkeypatch.setattr(inputs, "device_memory", lambda: 35e9)
    check_paths(load_scenario(scenario, ["hardware.mesh_shape=[64,64]"]))


def test_a_trace_that_memory_does_not_hold_is_told_before_it_is_drawn(run, tmp_path):
    done = run("evaluate", "quickstart", "--set", "workload.trace.tokens=99999999999", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "workload.trace.tokens is 99999999999; a trace of so many needs 1600 GB" in " ".join(done.stderr.split())


def test_an_empty_out_is_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("init", "--machine", "nmp_4x4", "--model", "tiny", "--out", "")
    assert done.exit_code == 2
    assert "is empty; give a folder" in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_in_place_of_a_scenario_is_told_before_anything_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmoe.cli.session.import_module", lambda *_: pytest.fail("the command was loaded"))
    done = run("evaluate", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "Is a directory" in done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this clone, unpacked where nothing else is."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True, cwd=folder)
    (built,) = folder.glob("jaxmoe-*.whl")
    with zipfile.ZipFile(built) as packed:
        packed.extractall(folder / "installed")
    return folder / "installed"


# In one process, which loads what it needs once.
TYPED = """
import json, sys
import jaxmoe
from jaxmoe.cli.app import app
print(jaxmoe.__file__)
for words in json.loads(sys.argv[1]):
    try:
        app(words.split())
    except SystemExit as end:
        assert not end.code, words
"""
QUICK = "--layers 0 --set evaluation.batches=2"
COMMANDS = (
    "list machines",
    "list scenarios",
    "init --machine nmp_4x4 --model tiny --out mine",
    f"evaluate mine/scenario.yaml {QUICK} --out evaluated",
    f"tune quickstart {QUICK} --set tuning.restarts=1 --set tuning.steps=9 --set tuning.refine_steps=9 --out tuned",
    "plan place counts.npz --slots 48 --ranks 16 --to sglang --model tiny --out placed",
    "plan check placed/placement.json --model tiny --machine nmp_4x4",
    "report tuned",
)


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_folder(wheel, tmp_path):
    """Its files are found by name; what it needs besides is that of the tests."""
    np.savez(tmp_path / "counts.npz", counts=np.arange(1, 129).reshape(4, 32))
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    command = [sys.executable, "-c", TYPED, json.dumps(COMMANDS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.partition("\n")[0]).is_relative_to(wheel)
    assert "\ndojo_5x5 " in done.stdout
    assert "\nwafer_gpu/deepseek-v3_dojo_5x5 " in done.stdout
    assert (tmp_path / "tuned" / "report.html").exists()
    assert json.loads((tmp_path / "tuned" / "summary.json").read_text())["peak_memory_B"] > 2**26
