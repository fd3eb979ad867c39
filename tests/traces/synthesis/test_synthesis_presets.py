"""That presets have the shapes of their models, and that what is drawn has the figures they aim at."""

import jax
import numpy as np
import pytest

from jaxmoe.config import build_model, load_model
from jaxmoe.traces import TraceError
from jaxmoe.traces.statistics import TOP_PAIRS, TOP_TOGETHER, count_pairs, coverage, every_pair, pairs_above
from jaxmoe.traces.synthesis import PRESETS, preset_process, sample_trace


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_are_those_of_the_model(configs, name):
    model, preset = build_model(load_model(str(configs / "models" / f"{name}.yaml"), "model")), PRESETS[name]
    assert tuple(preset.layer_ids) == model.moe_layer_ids
    for shape in ("num_experts", "top_k", "expert_groups", "groups_per_token"):
        assert getattr(preset, shape) == getattr(model, shape), shape


@pytest.mark.parametrize("name", PRESETS)
def test_facts_say_that_it_is_synthetic(name):
    facts = PRESETS[name].process(layers=1).facts
    assert all("synthetic" in fact for fact in facts.values())
    assert PRESETS[name].model in facts["model"]


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_assumed_is_a_target(name):
    targets = PRESETS[name].targets
    assert {*targets.assumed} <= {*vars(targets)} - {"assumed"}


def test_the_first_layers_are_the_same_however_many_there_are():
    two, three = (PRESETS["llama-4-maverick"].process(layers=layers) for layers in (2, 3))
    assert (two.layer_ids, three.layer_ids) == ((1, 3), (1, 3, 5))
    for name, table in vars(two.preferences).items():
        longer = np.asarray(getattr(three.preferences, name))
        np.testing.assert_array_equal(
            longer[:, :2] if name in ("topics", "phases", "first_tokens") else longer[:2], table
        )
    np.testing.assert_array_equal(two.requests.topics, three.requests.topics)


def test_a_named_preset_has_all_layers():
    process = preset_process("llama-4-maverick")
    assert process.layer_ids == tuple(range(1, 48, 2))
    again = PRESETS["llama-4-maverick"].process(seed=0, layers=24)
    for a, b in zip(jax.tree.leaves(process.preferences), jax.tree.leaves(again.preferences), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_unknown_name_lists_the_names():
    with pytest.raises(TraceError) as caught:
        preset_process("gpt-2")
    assert all(text in str(caught.value) for text in ("'gpt-2'", *PRESETS))


def test_requests_are_prompts_and_answers_of_many_lengths():
    requests = PRESETS["kimi-k2"].process(layers=1).requests
    answer = requests.length - requests.prompt
    assert (requests.prompt > 0).all()
    assert (answer > 0).all()
    assert len(set(requests.length.tolist())) > 200
    # A stretch keeps the topic of the one before with a chance of 0.8, and draws it again of 16.
    stays = (requests.topics[:, 1:] == requests.topics[:, :-1]).mean()
    assert stays == pytest.approx(0.8 + 0.2 / 16, abs=0.02)


def test_groups_of_deepseek_v3_are_kept_to():
    experts = sample_trace(PRESETS["deepseek-v3"].process(layers=1), 512, seed=0).experts
    groups = (experts[..., None] // 32 == np.arange(8)).any(axis=2).sum(axis=2)
    assert groups.max() == 4


@pytest.mark.slow
def test_drawn_traces_have_the_figures_that_are_aimed_at():
    preset = PRESETS["qwen3-235b-a22b"]
    counts = count_pairs(sample_trace(preset.process(layers=6), 8192, seed=1))
    found = {
        "layer_pair_coverage_top20": coverage(every_pair(counts.layer_pairs), TOP_PAIRS).mean(),
        "token_pair_coverage_top20": coverage(every_pair(counts.token_pairs), TOP_PAIRS).mean(),
        "coactivation_coverage_top10": coverage(pairs_above(counts.together), TOP_TOGETHER).mean(),
    }
    for name, value in found.items():
        assert value == pytest.approx(getattr(preset.targets, name), abs=0.04), name
    busiest = (counts.load.max(axis=1) / counts.load.mean(axis=1)).mean()
    assert busiest == pytest.approx(preset.targets.load_max_over_mean, rel=0.15)
