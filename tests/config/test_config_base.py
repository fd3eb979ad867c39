"""Files with a base: what they have of it, who is named in errors, and what cannot be; and shipped files by name."""

import itertools
import tomllib
from pathlib import Path

import pytest

from jaxmoe.config import ConfigError, files, load_hardware, load_model, load_scenario
from jaxmoe.config.loader import resolved


def child(tree: Path, text: str, base: str = "mine") -> Path:
    path = tree / "hardware" / "child.yaml"
    path.write_text(f"base: {base}.yaml\n{text}")
    return path


def scenario_of(scenario_file: Path, text: str) -> Path:
    path = scenario_file.with_name("child.yaml")
    path.write_text(f"base: {scenario_file.name}\n{text}")
    return path


def message(path: Path, *overrides: str, load=load_scenario) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, list(overrides))
    return str(caught.value)


def test_a_file_is_its_base_but_for_its_own_keys(tree):
    base = load_hardware(tree / "hardware" / "mine.yaml")
    machine = load_hardware(child(tree, "link: {latency_ns: 7}\n"))
    assert machine.link.latency_ns == 7
    assert machine.link.bandwidth_GB_per_s == base.link.bandwidth_GB_per_s
    assert machine.die == base.die
    assert machine.name == "child"


def test_bases_have_bases_and_overrides_come_last(tree):
    child(tree, "link: {latency_ns: 7}\ndie: {compute_TFLOPs_per_s: 3}\n")
    grandchild = tree / "hardware" / "grandchild.yaml"
    grandchild.write_text("base: child.yaml\nname: third\nlink: {latency_ns: 8}\n")
    machine = load_hardware(grandchild, ["die.compute_TFLOPs_per_s=4"])
    assert (machine.link.latency_ns, machine.die.compute_TFLOPs_per_s, machine.name) == (8, 4, "third")


def test_lists_and_values_are_replaced(tree):
    levels = "memory: [{name: ddr, bandwidth_GB_per_s: 5}, {name: far, bandwidth_GB_per_s: 1}]\n"
    child(tree, f"die: {{memory_bandwidth_GB_per_s: null, memory_capacity_GB: null}}\n{levels}")
    other = tree / "hardware" / "other.yaml"
    other.write_text("base: child.yaml\nmemory: [{name: hbm, bandwidth_GB_per_s: 6}]\n")
    assert [level.name for level in load_hardware(other).memory] == ["hbm"]


def test_a_part_of_a_scenario_may_have_a_base(tree, scenario_file):
    child(tree, "link: {latency_ns: 7}\n")
    scenario = load_scenario(scenario_of(scenario_file, "hardware: child\nworkload: {batch_tokens: 12}\n"))
    assert scenario.hardware.link.latency_ns == 7
    assert scenario.hardware.name == "child"
    assert scenario.workload.batch_tokens == 12
    assert scenario.name == "child"
    assert resolved(scenario)["hardware"]["link"]["latency_ns"] == 7


def test_errors_name_the_file_that_has_the_key(tree, scenario_file):
    broken = child(tree, "link: {latency_ns: -7}\n")
    assert message(broken, load=load_hardware).startswith(f"{broken}: link.latency_ns is -7; expected at least 0")
    broken = child(tree, "link: {latncy_ns: 7}\n")
    assert message(broken, load=load_hardware).startswith(f"{broken}: link.latncy_ns is not a known key")
    mine = tree / "hardware" / "mine.yaml"
    mine.write_text(mine.read_text().replace("compute_TFLOPs_per_s", "compute_TFLOP_per_s"))
    child(tree, "die: {memory_capacity_GB: 3}\n")
    said = message(scenario_of(scenario_file, "hardware: child\n"))
    assert said.startswith(f"{mine}: die.compute_TFLOP_per_s is not a known key")


def test_what_is_missing_is_missing_in_the_file_that_was_named(tree):
    mine = tree / "hardware" / "mine.yaml"
    mine.write_text("".join(line for line in mine.read_text().splitlines(True) if "mesh_shape" not in line))
    path = child(tree, "link: {latency_ns: 7}\n")
    assert message(path, load=load_hardware).startswith(f"{path}: mesh_shape is missing")


