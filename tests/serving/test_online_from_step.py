"""Step tables from a model's own step: equal to it where they were asked, and prompts in parts."""

from dataclasses import replace

import numpy as np
import pytest
from kernels_by_hand import kernel_file

from jaxmoe.models import GroupedQueryAttention, MoEModel
from jaxmoe.serving.deployment import Deployment, DeploymentError
from jaxmoe.serving.gating import expert_loads
from jaxmoe.serving.kernels import Kernels
from jaxmoe.serving.online.from_step import step_table, with_gating
from jaxmoe.serving.online.padding import Padding
from jaxmoe.serving.online.step_table import FEATURES, StepTable
from jaxmoe.serving.step import ModelStep, StepLoad

MODEL = MoEModel(
    name="grouped",
    hidden_size=1024,
    expert_size=512,
    num_experts=8,
    top_k=2,
    moe_layer_ids=(1, 2),
    num_layers=3,
    dense_size=2048,
    attention=GroupedQueryAttention(16, 4, 64),
    vocabulary_size=1000,
)
SIZES, CONTEXTS = np.array([1.0, 8.0, 40.0, 64.0]), np.array([0.0, 64.0, 512.0])


@pytest.fixture(scope="module")
def step() -> ModelStep:
    kernels = Kernels(replace(kernel_file()), "sglang")
    return ModelStep(MODEL, Deployment("sglang", data=2, expert_ranks=2), kernels, expert_loads(8, 2, 2))


@pytest.fixture(scope="module")
def table(step) -> StepTable:
    return step_table(step, sizes=SIZES, contexts=CONTEXTS)


def batch(
    decoding: float = 0, context: float = 0, prefill: float = 0, before: float = 0, ends: float = 1
) -> np.ndarray:
    """Features of two ranks alike."""
    tokens = decoding + prefill
    values = {
        "tokens": tokens,
        "sequences": decoding + ends * (prefill > 0),
        "prefill": prefill,
        "prefill_context": before,
        "decoding": decoding,
        "context": context,
        "longest": context,
        "all_tokens": 2 * tokens,
        "most_tokens": tokens,
        "routed": tokens,
        "loaded": 0.0,
    }
    return np.array([[float(values[name]) for name in FEATURES]] * 2)


def test_it_is_the_step_itself_where_it_was_asked(step, table):
    for count in SIZES:
        for context in CONTEXTS[1:]:
            asked = table.seconds(batch(count, context))
            assert asked == pytest.approx(float(step.seconds(StepLoad(count, context))), rel=2e-5)
        asked = table.seconds(batch(prefill=count))
        assert asked == pytest.approx(float(step.seconds(StepLoad(0.0, 1.0, count, count))), rel=2e-5)


def test_prompts_beside_those_that_decode(step, table):
    asked = table.seconds(batch(8, 64, 32, ends=0))
    both = float(step.seconds(StepLoad(8.0, 64.0, 32.0, 32.0)))
    # The head of one sequence more, which a prompt has that ends.
    head = [float(step.parts(StepLoad(count, 64.0))["head"]) for count in (8.0, 9.0)]
    assert asked == pytest.approx(both - head[1] + head[0], rel=0.02)  # attention of 32 tokens is between 8 and 40


def test_the_rest_of_a_prompt_takes_what_the_whole_takes_longer_than_its_begin(step, table):
    """And no less than it would take alone, as it does here where a launch is most of it."""
    attention = StepTable(tuple(term for term in table.terms if term.name == "prefill attention"))
    for before in CONTEXTS[1:]:
        alone, begin, whole = (
            float(step.parts(StepLoad(0.0, 1.0, count, count))["prefill attention"])
            for count in (64.0, before, before + 64.0)
        )
        rest = attention.seconds(batch(prefill=64, before=before))
        assert rest == pytest.approx(max(whole - begin, alone), rel=1e-3)
    assert rest > alone


def test_where_nothing_is_read_or_decoded_attention_takes_nothing(table):
    terms = {term.name: StepTable((term,)) for term in table.terms}
    assert terms["prefill attention"].seconds(batch(8, 64)) == 0
    assert terms["decode attention"].seconds(batch(prefill=8)) == 0


def test_one_kernel_for_both_takes_longer_beside_a_prompt(step, table):
    mixed = step_table(step, sizes=SIZES, contexts=CONTEXTS, mixed_rows=128)
    assert mixed.seconds(batch(40, 512)) == pytest.approx(table.seconds(batch(40, 512)))
    assert mixed.seconds(batch(40, 512, 8)) > table.seconds(batch(40, 512, 8))
    assert mixed.seconds(batch(40, 512, 40)) - table.seconds(batch(40, 512, 40)) == pytest.approx(
        mixed.seconds(batch(40, 512, 8)) - table.seconds(batch(40, 512, 8)), rel=1e-3
    )


def test_small_steps_are_padded(step, table):
    padded = step_table(step, Padding((4, 8)), sizes=SIZES, contexts=CONTEXTS)
    heads = [float(step.parts(StepLoad(count, 64.0))["head"]) for count in (5.0, 8.0)]
    attention = [float(step.parts(StepLoad(count, 64.0))["decode attention"]) for count in (1.0, 8.0)]
    rest = table.seconds(batch(8, 64)) - heads[1] - attention[1]
    own = StepTable(tuple(term for term in padded.terms if term.name not in ("head", "decode attention")))
    assert own.seconds(batch(5, 64)) == pytest.approx(rest, rel=1e-4)


def test_kernels_that_overlap_are_refused():
    deployment = Deployment("sglang", data=4, expert_ranks=4, overlap="two_batches")
    step = ModelStep(MODEL, deployment, Kernels(kernel_file(), "sglang"), expert_loads(8, 2, 4))
    with pytest.raises(DeploymentError, match=r"deployment.overlap is two_batches"):
        step_table(step)


def test_a_model_without_experts_has_no_terms_of_them():
    dense = replace(MODEL, moe_layer_ids=(), num_experts=1, top_k=1)
    step = ModelStep(dense, Deployment("sglang"), Kernels(kernel_file(), "sglang"), expert_loads(1, 1, 1))
    assert "experts" not in {term.name for term in step_table(step, sizes=SIZES, contexts=CONTEXTS).terms}


@pytest.mark.parametrize("padding", [Padding(), Padding((4, 8))])
def test_other_loads_of_experts_are_those_of_a_step_that_has_them(step, padding):
    other = expert_loads(8, 2, 2, spread=2.0)
    own = step_table(step, padding, SIZES, CONTEXTS)
    found = with_gating(own, step, other, padding, SIZES)
    expected = step_table(replace(step, gating=other), padding, SIZES, CONTEXTS)
    assert found.seconds(batch(40, 512)) != pytest.approx(own.seconds(batch(40, 512)), rel=1e-3)
    for term, wanted in zip(found.terms, expected.terms, strict=True):
        assert term[:2] == wanted[:2]
        np.testing.assert_allclose(term.values, wanted.values, rtol=1e-6)
