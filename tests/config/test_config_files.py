"""The files that the project ships, and how files find one another."""

import json
from pathlib import Path

import pytest

from jaxmoe.config import (
    Scenario,
    build_layer_model,
    build_model,
    build_platform,
    build_tuner_settings,
    load_hardware,
    load_scenario,
    resolved,
)
from jaxmoe.config.base import Section
from jaxmoe.config.schema import ModelConfig, WorkloadConfig
from jaxmoe.config.tuning import TuningConfig
from jaxmoe.config.yaml_text import read_mapping
from jaxmoe.tune import TunerSettings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SCENARIOS = sorted((CONFIGS / "scenarios").rglob("*.yaml"))


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_every_scenario_loads_and_survives_json(file):
    scenario = load_scenario(file)
    assert scenario.name == file.stem
    assert Scenario.model_validate(json.loads(json.dumps(resolved(scenario)))) == scenario


@pytest.mark.parametrize("file", sorted((CONFIGS / "hardware").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_machine_builds_and_is_what_its_name_says(file):
    hardware = load_hardware(file)
    platform = build_platform(hardware)
    shape = tuple(int(side) for side in file.stem.split("_")[1].split("x"))
    compute, bandwidth = (2.5, 75) if "2.5T" in file.stem else (10, 25) if "10T" in file.stem else (5, 50)
    assert platform.topology.shape == shape
    assert (hardware.die.compute_TFLOPs_per_s, hardware.link.bandwidth_GB_per_s) == (compute, bandwidth)


@pytest.mark.parametrize(
    ("folder", "section"), [("models", ModelConfig), ("workloads", WorkloadConfig)], ids=["models", "workloads"]
)
def test_every_other_file_is_valid_by_itself(folder: str, section: type[Section]):
    files = sorted((CONFIGS / folder).glob("*.yaml"))
    assert files
    for file in files:
        section.model_validate(read_mapping(file))


def test_hd_moe_is_there_for_every_model_mesh_and_point():
    scenarios = [load_scenario(file) for file in SCENARIOS if file.parent.name == "hd_moe"]
    assert len(scenarios) == 27
    for scenario in scenarios:
        x, y = scenario.hardware.mesh_shape
        compute, bandwidth = scenario.hardware.die.compute_TFLOPs_per_s, scenario.hardware.link.bandwidth_GB_per_s
        assert scenario.name == f"{scenario.model.name}_{x}x{y}_{compute:g}TFLOPs_{bandwidth:g}GBps"
        assert scenario.strategies.hybrid_regions == (2 if scenario.model.name == "mixtral-8x7b" else 8)
        assert scenario.costs.ffn_flops == "2hi"


def test_deepseek_leaves_out_its_dense_layer(configs):
    scenario = load_scenario(configs / "scenarios/hd_moe/deepseek-v2-lite_4x4_5TFLOPs_50GBps.yaml")
    assert build_model(scenario.model).moe_layer_ids == tuple(range(1, 27))


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_the_quickstart_builds(configs, mode):
    model = build_layer_model(load_scenario(configs / "scenarios/quickstart.yaml"), mode)
    assert (model.mode, model.platform.topology.shape) == (mode, (4, 4))


def test_a_tree_outside_the_project_works(scenario_file):
    scenario = load_scenario(scenario_file)
    assert (scenario.hardware.name, scenario.model.name, scenario.workload.name) == ("mine", "small", "plain")
    assert scenario.hardware.mesh_shape == (2, 3)


def test_the_nearest_folder_wins(tree, scenario_file):
    near = tree / "scenarios" / "models"
    near.mkdir()
    text = (tree / "models" / "small.yaml").read_text()
    (near / "small.yaml").write_text(text.replace("hidden_size: 64", "hidden_size: 65"))
    assert load_scenario(scenario_file).model.hidden_size == 65


def test_a_folder_without_yaml_files_is_passed_over(tree, scenario_file):
    (tree / "scenarios" / "models").mkdir()
    assert load_scenario(scenario_file).model.hidden_size == 64


def test_a_path_with_dots_finds_the_same_files(tree, scenario_file, monkeypatch):
    monkeypatch.chdir(tree / "models")
    assert load_scenario("../scenarios/one.yaml") == load_scenario(scenario_file)


def test_parts_may_be_written_inline(tree, scenario_file):
    model = "{hidden_size: 4, expert_size: 8, num_experts: 2, top_k: 1, moe_layer_ids: {count: 1}}"
    scenario_file.write_text(scenario_file.read_text().replace("model: small", f"model: {model}"))
    scenario = load_scenario(scenario_file)
    assert (scenario.model.name, scenario.model.num_experts) == ("one", 2)


def test_a_trace_path_starts_at_the_file_that_names_it(tree, scenario_file):
    (tree / "workloads" / "plain.yaml").write_text("trace: {kind: file, path: ../traces/a.npz}\n")
    scenario = load_scenario(scenario_file)
    assert Path(scenario.workload.trace.path).resolve() == (tree / "traces" / "a.npz").resolve()


def test_a_trace_path_on_the_command_line_starts_at_the_working_folder(scenario_file):
    scenario = load_scenario(scenario_file, ["workload.trace={kind: file, path: a.npz}"])
    assert scenario.workload.trace.path == str(Path.cwd() / "a.npz")


def test_the_tuner_has_one_source_of_defaults():
    assert build_tuner_settings(TuningConfig()) == TunerSettings()