def test_paths_start_at_the_file_that_has_them(tree, scenario_file):
    scenario_file.write_text(
        scenario_file.read_text().replace(
            "workload: plain", "workload: {batch_tokens: 8, trace: {kind: file, path: t.npz}}"
        )
    )
    below = scenario_file.parent / "below" / "child.yaml"
    below.parent.mkdir()
    below.write_text("base: ../one.yaml\nseed: 3\n")
    assert load_scenario(below).workload.trace.path == str(scenario_file.parent / "t.npz")
    below.write_text("base: ../one.yaml\nworkload: {trace: {path: t.npz}}\n")
    assert load_scenario(below).workload.trace.path == str(below.parent / "t.npz")


def test_bases_in_a_circle_are_one_clear_error(tree):
    mine = tree / "hardware" / "mine.yaml"
    path = child(tree, "")
    mine.write_text(f"base: child.yaml\n{mine.read_text()}")
    said = message(path, load=load_hardware)
    assert said.startswith(f"{mine}: base is 'child.yaml'; but files cannot be their own base: ")
    assert f"{path} -> {mine} -> {path}. Leave one" in said


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("mien.yaml", "base is 'mien.yaml'; there is no file {folder}/mien.yaml. Did you mean mine.yaml?"),
        ("[mine.yaml]", "base is ['mine.yaml']; expected the path of a file from {folder}. Correct it."),
        ("''", "base is ''; expected the path of a file from {folder}. Correct it."),
    ],
)
def test_a_base_that_is_none_is_one_clear_error(tree, base, said):
    path = tree / "hardware" / "child.yaml"
    path.write_text(f"base: {base}\n")
    assert message(path, load=load_hardware) == f"{path}: {said.format(folder=path.parent)}"


@pytest.mark.parametrize("base", ["mine", "mine.yaml"])
def test_a_base_may_be_named_without_its_ending(tree, base):
    path = tree / "hardware" / "child.yaml"
    path.write_text(f"base: {base}\nname: mine\n")
    assert load_hardware(path) == load_hardware(tree / "hardware" / "mine.yaml")


# Shipped files.


def test_a_shipped_file_is_a_base_by_its_name(tmp_path):
    machine = tmp_path / "dojo_5x5.yaml"  # of the same name, which is not its own base
    machine.write_text("base: dojo_5x5\nmesh_shape: [3, 5]\n")
    found = load_hardware(machine)
    assert (found.mesh_shape, found.link) == ((3, 5), load_hardware("dojo_5x5").link)
    model = tmp_path / "model.yaml"
    model.write_text("base: mixtral-8x7b\ntop_k: 1\n")
    assert load_model(str(model), "--model").top_k == 1
    machine.write_text("base: nmp_4x4.yaml\n")
    assert message(machine, load=load_hardware).endswith("Write base: nmp_4x4 for the one that ships with jaxmoe.")


def test_a_base_by_name_is_never_of_another_kind():
    kinds = [{*files.shipped_names(folder)} for folder in ("hardware", "models", "scenarios")]
    assert not any(one & other for one, other in itertools.combinations(kinds, 2))
    assert files.shipped_by_name("quickstart") == files.shipped_names("scenarios")["quickstart"]


def test_machine_and_workload_may_be_paths(tmp_path):
    (tmp_path / "m.yaml").write_text("base: nmp_4x4\n")
    (tmp_path / "w.yml").write_text("batch_tokens: 32\n")
    (tmp_path / "s.yaml").write_text("hardware: m.yaml\nmodel: tiny\nworkload: w.yml\n")
    scenario = load_scenario(tmp_path / "s.yaml")
    assert (scenario.hardware.mesh_shape, scenario.workload.batch_tokens) == ((4, 4), 32)
    (tmp_path / "s.yaml").write_text("hardware: n.yaml\nmodel: tiny\nworkload: w.yml\n")
    said = message(tmp_path / "s.yaml")
    assert "hardware is 'n.yaml'; expected the path of a file from" in said
    assert said.endswith("Correct the path, or write the name of a file in hardware/.")


