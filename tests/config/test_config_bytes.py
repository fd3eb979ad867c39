"""Bytes of an element: each kind reaches what it costs, the scenario's own win, and all commands have one default."""

import json
from pathlib import Path

import pytest

from jaxmoe import api
from jaxmoe.config import (
    ConfigError,
    Scenario,
    build_even_parts,
    build_layer_model,
    element_bytes,
    load_scenario,
    number_at,
    resolved,
)
from jaxmoe.experiment.replica_plans import serving_scenario

WHOLE = """
num_layers: 7
shared_experts: {count: 2, size: 128}
dense_size: 512
attention: {kind: grouped_query, heads: 4, kv_heads: 2, head_size: 16}
attention_layers: 5
vocabulary_size: 1000
"""
BYTES = "bytes: {experts: 0.5, dense: 1, attention: 3, activations: 2, kv: 0.25}"
MODEL_ALONE = ("costs.bytes_per_element=null", "costs.weight_bytes_per_element=null")


@pytest.fixture
def model_file(tree: Path) -> Path:
    file = tree / "models" / "small.yaml"
    file.write_text(file.read_text() + WHOLE + BYTES)
    return file


def test_every_kind_reaches_what_it_costs(model_file, scenario_file):
    """Hidden vectors of 64, 3 matrices of 64 x 128 in an expert, 4 query and 2 KV heads of 16 in 5 of 7 layers."""
    scenario = load_scenario(scenario_file, [*MODEL_ALONE, "workload.context_tokens=10"])
    costs = build_layer_model(scenario, "sharded").costs
    assert (float(costs.dispatch_bytes), float(costs.combine_bytes)) == (64 * 2, 64 * 2)
    assert float(costs.expert_bytes) == 3 * 64 * 128 * 0.5
    parts = build_even_parts(scenario)
    assert float(parts.attention.weight_bytes) == 5 * (2 * (4 + 2) * 16 * 64) * 3
    assert float(parts.attention.bytes_per_token) == 5 * 10 * (2 * 2 * 16) * 0.25
    assert float(parts.shared.weight_bytes) == 3 * 2 * (3 * 64 * 128) * 1
    assert float(parts.dense.weight_bytes) == 4 * (3 * 64 * 512) * 1


def test_what_the_scenario_states_wins(model_file, scenario_file):
    """Its costs have 2 bytes for hidden vectors and the cache, and 1 for all weights."""
    found = element_bytes(load_scenario(scenario_file, ["costs.dispatch_bytes_per_element=1"]))
    assert (found.experts, found.dense, found.attention, found.activations, found.kv) == (1, 1, 1, 2, 2)
    assert (found.dispatch, found.combine) == (1, 2)
    assert found.told() == ("bytes: experts 1, dense 1, attention 1, activations 2 (dispatch 1, combine 2), KV 2")


def test_one_default_for_all_commands(tree, scenario_file):
    """A scenario, a plan for a serving engine, and the interface for programs; bfloat16 where nothing is stated."""
    model = tree / "models" / "small.yaml"
    machine = tree / "hardware" / "mine.yaml"
    for text, width in (("", 2.0), ("bytes: {experts: 0.5}", 0.5)):
        model.write_text(model.read_text() + text)
        run = load_scenario(scenario_file, [*MODEL_ALONE, "model=small"])
        for scenario in (run, serving_scenario(machine, str(model), 32)):
            found = element_bytes(scenario)
            assert (found.experts, found.activations, found.dispatch, found.kv) == (width, 2, 2, 2)
        layer = api.layer(build_layer_model(run, "sharded").machine, api.model(model))
        assert float(layer.costs.expert_bytes) == 3 * 64 * 128 * width


def test_a_config_json_states_them(tree, scenario_file):
    file = tree / "config.json"
    small = {
        "num_experts": 4,
        "top_k_experts": 2,
        "hidden_size": 8,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
    }
    file.write_text(json.dumps(small | {"torch_dtype": "float32", "quantization_config": {"quant_method": "fp8"}}))
    found = element_bytes(load_scenario(scenario_file, [*MODEL_ALONE, f"model={file}"]))
    assert (found.experts, found.dense, found.attention, found.activations, found.kv) == (1, 1, 1, 4, 4)
    other = load_scenario(scenario_file, [*MODEL_ALONE, f"model={file}", "model.bytes.experts=0.5"])
    assert (element_bytes(other).experts, element_bytes(other).attention) == (0.5, 1)


def test_they_survive_json(model_file, scenario_file):
    scenario = load_scenario(scenario_file, MODEL_ALONE)
    again = Scenario.model_validate(json.loads(json.dumps(resolved(scenario))))
    assert element_bytes(again) == element_bytes(scenario)


def test_a_number_that_is_not_stated_is_none_to_start_from(scenario_file):
    with pytest.raises(
        ConfigError, match=r"costs\.bytes_per_element is null; .* --set costs\.bytes_per_element=NUMBER"
    ):
        number_at(load_scenario(scenario_file, MODEL_ALONE), "costs.bytes_per_element")
