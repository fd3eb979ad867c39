"""A scenario's model: its parts and their rules, and the files that it may be."""

import json
from pathlib import Path

import pytest

from jaxmoe.config import ConfigError, ModelConfig, Scenario, build_layer_model, build_model, load_scenario, resolved
from jaxmoe.config.model import told_reading
from jaxmoe.models import GroupedQueryAttention, LatentAttention, MoEModel, SharedExperts

WHOLE = """
num_layers: 7
shared_experts: {count: 2, size: 128}
dense_size: 512
expert_groups: 4
groups_per_token: 1
attention: {kind: latent, heads: 4, kv_rank: 16, nope_size: 8, rope_size: 4, value_size: 8}
vocabulary_size: 1000
tied_embeddings: true
"""

OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.fixture
def whole_model(tree: Path) -> Path:
    """The model of the tree with every part described."""
    file = tree / "models" / "small.yaml"
    file.write_text(file.read_text() + WHOLE)
    return file


@pytest.fixture
def hugging_face(tree: Path) -> Path:
    file = tree / "weights" / "olmoe-small" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(OLMOE))
    return file


def model_of(scenario_file: Path, *overrides: str) -> MoEModel:
    return build_model(load_scenario(scenario_file, list(overrides)).model)


def message(scenario_file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_scenario(scenario_file, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def name_model(scenario_file: Path, model: str) -> None:
    """Put another model into the scenario."""
    scenario_file.write_text(scenario_file.read_text().replace("model: small", f"model: {model}"))


def test_every_part_reaches_the_model(whole_model, scenario_file):
    assert model_of(scenario_file) == MoEModel(
        name="small",
        hidden_size=64,
        expert_size=128,
        num_experts=8,
        top_k=2,
        moe_layer_ids=(1, 3, 5),
        num_layers=7,
        shared_experts=SharedExperts(2, 128),
        dense_size=512,
        expert_groups=4,
        groups_per_token=1,
        attention=LatentAttention(heads=4, q_rank=None, kv_rank=16, nope_size=8, rope_size=4, value_size=8),
        vocabulary_size=1000,
        tied_embeddings=True,
    )


def test_a_whole_model_survives_json(whole_model, scenario_file):
    scenario = load_scenario(scenario_file)
    assert Scenario.model_validate(json.loads(json.dumps(resolved(scenario)))) == scenario


def test_no_layer_follows_the_last_with_experts_unless_told(scenario_file):
    assert model_of(scenario_file).num_layers == 6


def test_layers_of_a_range_may_be_skipped(scenario_file):
    assert model_of(scenario_file, "model.moe_layer_ids={count: 6, skip: [0, 4]}").moe_layer_ids == (1, 2, 3, 5)


def test_other_parts_leave_the_costs_of_a_layer_alone(scenario_file, tree):
    before = build_layer_model(load_scenario(scenario_file), "sharded")
    file = tree / "models" / "small.yaml"
    file.write_text(file.read_text() + WHOLE)
    after = build_layer_model(load_scenario(scenario_file), "sharded")
    assert float(before.costs.expert_bytes) == float(after.costs.expert_bytes)
    assert float(before.costs.flops_per_token_expert) == float(after.costs.flops_per_token_expert)


GROUPED = "{kind: grouped_query, heads: 4, kv_heads: 2, head_size: 16}"

# Override and what the message has to say.
BAD = {
    "model.num_layers=5": ["model.num_layers is 5", "more than 5, the last of moe_layer_ids", "Raise it"],
    "model.top_k=9": ["model.top_k is 9", "at most num_experts, 8"],
    "model.expert_groups=3": ["model.expert_groups is 3", "a divisor of num_experts, 8", "Write 1"],
    "model.groups_per_token=5": ["model.groups_per_token is 5", "at most expert_groups, 4"],
    "model.expert_groups=8": ["groups_per_token is 1", "have top_k, 2, experts together", "Raise it"],
    "model.moe_layer_ids={count: 3, skip: [3]}": ["moe_layer_ids.skip.0 is 3", "a layer of the range"],
    "model.moe_layer_ids={count: 1, skip: [0]}": ["moe_layer_ids.skip is [0]", "fewer layers", "Keep a layer"],
    "model.moe_layer_ids={count: 2, skip: [a]}": ['moe_layer_ids.skip.0 is "a"', "a whole number"],
    "model.shared_experts={count: 1}": ["model.shared_experts.size is missing", "intermediate size of one shared"],
    "model.attention.kind=flash": ['model.attention.kind is "flash"', "'grouped_query', 'latent'"],
    "model.attention.kv_rank=0": ["model.attention.kv_rank is 0", "at least 1"],
    "model.attention.head_size=64": ["model.attention.head_size is not a known key", "nope_size"],
    f"model.attention={GROUPED.replace('2', '3')}": ["model.attention.kv_heads is 3", "a divisor of heads, 4"],
    "model.vocabulary_size=-1": ["model.vocabulary_size is -1", "at least 1", "tokens in the vocabulary"],
    "model.tied_embeddings=1": ["model.tied_embeddings is 1", "true or false"],
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_part_is_named_with_key_value_and_remedy(whole_model, scenario_file, override):
    said = message(scenario_file, override)
    for needle in BAD[override]:
        assert needle in said


def test_attention_may_be_of_either_kind(whole_model, scenario_file):
    attention = model_of(scenario_file, f"model.attention={GROUPED}").attention
    assert attention == GroupedQueryAttention(heads=4, kv_heads=2, head_size=16)


@pytest.mark.parametrize("path", ["../weights/olmoe-small/config.json", "{tree}/weights/olmoe-small/config.json"])
def test_a_model_may_be_a_config_of_hugging_face(tree, scenario_file, hugging_face, path):
    name_model(scenario_file, path.format(tree=tree))
    model = model_of(scenario_file)
    assert (model.name, model.expert_size, model.moe_layer_ids) == ("olmoe-small", 32, (0, 1, 2))
    assert model.attention == GroupedQueryAttention(heads=4, kv_heads=2, head_size=16)


def test_a_path_on_the_command_line_starts_at_the_working_folder(tree, scenario_file, hugging_face, monkeypatch):
    monkeypatch.chdir(hugging_face.parent)
    assert model_of(scenario_file, "model=config.json").name == "olmoe-small"


def test_overrides_reach_into_a_config_of_hugging_face(scenario_file, hugging_face):
    model = model_of(scenario_file, "model.top_k=4", f"model={hugging_face}")
    assert (model.name, model.top_k) == ("olmoe-small", 4)


def test_a_model_may_be_the_path_of_a_yaml_file(tree, scenario_file):
    (tree / "models" / "small.yaml").rename(tree / "mine.yaml")
    name_model(scenario_file, "../mine.yaml")
    assert (model_of(scenario_file).name, model_of(scenario_file).moe_layer_ids) == ("mine", (1, 3, 5))


def test_the_content_says_what_a_file_is(tree, scenario_file):
    (tree / "models" / "small.yaml").write_text(json.dumps(OLMOE))
    assert model_of(scenario_file).expert_size == 32
    own = {"hidden_size": 4, "expert_size": 8, "num_experts": 2, "top_k": 1, "moe_layer_ids": {"count": 1}}
    (tree / "own.json").write_text(json.dumps(own))
    assert model_of(scenario_file, f"model={tree / 'own.json'}").hidden_size == 4


def test_a_bad_config_of_hugging_face_is_named(scenario_file, hugging_face):
    name_model(scenario_file, "../weights/olmoe-small/config.json")
    hugging_face.write_text(json.dumps(OLMOE | {"vocab_size": "many"}))
    assert message(scenario_file).startswith(f'{hugging_face}: vocab_size is "many", expected a whole number')
    hugging_face.write_text(json.dumps(OLMOE | {"num_experts": 0}))
    assert message(scenario_file).startswith(f"{hugging_face}: num_experts is 0: the model is dense")
    hugging_face.write_text("{")
    assert message(scenario_file).startswith(f"{hugging_face}: not valid JSON")


def test_what_a_config_does_not_tell_may_be_given(tree, scenario_file, hugging_face):
    """On the command line, or in a file that has it as its base."""
    unsaid = {key: value for key, value in OLMOE.items() if key != "num_experts_per_tok"}
    hugging_face.write_text(json.dumps(unsaid))
    asked = f"{hugging_face}: no field tells the number of experts that a token chooses; looked for num_experts_per_tok"
    assert message(scenario_file, f"model={hugging_face}").startswith(asked)
    assert model_of(scenario_file, f"model={hugging_face}", "model.top_k=3").top_k == 3
    (tree / "mine.yaml").write_text("base: weights/olmoe-small/config.json\ntop_k: 4")
    assert model_of(scenario_file, f"model={tree / 'mine.yaml'}").top_k == 4
    said = message(scenario_file, f"model={hugging_face}", "model.top_k=9")
    assert said.startswith("--set: model.top_k is 9; expected at most num_experts, 8")


def test_what_was_read_and_what_is_left_out_is_told(scenario_file, hugging_face):
    hugging_face.write_text(json.dumps(OLMOE | {"num_nextn_predict_layers": 1}))
    read, left_out = told_reading(load_scenario(scenario_file, [f"model={hugging_face}"]).model)
    assert read.startswith(
        "olmoe-small: read by its fields: num_experts 8 from num_experts; num_layers 3 from num_hidden"
    )
    assert left_out == "olmoe-small: not counted: 1 x what predicts further tokens (num_nextn_predict_layers)"
    assert told_reading(load_scenario(scenario_file).model) == []


def test_rules_of_a_scenario_hold_for_hugging_face_as_well(scenario_file, hugging_face):
    hugging_face.write_text(json.dumps(OLMOE | {"num_experts": 2**15 + 1}))
    assert message(scenario_file, f"model={hugging_face}").startswith(f"{hugging_face}: num_experts is 32769; expected")


def test_a_path_without_a_file_is_named(tree, scenario_file):
    name_model(scenario_file, "weights/config.json")
    said = message(scenario_file)
    assert said.startswith(f"{scenario_file}: model is 'weights/config.json'; expected the path of a file from")
    assert f"none at {tree / 'scenarios' / 'weights' / 'config.json'}. Correct the path" in said


def test_no_more_layers_have_attention_than_there_are(whole_model, scenario_file):
    assert model_of(scenario_file, "model.attention_layers=7").num_attention_layers == 7
    said = message(scenario_file, "model.attention_layers=8")
    assert "model.attention_layers is 8; expected at most the 7 layers" in said


def test_the_sizes_alone_are_a_valid_model():
    sizes = {"hidden_size": 4, "expert_size": 8, "num_experts": 2, "top_k": 1, "moe_layer_ids": {"count": 1}}
    model = build_model(ModelConfig.model_validate(sizes))
    assert (model.shared_experts, model.attention, model.vocabulary_size) == (None, None, None)