def test_a_name_at_hugging_face_is_a_near_one():
    with pytest.raises(ConfigError, match=r"Did you mean deepseek-v3\?"):
        load_model("deepseek-ai/DeepSeek-V3", "--model")


def test_an_unknown_scenario_is_told_with_where_names_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean quickstart\?.*jaxmoe list scenarios"):
        load_scenario("quickstrat")
    with pytest.raises(
        ConfigError, match=r"Did you mean hd_moe/dynamic_mixtral.*no folder hd_moe either.*list scenarios"
    ):
        load_scenario("hd_moe/dynamic_mixtral")
    with pytest.raises(ConfigError, match=r"nope: no such file\. YAML files there: none\. What ships is named by"):
        load_scenario("nope")
    with pytest.raises(ConfigError, match=r"no such file\. The dojo_5x5 that ships is of another kind: give the path"):
        load_scenario("dojo_5x5")


def test_shipped_files_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_hardware("dojo_5x5").mesh_shape == (5, 5)
    assert load_hardware("nmp_4x4_2.5TFLOPs_75GBps").link.bandwidth_GB_per_s == 75
    assert load_model("mixtral-8x7b", "--model").num_experts == 8
    assert load_scenario("quickstart").name == "quickstart"
    assert load_scenario("hd_moe/dynamic_mixtral-8x7b_4x8", ["hardware=nmp_4x4"]).hardware.mesh_shape == (4, 4)
    mine = tmp_path / "mine.yaml"
    mine.write_text("hardware: nmp_4x4\nmodel: mixtral-8x7b\nworkload: mt_bench_128\nstrategies: {hybrid_regions: 2}\n")
    assert load_scenario(mine).hardware.mesh_shape == (4, 4)


def test_files_above_a_scenario_come_before_shipped_ones(tree, scenario_file):
    (tree / "hardware" / "mine.yaml").rename(tree / "hardware" / "nmp_4x4.yaml")
    own = load_scenario(scenario_file, ["hardware=nmp_4x4"]).hardware
    assert own == load_hardware(tree / "hardware" / "nmp_4x4.yaml")
    shipped = load_scenario(scenario_file, ["hardware=dojo_5x5", "strategies.hybrid_regions=5"]).hardware
    assert shipped.mesh_shape == (5, 5)
    assert "or of one that ships with jaxmoe. Did you mean dojo_5x5?" in message(scenario_file, "hardware=dojo_5x")


def test_a_file_of_ones_own_comes_before_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dojo_5x5").write_text(
        "mesh_shape: [2, 2]\ndie: {compute_TFLOPs_per_s: 1}\nlink: {bandwidth_GB_per_s: 1}\n"
    )
    assert load_hardware("dojo_5x5").mesh_shape == (2, 2)


def test_an_installed_package_has_its_files_inside(tmp_path, monkeypatch, pytestconfig):
    assert files.shipped() == pytestconfig.rootpath / "configs"
    inside = tmp_path / "jaxmoe" / "_configs"
    (inside / "hardware").mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "jaxmoe" / "config" / "files.py"))
    assert files.shipped() == inside
    (inside / "hardware" / "tiny.yaml").write_text(
        "mesh_shape: [2, 2]\ndie: {compute_TFLOPs_per_s: 1}\nlink: {bandwidth_GB_per_s: 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_hardware("tiny").mesh_shape == (2, 2)
    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"configs": "jaxmoe/_configs"}


def test_a_wrong_key_of_a_model_that_an_option_names_is_told(tmp_path, monkeypatch):
    """As in a scenario: the whole key from the top of the file."""
    monkeypatch.chdir(tmp_path)
    attention = "attention: {kind: grouped_query, heads: 4, kv_heads: 3, head_size: 16}\n"
    (tmp_path / "mine.yaml").write_text("base: mixtral-8x7b\ntopk: 900\n" + attention)
    with pytest.raises(ConfigError) as error:
        load_model("mine.yaml", "--model")
    first, second = str(error.value).splitlines()
    assert first.startswith("mine.yaml: topk is not a known key (its value is 900). Did you mean top_k?")
    assert second.startswith("mine.yaml: attention.kv_heads is 3; expected a divisor of heads")
