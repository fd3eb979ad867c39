"""Counts of parameters: by hand for small models, and against the published sizes for those that are shipped."""

from dataclasses import replace

import pytest
from published import SIZES, WITHOUT_INPUT_TABLE
from shipped import SHIPPED

from jaxmoe.models import GroupedQueryAttention, LatentAttention, ModelError, MoEModel, SharedExperts

SMALL = MoEModel(
    name="small",
    hidden_size=10,
    expert_size=7,
    num_experts=8,
    top_k=2,
    moe_layer_ids=(1, 2),
    num_layers=3,
    shared_experts=SharedExperts(count=2, size=5),
    dense_size=30,
    attention=GroupedQueryAttention(heads=4, kv_heads=2, head_size=3),
    vocabulary_size=100,
)


def test_every_shipped_model_has_a_published_size():
    assert set(SHIPPED) - {"tiny"} == set(SIZES)


def active_parameters(model):
    """Weights that a token has to do with, both embedding tables in full, as most publishers count them."""
    idle = model.num_experts - model.top_k
    return model.parameters - len(model.moe_layer_ids) * idle * model.expert_parameters


@pytest.mark.parametrize("name", SIZES)
def test_a_shipped_model_has_the_published_size(name):
    model, (total, active, _) = SHIPPED[name], SIZES[name]
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.02)
    if active is not None:
        lookup = model.vocabulary_size * model.hidden_size if name in WITHOUT_INPUT_TABLE else 0
        # Most state two digits, some of them rounded down.
        assert (active_parameters(model) - lookup) / 1e9 == pytest.approx(active, rel=0.025)


# Weights of one expert in MiB at one byte each, sparse and all layers, experts chosen and all: moentwine Table I.
MOENTWINE = {
    "deepseek-v3": (42, 58, 61, 8, 256),
    "qwen3-235b-a22b": (18, 94, 94, 8, 128),
    "deepseek-v2": (22.5, 59, 60, 6, 160),
    "dbrx": (189, 40, 40, 4, 16),
    "mixtral-8x22b": (288, 56, 56, 2, 8),
}


@pytest.mark.parametrize("name", MOENTWINE)
def test_the_models_of_moentwine_are_those_of_its_table(name):
    model = SHIPPED[name]
    layers = len(model.moe_layer_ids), model.num_layers
    assert (model.expert_parameters / 2**20, *layers, model.top_k, model.num_experts) == MOENTWINE[name]


def test_every_part_is_counted():
    assert SMALL.expert_parameters == 3 * 10 * 7
    assert SMALL.shared_expert_parameters == 2 * 3 * 10 * 5
    # Queries and outputs of 4 heads, keys and values of 2.
    assert SMALL.attention_parameters == 2 * 10 * 12 + 2 * 10 * 6
    assert SMALL.embedding_parameters == 2 * 100 * 10
    moe, dense = 8 * 210 + 300 + 8 * 10, 3 * 10 * 30
    assert SMALL.parameters == 2 * moe + dense + 3 * 360 + 2000


def test_parts_that_are_absent_count_nothing():
    plain = replace(SMALL, shared_experts=None, num_layers=2, moe_layer_ids=(0, 1), dense_size=None)
    assert plain.shared_expert_parameters == 0
    assert SMALL.parameters - plain.parameters == 2 * 300 + 900 + 360


def test_tied_tables_count_once():
    assert SMALL.parameters - replace(SMALL, tied_embeddings=True).parameters == 1000


def test_latent_attention_with_and_without_a_query_rank():
    plain = LatentAttention(heads=4, q_rank=None, kv_rank=6, nope_size=5, rope_size=3, value_size=7)
    shared = 10 * (6 + 3) + 6 * 4 * (5 + 7) + 4 * 7 * 10
    assert plain.parameters(10) == 10 * 4 * 8 + shared
    assert replace(plain, q_rank=2).parameters(10) == 10 * 2 + 2 * 4 * 8 + shared


@pytest.mark.parametrize("key", ["attention", "vocabulary_size", "dense_size"])
def test_a_part_that_is_not_known_is_named(key):
    partial = replace(SMALL, **{key: None})
    with pytest.raises(ModelError, match=f"^small: {key} is not given.*add {key} to the model$"):
        _ = partial.parameters
    assert partial.expert_parameters == SMALL.expert_parameters


def test_the_sizes_alone_describe_a_model():
    tiny = SHIPPED["tiny"]
    assert (tiny.num_layers, tiny.attention, tiny.vocabulary_size) == (4, None, None)
