"""The files that the project ships, and how files find one another."""

import json
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest
from pydantic import TypeAdapter

from jaxmoe.config import (
    HardwareConfig,
    PresetTrace,
    Scenario,
    build_layer_model,
    build_machine,
    build_model,
    build_time_model,
    build_topology,
    build_tuner_settings,
    load_hardware,
    load_scenario,
    resolved,
)
from jaxmoe.config.base import Section
from jaxmoe.config.files import find_kernels, read_mapping
from jaxmoe.config.schema import ModelConfig, WorkloadConfig
from jaxmoe.config.tuning import TuningConfig
from jaxmoe.des import fabric_of, replay_traffic
from jaxmoe.relax import HardMax
from jaxmoe.tune import TunerSettings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SCENARIOS = sorted((CONFIGS / "scenarios").rglob("*.yaml"))


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_every_scenario_loads_and_survives_json(file):
    scenario = load_scenario(file)
    assert scenario.name == file.stem
    assert Scenario.model_validate(json.loads(json.dumps(resolved(scenario)))) == scenario


@pytest.mark.parametrize("file", sorted((CONFIGS / "hardware").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_machine_builds_and_survives_json(file):
    hardware = load_hardware(file)
    assert hardware.name == file.stem
    assert TypeAdapter(HardwareConfig).validate_python(json.loads(json.dumps(resolved(hardware)))) == hardware
    topology = build_topology(hardware)
    assert topology.link_bandwidth.shape == topology.link_latency.shape == (len(topology.link_ends),)
    if hardware.die is not None:
        assert build_machine(hardware).die.flops.shape == (topology.num_nodes,)


@pytest.mark.parametrize("file", sorted((CONFIGS / "hardware").glob("nmp_*.yaml")), ids=lambda file: file.stem)
def test_every_near_memory_mesh_is_what_its_name_says(file):
    hardware = load_hardware(file)
    machine = build_machine(hardware)
    shape = tuple(int(side) for side in file.stem.split("_")[1].split("x"))
    compute, bandwidth = (2.5, 75) if "2.5T" in file.stem else (10, 25) if "10T" in file.stem else (5, 50)
    assert machine.topology.shape == shape
    assert (hardware.die.compute_TFLOPs_per_s, hardware.link.bandwidth_GB_per_s) == (compute, bandwidth)


# Nodes, switches, directed links and the numbers of the slowest and the fastest link: GB/s and ns.
NETWORKS = {
    "booksim2_base": (16, 0, 48, (1e-9, 4e9), (1e-9, 4e9)),
    "booksim2_s2": (16, 0, 48, (1e-9, 3e9), (1e-9, 3e9)),
    "camoe_4nodes": (4, 0, 12, (0.1875, 650e3), (1.25, 65e3)),
    "dgx_b200_4x8": (32, 5, 72, (400, 500), (900, 0)),
    "dgx_b200_8x8": (64, 9, 144, (400, 500), (900, 0)),
    "h100_sxm_8": (8, 1, 16, (450, 0), (450, 0)),
    "h200_sxm_8": (8, 1, 16, (450, 0), (450, 0)),
    "h200_sxm_8x4": (32, 5, 72, (322, 0), (382, 5400)),
    "b200_sxm_8": (8, 1, 16, (900, 0), (900, 0)),
    "a800_8": (8, 1, 16, (200, 0), (200, 0)),
    "gb200_nvl72": (72, 1, 144, (900, 0), (900, 0)),
    "h20_8": (8, 1, 16, (450, 0), (450, 0)),
    "h800_8": (8, 1, 16, (200, 0), (200, 0)),
    "rtxpro6000_2": (2, 1, 4, (64, 0), (64, 0)),
    "moentwine_4x4": (16, 0, 48, (1000, 0), (1000, 0)),
    "moentwine_6x6": (36, 0, 120, (1000, 0), (1000, 0)),
    "moentwine_8x8": (64, 0, 224, (1000, 0), (1000, 0)),
    "moentwine_4x8x8": (256, 0, 960, (562.5, 0), (1000, 0)),
    "moentwine_4x8x8_no_overlap": (256, 0, 960, (562.5, 0), (1000, 0)),
    "nvl72": (72, 1, 144, (900, 0), (900, 0)),
    "spine_leaf": (32, 12, 128, (50, 500), (50, 500)),
    "torus_8x8": (64, 0, 256, (50, 0), (50, 0)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_what_their_names_say(configs, name):
    topology = build_topology(load_hardware(configs / "hardware" / f"{name}.yaml"))
    nodes, switches, links, slowest, fastest = NETWORKS[name]
    assert (topology.num_nodes, len(topology.positions()), topology.num_links) == (nodes, nodes + switches, links)
    numbers = np.stack([np.asarray(topology.link_bandwidth) / 1e9, np.asarray(topology.link_latency) * 1e9], axis=1)
    order = np.lexsort([-numbers[:, 1], numbers[:, 0]])
    np.testing.assert_allclose(numbers[order[0]], slowest, rtol=1e-6)
    np.testing.assert_allclose(numbers[order[-1]], fastest, rtol=1e-6)


def test_every_kind_but_the_plainest_is_shipped():
    kinds = {load_hardware(file).kind for file in (CONFIGS / "hardware").glob("*.yaml")}
    assert kinds == {"mesh", "wafers", "torus", "switch", "clusters", "graph"}


@pytest.mark.parametrize(("router", "start", "per_hop"), [("s2", 5, 3), ("base", 6, 4)])
def test_a_lone_message_takes_the_cycles_that_booksim_counts(configs, router, start, per_hop):
    hardware = load_hardware(configs / "hardware" / f"booksim2_{router}.yaml", ["mesh_shape=[3, 5]"])
    topology, model = build_topology(hardware), build_time_model(hardware)
    traffic = np.zeros((15, 15), np.float32)
    traffic[1, 14] = 37
    cycles = start + per_hop * 5 + 37 - 1
    assert float(eqx.filter_jit(model)(topology, traffic).total(HardMax())) == cycles
    fabric = fabric_of(topology, float(hardware.router.chunk_B), cut_through=True)
    assert replay_traffic(fabric, traffic).completion_s == cycles


@pytest.mark.parametrize(
    ("folder", "section"), [("models", ModelConfig), ("workloads", WorkloadConfig)], ids=["models", "workloads"]
)
def test_every_other_file_is_valid_by_itself(folder: str, section: type[Section]):
    files = sorted((CONFIGS / folder).glob("*.yaml"))
    assert files
    for file in files:
        section.model_validate(read_mapping(file))


def test_hd_moe_is_there_for_every_model_mesh_and_point():
    grid = [file for file in SCENARIOS if file.parent.name == "hd_moe" and not file.stem.startswith("dynamic")]
    scenarios = [load_scenario(file) for file in grid]
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
    assert (model.mode, model.machine.topology.shape) == (mode, (4, 4))


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


@pytest.mark.parametrize("kind", ["file", "process"])
def test_a_trace_path_starts_at_the_file_that_names_it(tree, scenario_file, kind):
    (tree / "workloads" / "plain.yaml").write_text(f"trace: {{kind: {kind}, path: ../traces/a.npz}}\n")
    scenario = load_scenario(scenario_file)
    assert Path(scenario.workload.trace.path).resolve() == (tree / "traces" / "a.npz").resolve()


def test_a_trace_path_on_the_command_line_starts_at_the_working_folder(scenario_file):
    scenario = load_scenario(scenario_file, ["workload.trace={kind: file, path: a.npz}"])
    assert scenario.workload.trace.path == str(Path.cwd() / "a.npz")


def test_a_preset_is_a_trace(scenario_file):
    trace = load_scenario(scenario_file, ["workload.trace={kind: preset, preset: kimi-k2, seed: 4}"]).workload.trace
    assert trace == PresetTrace(kind="preset", preset="kimi-k2", tokens=8192, seed=4)


def test_the_tuner_has_one_source_of_defaults():
    assert build_tuner_settings(TuningConfig()) == TunerSettings()


@pytest.mark.parametrize("path", ["9" * 5000, "a\0b"], ids=["too long", "null"])
def test_a_path_that_cannot_be_one_is_not_there(path):
    """No file system has it; a search for what ships in its place ends all the same."""
    assert str(find_kernels(path)) == path
