"""A new scenario reads back as it was, and says what each of its keys stands for."""

import pickle
from typing import Literal, get_args, get_origin

import pytest
import yaml

from jaxmoe.config import ConfigError, commented, load_hardware, load_scenario, new_scenario, resolved
from jaxmoe.config.base import Section
from jaxmoe.config.dies import GemmConfig
from jaxmoe.config.schema import DecidingConfig
from jaxmoe.config.systems import SystemConfig

SYSTEMS = [*SystemConfig.known]


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)


def machines(configs):
    described = {path.stem: load_hardware(path) for path in sorted((configs / "hardware").glob("*.yaml"))}
    return [name for name, machine in described.items() if machine.die is not None]


def test_each_shipped_machine_and_system_reads_back_as_it_was(configs, tmp_path):
    path = tmp_path / "scenario.yaml"
    cases = [(machine, "static") for machine in machines(configs)] + [("moentwine_4x4", name) for name in SYSTEMS]
    assert len(cases) > 20
    for machine, system in cases:
        made = new_scenario("mine", machine, "mixtral-8x7b", None, system, 64)
        path.write_text(commented(made))
        assert resolved(load_scenario(path)) == resolved(made), (machine, system)
        assert pickle.loads(pickle.dumps(made)) == made


def test_every_key_of_a_system_is_there_with_what_it_stands_for(tmp_path):
    text = commented(new_scenario("mine", "moentwine_4x4", "deepseek-v3", None, "moentwine", None))
    words = " ".join(line.strip("# ") for line in text.splitlines())
    for key, field in SystemConfig.known["moentwine"].model_fields.items():
        assert f"  {key}: " in text
        assert field.description in words, key
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        assert all(choice in words for choice in choices), key
    assert max(map(len, text.splitlines())) <= 160  # of values alone


def keys_of(section: Section, at: str = "") -> set[str]:
    """The dotted keys of a section and of those in it."""
    found = set()
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{at}{field.alias or name}"
        found.add(key)
        for inner in value if isinstance(value, tuple) else (value,):
            found |= keys_of(inner, f"{key}.") if isinstance(inner, Section) else set()
    return found


def keys_in(data: object, at: str = "") -> set[str]:
    if isinstance(data, list):
        return {key for each in data for key in keys_in(each, at)}
    mapping = data if isinstance(data, dict) else {}
    return {f"{at}{key}" for key in mapping} | {k for key, v in mapping.items() for k in keys_in(v, f"{at}{key}.")}


@pytest.mark.parametrize("system", SYSTEMS)
def test_with_all_keys_it_states_each_one_and_is_the_same_run(system, tmp_path):
    made = new_scenario("mine", "moentwine_4x4", "mixtral-8x7b", None, system, 64)
    path = tmp_path / "scenario.yaml"
    path.write_text(commented(made, all_keys=True))
    assert resolved(load_scenario(path)) == resolved(made)
    stated = keys_in(yaml.safe_load(path.read_text()))
    assert keys_of(made) <= stated
    assert "hardware.die.idle_W" in stated
    assert "hardware.die.idle_W" not in keys_in(yaml.safe_load(commented(made)))


def test_what_could_stand_in_an_empty_place_is_there_as_a_comment(tmp_path):
    made = new_scenario("mine", "moentwine_4x4", "mixtral-8x7b", None, "static", 64)
    lines = commented(made, all_keys=True).splitlines()
    for place, kind in (("gemm", "tiled"), ("gemm", "measured")):
        at = next(i for i, line in enumerate(lines) if line == f"    # {place}:" and f"kind: {kind}" in lines[i + 1])
        block = [line.strip("# ") for line in lines[at : at + 8]]
        for key, field in GemmConfig.known[kind].model_fields.items():
            assert any(line.startswith(f"{key}: ") for line in block), key
            assert field.description.split()[1] in " ".join(block)
    at = lines.index("# deciding:".rjust(len("  # deciding:")))
    uncommented = yaml.safe_load("\n".join(line[4:] for line in lines[at : at + 1 + len(DecidingConfig.model_fields)]))
    assert DecidingConfig(**uncommented["deciding"])


def test_a_trace_is_named_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hardware").mkdir()
    (tmp_path / "recorded.npz").touch()
    (tmp_path / "machine.yaml").write_text(
        "mesh_shape: [1, 3]\ndie: {compute_TFLOPs_per_s: 1}\nlink: {bandwidth_GB_per_s: 10}\n"
    )
    (tmp_path / "model.yaml").write_text(
        "{hidden_size: 64, expert_size: 128, num_experts: 4, top_k: 2, moe_layer_ids: {first: 0, count: 1}}"
    )
    trace = (tmp_path / "recorded.npz").relative_to(tmp_path)
    made = new_scenario("mine", "machine.yaml", "model.yaml", trace, "static", None)
    assert made.workload.trace.path == str(tmp_path / "recorded.npz")
    assert made.strategies.hybrid_regions == 3  # two equal rectangles cannot be


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"machine": "dojo_5"}, r"--machine: hardware is 'dojo_5'.* Did you mean dojo_5x5\?"),
        ({"machine": "no_such.yaml"}, r"no_such\.yaml: no such file"),
        ({"machine": "booksim2_base"}, r"hardware\.die is null.* expected the compute and memory"),
        ({"model": "mixtrl"}, "--model: model is 'mixtrl'"),
        ({"system": "wafer"}, r"--system: system\.name is .*'wafer_gpu'"),
        ({"batch_tokens": 10**6}, r"--batch-tokens: workload\.batch_tokens is 1000000"),
        ({"trace": "no_such.npz"}, "--trace: there is no file no_such.npz"),
    ],
)
def test_what_is_not_known_is_one_clear_error(wrong, message, tmp_path):
    answers = {"machine": "dojo_5x5", "model": "mixtral-8x7b", "trace": None, "system": "static", "batch_tokens": None}
    answers |= {"trace": tmp_path / wrong["trace"]} if "trace" in wrong else wrong
    with pytest.raises(ConfigError, match=message.replace("file no_such", "file .*no_such")):
        new_scenario("mine", **answers)
