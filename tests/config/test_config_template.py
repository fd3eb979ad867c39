"""A new scenario reads back as it was, and says what each of its keys stands for."""

import pickle
from typing import Literal, get_args, get_origin

import pytest

from jaxmoe.config import ConfigError, commented, load_hardware, load_scenario, new_scenario, resolved
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
