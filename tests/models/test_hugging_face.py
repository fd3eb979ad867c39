"""config.json of Hugging Face: every family, the traps of each, and what is said of files that are none."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from newer import NEWER
from published import CONFIGS, SIZES
from shipped import SHIPPED

from jaxmoe.config.model import ModelConfig, build_model, describe_model
from jaxmoe.models import ModelError, MoEModel, SharedExperts, from_hugging_face, read_fields
from jaxmoe.models.hugging_face import name_of, read_json


def read_file(file: Path) -> MoEModel:
    return from_hugging_face(read_json(file), name_of(file))


def read(base: str, **changes) -> MoEModel:
    return from_hugging_face(CONFIGS[base] | changes, base)


def without(base: str, key: str) -> dict:
    return {name: value for name, value in CONFIGS[base].items() if name != key}


def complaint(config: dict) -> str:
    with pytest.raises(ModelError) as caught:
        from_hugging_face(config, "it")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_the_shipped_model(name):
    assert read(name) == SHIPPED[name]


def test_every_shipped_model_is_covered():
    assert set(SIZES) - set(CONFIGS) == {"yuan2.0-m32"}


@pytest.mark.parametrize("name", [*CONFIGS, *NEWER])
def test_the_family_of_a_model_is_not_asked(name):
    config = NEWER[name].config if name in NEWER else CONFIGS[name]
    nameless = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    assert from_hugging_face(nameless, name) == from_hugging_face(config, name)


@pytest.mark.parametrize("name", NEWER)
def test_parts_that_are_counted_have_the_published_size(name):
    published = NEWER[name]
    assert from_hugging_face(published.config, name).parameters == pytest.approx(published.counted, rel=0.005)


@pytest.mark.parametrize("name", NEWER)
def test_bytes_are_those_of_the_published_types(name):
    published = NEWER[name]
    found = from_hugging_face(published.config, name).bytes
    assert (found.experts, found.dense, found.attention, found.activations, found.kv) == published.bytes


@pytest.mark.parametrize("name", NEWER)
def test_the_rest_of_a_model_is_named(name):
    published = NEWER[name]
    told = read_fields(published.config, name).not_counted
    assert len(told) == len(published.left_out)
    assert all(needle in line for needle, line in zip(published.left_out, told, strict=True))


def test_it_is_told_what_comes_from_which_field():
    read = read_fields(NEWER["invented"].config, "it").read_from
    assert read["top_k"] == "experts_chosen_per_token"
    assert read["moe_layer_ids"] == "first_dense_blocks"
    assert read["attention"] == "attention_heads, head_width, kv_heads"
    text = read_fields(CONFIGS["llama-4-maverick"], "it").read_from
    assert text["num_experts"] == "text_config.num_local_experts"


NEEDED = {
    "model_width": ("hidden_size", "the length of a token's hidden vector", "d_model"),
    "number_of_decoder_blocks": ("num_layers", "the number of layers", "num_hidden_layers"),
    "total_experts": ("num_experts", "the number of routed experts", "n_routed_experts"),
    "experts_chosen_per_token": ("top_k", "the number of experts that a token chooses", "num_experts_per_tok, "),
    "expert_inner_width": ("expert_size", "the intermediate size of one routed expert", "moe_intermediate_size"),
}


@pytest.mark.parametrize("field", NEEDED)
def test_what_is_missing_is_asked_for_by_name(field):
    key, what, name = NEEDED[field]
    config = {name: value for name, value in NEWER["invented"].config.items() if name != field}
    said = complaint(config)
    assert said.startswith(f"no field tells {what}")
    assert name in said
    assert (
        f"write {key}: NUMBER in a YAML file with base: THIS_FILE, or give a scenario --set model.{key}=NUMBER" in said
    )
    whole = from_hugging_face(NEWER["invented"].config, "it")
    assert read_fields(config, "it", {key: getattr(whole, key)}).model == whole


def test_two_fields_that_could_be_meant_are_named():
    said = complaint(NEWER["invented"].config | {"experts_used_per_token": 2})
    assert "experts_chosen_per_token and experts_used_per_token could each be the number of experts" in said
    assert "write top_k: NUMBER in a YAML file" in said


def test_a_list_that_differs_by_layer_is_refused():
    said = complaint(NEWER["hunyuan-a13b"].config | {"moe_topk": [8] * 31 + [4]})
    assert "moe_topk is [8, 8" in said
    assert "write top_k: NUMBER in a YAML file" in said


def test_no_field_is_named_for_what_is_told_elsewhere():
    given = {"top_k": 2, "moe_layer_ids": [1, 2], "bytes": {"experts": 1}}
    read = read_fields(NEWER["invented"].config, "it", given).read_from
    assert read.keys().isdisjoint({"top_k", "moe_layer_ids"})
    assert {"num_experts", "bytes"} <= read.keys()


def test_layers_with_experts_by_lists():
    flags = [0, 0] + [1] * 90
    for stated in ({"moe_layer_freq": flags}, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 90}):
        assert from_hugging_face(
            NEWER["glm-4.5"].config | stated | {"first_k_dense_replace": 0}, "it"
        ).moe_layer_ids == (tuple(range(2, 92)))
    listed = from_hugging_face(CONFIGS["mixtral-8x7b"] | {"moe_layers_enum": "3,4,7"}, "it")
    assert listed.moe_layer_ids == (3, 4, 7)


def test_layers_of_ernie_and_jamba():
    assert from_hugging_face(NEWER["ernie-4.5-300b-a47b"].config, "it").moe_layer_ids == tuple(range(3, 54))
    every_third = NEWER["ernie-4.5-300b-a47b"].config | {"moe_layer_interval": 3, "moe_layer_end_index": 20}
    assert from_hugging_face(every_third, "it").moe_layer_ids == (5, 8, 11, 14, 17, 20)
    assert from_hugging_face(NEWER["jamba-1.5-mini"].config, "it").moe_layer_ids == tuple(range(1, 32, 2))


def test_layers_with_attention():
    """Of every four layers of one model, of every eight of another; a list of kinds says the same."""
    assert from_hugging_face(NEWER["qwen3-next-80b-a3b"].config, "it").num_attention_layers == 12
    assert from_hugging_face(NEWER["jamba-1.5-mini"].config, "it").num_attention_layers == 4
    kinds = {"layer_types": ["mamba", "mamba", "full_attention", "linear_attention"] * 8}
    assert from_hugging_face(CONFIGS["mixtral-8x7b"] | kinds, "it").num_attention_layers == 8


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_survives_its_description(name):
    model = read(name)
    assert build_model(ModelConfig.model_validate(describe_model(model))) == model


def test_kimi_is_also_published_as_deepseek():
    assert read("kimi-k2", model_type="deepseek_v3") == read("kimi-k2")


def test_the_text_model_of_llama_alone():
    text = CONFIGS["llama-4-maverick"]["text_config"]
    assert from_hugging_face(text, "llama-4-maverick") == read("llama-4-maverick")


def test_llama_without_a_list_of_layers_goes_by_the_step():
    text = CONFIGS["llama-4-maverick"]["text_config"] | {"moe_layers": None}
    assert from_hugging_face(text, "llama-4-maverick") == read("llama-4-maverick")
    every = from_hugging_face(text | {"interleave_moe_layer_step": 1}, "scout")
    assert (every.moe_layer_ids, every.dense_size) == (tuple(range(48)), None)


def test_the_list_of_llama_beats_the_step():
    text = CONFIGS["llama-4-maverick"]["text_config"] | {"moe_layers": [5, 2]}
    assert from_hugging_face(text, "it").moe_layer_ids == (2, 5)


def test_heads_need_not_split_the_hidden_vector():
    assert read("gpt-oss-20b").attention.head_size == 64 != 2880 // 64
    assert read("qwen3-235b-a22b").attention.head_size == 128 != 4096 // 64


@pytest.mark.parametrize("head_dim", [{}, {"head_dim": None}], ids=["missing", "null"])
def test_heads_split_the_hidden_vector_unless_told_otherwise(head_dim):
    assert read("mixtral-8x7b", **head_dim).attention.head_size == 4096 // 32


def test_queries_without_a_rank():
    assert read("deepseek-v2-lite").attention.q_rank is None
    assert "q_lora_rank is missing" in complaint(without("deepseek-v2", "q_lora_rank"))


def test_greedy_routing_has_no_groups():
    assert (read("deepseek-v2").expert_groups, read("deepseek-v2").groups_per_token) == (8, 3)
    greedy = read("deepseek-v2", topk_method="greedy")
    assert (greedy.expert_groups, greedy.groups_per_token) == (1, 1)


@pytest.mark.parametrize("none", [None, 0])
def test_deepseek_without_shared_experts(none):
    assert read("deepseek-v3", n_shared_experts=none).shared_experts is None


def test_shared_experts_have_a_width_of_their_own():
    assert read("qwen2-57b-a14b").shared_experts == SharedExperts(count=1, size=20480)
    assert read("qwen3-30b-a3b", shared_expert_intermediate_size=4096).shared_experts == SharedExperts(1, 4096)


def test_a_resaved_qwen3_names_its_experts_otherwise():
    config = without("qwen3-30b-a3b", "num_experts") | {"num_local_experts": 128}
    assert from_hugging_face(config, "qwen3-30b-a3b") == read("qwen3-30b-a3b")


def test_the_width_of_dense_layers_is_kept_only_where_there_are_some():
    assert read("qwen3-30b-a3b").dense_size is None
    some = read("qwen3-30b-a3b", mlp_only_layers=[0, 3])
    assert (some.dense_size, len(some.moe_layer_ids)) == (6144, 46)


@given(layers=st.integers(1, 40), step=st.integers(1, 5), dense=st.lists(st.integers(0, 39), max_size=6))
def test_layers_of_qwen(layers, step, dense):
    dense = [layer for layer in dense if layer < layers]
    changes = {"num_hidden_layers": layers, "decoder_sparse_step": step, "mlp_only_layers": dense}
    expected = [layer for layer in range(layers) if layer % step == step - 1 and layer not in dense]
    check_layers("qwen3-30b-a3b", changes, expected)


@given(layers=st.integers(1, 40), first=st.integers(0, 40), step=st.integers(1, 5))
def test_layers_of_deepseek(layers, first, step):
    changes = {"num_hidden_layers": layers, "first_k_dense_replace": first, "moe_layer_freq": step}
    check_layers("deepseek-v3", changes, [layer for layer in range(first, layers) if layer % step == 0])


def check_layers(base: str, changes: dict, expected: list[int]) -> None:
    """The layers are these, also after a description; without any the model is dense."""
    if not expected:
        assert "the model is dense" in complaint(CONFIGS[base] | changes)
        return
    model = read(base, **changes)
    assert model.moe_layer_ids == tuple(expected)
    assert model.num_layers == changes["num_hidden_layers"]
    assert (model.dense_size is None) == (len(expected) == model.num_layers)
    assert build_model(ModelConfig.model_validate(describe_model(model))) == model


# What is changed in a config, and what the message has to say.
BAD = {
    "dense": ("mixtral-8x7b", {"num_local_experts": None}, ["num_local_experts is null: the model is dense"]),
    "type": ("mixtral-8x7b", {"torch_dtype": "int3"}, ['the file is "int3"', "--set 'model.bytes={experts: NUMBER}'"]),
    "method": ("mixtral-8x7b", {"quantization_config": {"quant_method": "x"}}, ["quant_method is 'x'", "model.bytes"]),
    "text": ("mixtral-8x7b", {"hidden_size": "4096"}, ['hidden_size is "4096"', "a whole number of at least 1"]),
    "boolean": ("olmoe-1b-7b", {"vocab_size": True}, ["vocab_size is true", "a whole number", "config.json"]),
    "fraction": ("dbrx", {"n_layers": 40.0}, ["n_layers is 40.0", "a whole number"]),
    "null": ("phi-3.5-moe", {"intermediate_size": None}, ["no field tells the intermediate size of one routed expert"]),
    "zero": ("gpt-oss-20b", {"head_dim": 0}, ["head_dim is 0", "at least 1"]),
    "negative": ("deepseek-v3", {"first_k_dense_replace": -1}, ["first_k_dense_replace is -1", "at least 0"]),
    "too many": ("olmoe-1b-7b", {"num_experts_per_tok": 65}, ["num_experts_per_tok is 65", "from 1 to 64"]),
    "key heads": ("mixtral-8x7b", {"num_key_value_heads": 64}, ["num_key_value_heads is 64", "from 1 to 32"]),
    "groups": ("deepseek-v3", {"topk_group": 9}, ["topk_group is 9", "from 1 to 8"]),
    "flag": ("olmoe-1b-7b", {"tie_word_embeddings": "no"}, ['tie_word_embeddings is "no"', "true or false"]),
    "layers": ("qwen3-30b-a3b", {"mlp_only_layers": [48]}, ["mlp_only_layers is [48]", "layer numbers below 48"]),
    "no layers": ("qwen3-30b-a3b", {"mlp_only_layers": 3}, ["mlp_only_layers is 3", "a list"]),
    "section": ("dbrx", {"ffn_config": 3}, ["no field tells the number of routed experts", "moe_num_experts"]),
    "in a section": ("dbrx", {"ffn_config": {"moe_num_experts": "x"}}, ['ffn_config.moe_num_experts is "x"']),
    "dense by number": ("qwen2-57b-a14b", {"num_experts": 0}, ["num_experts is 0", "the model is dense"]),
    "dense by null": ("deepseek-v2", {"n_routed_experts": None}, ["n_routed_experts is null", "dense"]),
    "letters": (
        "olmoe-1b-7b",
        {"hybrid_override_pattern": "MEM*"},
        ["hybrid_override_pattern", "moe_layer_ids: {first: NUMBER"],
    ),
    "long": ("dbrx", {"d_model": [0] * 100}, ["d_model is [0, 0", "...", "a whole number"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_named_with_key_value_and_remedy(case):
    base, changes, needles = BAD[case]
    said = complaint(CONFIGS[base] | changes)
    for needle in needles:
        assert needle in said


def test_a_file_is_called_by_its_folder(tmp_path):
    file = tmp_path / "mine" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(CONFIGS["mixtral-8x7b"], indent="\t"))
    assert read_file(file).name == "mine"
    assert read_file(file.rename(file.with_name("other.json"))).name == "other"


DAMAGED = {
    "empty": ("", "not valid JSON"),
    "cut": ('{"model_type": "mix', "not valid JSON"),
    "binary": ("\x00\xff", "not valid JSON"),
    "list": ("[1]", "holds a list, expected an object"),
    "other": ("{}", "no field tells the number of routed experts, which a dense model does not have"),
    "deep": ("[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, case):
    text, needle = DAMAGED[case]
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ModelError) as caught:
        read_file(file)
    assert str(caught.value).startswith(needle)


def test_a_file_that_is_not_there(tmp_path: Path):
    for file, needle in [(tmp_path / "none.json", "no such file"), (tmp_path, "not readable")]:
        with pytest.raises(ModelError, match=f"^{needle}"):
            read_file(file)


def test_a_value_nested_too_deeply_to_be_shown_is_told():
    """The fuzzer found one that could be read but not written again."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "hidden_size is nested too deeply, expected" in complaint(CONFIGS["mixtral-8x7b"] | {"hidden_size": deep})
