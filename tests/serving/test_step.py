"""Steps of whole models: parts by hand, what grows, what gradients say, and deployments that cannot be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_by_hand import LAUNCH, SHEET, kernel_file, known
from oracles.compilations import compilations

from jaxmoe.hardware.gpu.files import at_sheet
from jaxmoe.models import GroupedQueryAttention, LatentAttention, MoEModel, SharedExperts
from jaxmoe.serving.deployment import Deployment, DeploymentError, check_deployment
from jaxmoe.serving.gating import SIZES, expert_loads, loads_of_layers
from jaxmoe.serving.kernels import Kernels
from jaxmoe.serving.step import SMALL_KERNELS, SMALL_SECONDS, ModelStep, StepLoad

GROUPED = MoEModel(
    name="grouped",
    hidden_size=1024,
    expert_size=512,
    num_experts=8,
    top_k=2,
    moe_layer_ids=(1, 2),
    num_layers=3,
    shared_experts=SharedExperts(1, 256),
    dense_size=2048,
    attention=GroupedQueryAttention(16, 4, 64),
    vocabulary_size=1000,
)
LATENT = replace(GROUPED, attention=LatentAttention(16, 384, 128, 64, 32, 64))


def step_of(model: MoEModel = GROUPED, file=None, sheet=SHEET, **layout) -> ModelStep:
    deployment = Deployment("sglang", **layout)
    kernels = Kernels(replace(kernel_file() if file is None else file, sheet=sheet), "sglang")
    return ModelStep(model, deployment, kernels, expert_loads(8, 2, deployment.expert_ranks))


def test_the_head_by_hand():
    """One product [5, 1024] x [1024, 1000]: its bytes, and one wave of tiles that are least at 16 rows."""
    seconds = float(step_of().parts(StepLoad(5.0, 100.0))["head"])
    moved = (1000 * 1024 * 2 + 5 * 1024 * 2 + 5 * 1000 * 2) / 1e12
    # 16 columns of tiles on 10 processors: two waves of tiles of 16 x 64.
    tiles = 2 * 16 * 64 * 1024 * 2 / (1e14 / 10)
    assert seconds == pytest.approx(LAUNCH + moved + tiles, rel=1e-4)


def test_small_kernels_by_hand():
    seconds = float(step_of().parts(StepLoad(5.0, 100.0))["small"])
    assert seconds == pytest.approx(3 * SMALL_KERNELS * (SMALL_SECONDS + 5 * 1024 * 2 * 2 / 1e12), rel=1e-5)


def test_every_part_of_a_model_is_there():
    parts = step_of().parts(StepLoad(4.0, 100.0, 64.0, 64.0))
    wanted = "projections, decode attention, prefill attention, exchange, router, experts, shared, dense, small, head"
    assert [*parts] == wanted.split(", ")
    assert all(float(seconds) > 0 for name, seconds in parts.items() if name != "exchange")
    assert float(parts["exchange"]) == 0  # one GPU
    assert float(step_of().seconds(StepLoad(4.0, 100.0, 64.0, 64.0))) == pytest.approx(sum(map(float, parts.values())))


@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=lambda model: model.name)
def test_a_step_without_prompts_or_without_sequences_has_no_part_of_them(model):
    step = step_of(model)
    assert float(step.parts(StepLoad(4.0, 100.0))["prefill attention"]) == 0
    assert float(step.parts(StepLoad(0.0, 100.0, 64.0, 64.0))["decode attention"]) == 0
    assert float(step.seconds(StepLoad(0.0, 100.0))) == 0


def test_more_work_takes_longer():
    step, count = step_of(), jnp.array([1.0, 8.0, 64.0, 512.0])
    assert np.all(np.diff(step.seconds(StepLoad(count, 1000.0))) > 0)
    assert np.all(np.diff(step.seconds(StepLoad(8.0, 1000 * count))) > 0)
    assert np.all(np.diff(step.seconds(StepLoad(0.0, 0.0, 64 * count, 64.0))) > 0)


def test_a_part_of_a_prompt_takes_its_part_of_the_attention():
    step = step_of()
    whole, half = (float(step.parts(StepLoad(0.0, 0.0, read, 1000.0))["prefill attention"]) for read in (1000.0, 500.0))
    assert half == pytest.approx(whole / 2)


def test_a_window_bounds_what_a_layer_reads():
    windowed = replace(GROUPED, attention=replace(GROUPED.attention, window=100, windowed_layers=2))
    whole, some = (
        float(step_of(model).parts(StepLoad(64.0, 1e5))["decode attention"]) for model in (GROUPED, windowed)
    )
    assert some / whole == pytest.approx(1 / 3, rel=0.05)
    assert windowed.context_read(1000) == (1000 + 2 * 100) / 3


def test_sparse_attention_reads_no_more_than_it_picks():
    sparse = replace(LATENT, attention=replace(LATENT.attention, attends=512))
    near, far = (float(step_of(sparse).parts(StepLoad(8.0, context))["decode attention"]) for context in (512.0, 1e5))
    assert near == far


def test_tensor_parallel_gpus_have_a_part_of_the_weights_and_exchange_sums():
    batch = StepLoad(4.0, 100.0)
    one, two = step_of().parts(batch), step_of(tensor=2).parts(batch)
    assert float(two["experts"]) < float(one["experts"])
    assert float(two["exchange"]) > 0
    # Two all-reduces a layer of 4 vectors: 2 * (2 - 1) / 2 of the bytes over the link, the memory beside.
    bytes_ = 4 * 1024 * 2
    moved, tiles = bytes_ / 1e11 + bytes_ / 1e12, bytes_ / 1e11
    assert float(two["exchange"]) == pytest.approx(2 * 3 * (LAUNCH + moved + tiles), rel=1e-3)


def test_data_parallel_ranks_gather_all_tokens():
    apart, together = (step_of(data=2, expert_ranks=2).parts(StepLoad(count, 100.0)) for count in (4.0, 8.0))
    whole = step_of(tensor=2, expert_ranks=2).parts(StepLoad(8.0, 100.0))
    assert float(apart["experts"]) == pytest.approx(float(whole["experts"]))
    assert float(together["exchange"]) > float(apart["exchange"]) > 0


def test_the_gradient_by_a_number_of_the_gpu_is_its_slope():
    def seconds(bandwidth):
        sheet = replace(SHEET, bandwidth=bandwidth)
        return step_of(sheet=sheet, tensor=2).seconds(StepLoad(64.0, 2000.0, 128.0, 512.0))

    slope = jax.grad(seconds)(jnp.asarray(1e12))
    around = float(seconds(jnp.asarray(1.01e12)) - seconds(jnp.asarray(0.99e12))) / 2e10
    assert float(slope) == pytest.approx(around, rel=1e-2)
    assert slope < 0


@pytest.mark.parametrize("overlap", ["serial", "two_batches"])
def test_another_number_compiles_nothing_anew(overlap):
    def seconds(bandwidth, decoding):
        sheet = replace(SHEET, bandwidth=jnp.asarray(bandwidth))
        step = step_of(sheet=sheet, data=2, expert_ranks=2, overlap=overlap, processors=2)
        return step.seconds(StepLoad(decoding, 2000.0))

    first = float(seconds(1e12, 8.0))
    with compilations() as compiled:
        second = float(seconds(2e12, 9.0))
    assert compiled == []
    assert second != first


def test_drafts_are_passes_of_a_layer_more():
    """The first reads what the step does, a further one a token of each sequence; each ends in a head for one."""
    model = replace(GROUPED, num_layers=2)  # all have experts, as the layer that drafts
    plain, one, three = (step_of(model, drafted=count) for count in (0, 1, 3))
    batch, last = StepLoad(64.0, 2000.0, 512.0, 256.0, queries=4.0), StepLoad(64.0, 2000.0)

    def a_pass(load: StepLoad, answered: float) -> float:
        parts = plain.parts(load)
        layers = sum(float(seconds) for name, seconds in parts.items() if name != "head")
        return layers / 2 + float(plain.parts(StepLoad(answered, 9.0))["head"])

    first, further = a_pass(batch, 64 + 512 / 256), a_pass(last, 64)
    assert float(one.parts(batch)["draft"]) == pytest.approx(first, rel=1e-5)
    assert float(three.parts(batch)["draft"]) == pytest.approx(first + 2 * further, rel=1e-5)
    assert float(one.seconds(batch) - plain.seconds(batch)) == pytest.approx(first, rel=1e-4)
    alone = three.parts(StepLoad(0.0, 1.0, 512.0, 256.0))["draft"]
    assert float(alone) == pytest.approx(a_pass(StepLoad(0.0, 1.0, 512.0, 256.0), 2.0), rel=1e-5)


# Which kernel runs.


def test_another_precision_stands_in_and_is_told():
    step = step_of(products="nvfp4")
    step.parts(StepLoad(4.0, 100.0))
    assert step.kernels.notes == {"gemm: gemm_dtype bfloat16 for nvfp4"}


def test_kernels_of_another_gpu_are_told():
    kernels = at_sheet(replace(kernel_file(), system="gb200"), "b200_sxm")
    step = replace(step_of(), kernels=Kernels(kernels, "sglang"))
    step.parts(StepLoad(4.0, 100.0))
    assert "gemm: measured on gb200, scaled by data sheets" in step.kernels.notes


def test_products_of_fp8_take_the_quicker_of_both_scalings():
    """A table that timed the host tells nothing of a step that is one graph."""
    names = {"framework": "sglang", "op_name": "gemm", "kernel_source": "two"}
    slow = known("gemm", 2, 8, rows=1000, launch=1e-4, gemm_dtype="fp8_block", **names)
    quick = known("gemm", 2, 8, launch=1e-6, gemm_dtype="fp8", **names)
    both = float(step_of(file=kernel_file(slow, quick), products="fp8_block").parts(StepLoad(4.0, 9.0))["projections"])
    alone = float(step_of(file=kernel_file(slow), products="fp8_block").parts(StepLoad(4.0, 9.0))["projections"])
    assert both < alone / 10


def test_a_kernel_of_experts_without_gate_is_not_taken():
    other = known(
        "moe", 3, 8, rows=10**6, launch=1.0, framework="sglang", moe_dtype="bfloat16", op_name="moe",
        kernel_source="moe_nongated",
    )  # fmt: skip
    assert float(step_of(file=kernel_file(other)).parts(StepLoad(4.0, 9.0))["experts"]) < 1e-3


def test_a_quick_kernel_of_experts_is_for_attention_that_is_not_data_parallel():
    quick = known(
        "moe", 3, 8, rows=1, launch=1.0, framework="sglang", moe_dtype="bfloat16", op_name="moe",
        kernel_source="moe_min_latency",
    )  # fmt: skip
    whole, data_parallel = (
        float(step_of(file=kernel_file(quick), **layout).parts(StepLoad(4.0, 9.0))["experts"])
        for layout in ({"tensor": 2, "expert_ranks": 2}, {"data": 2, "expert_ranks": 2})
    )
    assert whole > 1 > 1e-3 > data_parallel


# Loads of experts.


def test_loads_are_those_of_draws():
    table = expert_loads(8, 2, 2, spread=0.0)
    loads = table(jnp.asarray(float(SIZES[-1])))
    assert float(loads.slots) == pytest.approx(SIZES[-1], rel=0.02)  # 2 choices of a token, half of them on the rank
    assert float(loads.touched) == pytest.approx(4)
    few = table(jnp.asarray(1.0))
    assert 1 <= float(few.touched) <= 2


def test_loads_beyond_the_table_grow_with_tokens():
    table = expert_loads(8, 2, 2)
    last, beyond = (table(jnp.asarray(float(count))) for count in (SIZES[-1], 4 * SIZES[-1]))
    assert float(beyond.slots) == pytest.approx(4 * float(last.slots), rel=1e-4)
    assert float(beyond.touched) == float(last.touched)


def test_a_larger_spread_touches_fewer_experts_and_loads_the_most_loaded_more():
    even, uneven = (expert_loads(64, 4, 1, spread=spread)(jnp.asarray(32.0)) for spread in (0.0, 1.5))
    assert float(uneven.touched) < float(even.touched)
    assert float(uneven.heaviest) > float(even.heaviest)


def test_loads_of_layers_are_those_of_the_most_loaded_rank_by_hand():
    """All choose expert 0 in one layer, expert 3 in the other; a rank has half of those of an expert of two copies."""
    shares, tokens = np.array([[1.0, 0, 0, 0], [0, 0, 0, 1.0]]), float(SIZES[4])
    once = loads_of_layers(shares, np.array([[0, 1, 2, 3], [0, 1, 2, 3]]), 1, 2)(jnp.asarray(tokens))
    assert float(once.slots) == float(once.heaviest) == pytest.approx(tokens)
    twice = loads_of_layers(shares, np.array([[0, 1, 2, 0, 3, 1], [0, 1, 3, 2, 0, 1]]), 1, 2)(jnp.asarray(tokens))
    assert float(twice.slots) == pytest.approx((tokens / 2 + tokens) / 2)
    assert float(twice.touched) == pytest.approx(1)


# Deployments that cannot be.


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tensor": 3}, "deployment.tensor is 3; expected a divisor of the 16 heads of grouped. The nearest is 4."),
        ({"tensor": 4, "expert_ranks": 3}, "deployment.expert_ranks is 3; expected a divisor of 4 GPUs"),
        (
            {"tensor": 16, "expert_ranks": 16},
            "expert_ranks is 16; expected a divisor of the 8 experts and the 16 GPUs. The nearest is 8",
        ),
        (
            {"tensor": 4, "expert_ranks": 4, "redundant": 7},
            "of the 8 experts and 7 copies. The nearest is deployment.redundant_experts 8.",
        ),
        ({"data": 24, "expert_ranks": 8}, "tensor * data / expert_ranks is 3; expected a divisor of the expert_size"),
    ],
)
def test_a_deployment_that_cannot_be_is_told_with_the_nearest(layout, said):
    with pytest.raises(DeploymentError) as refused:
        check_deployment(GROUPED, Deployment("sglang", **layout))
    assert said in str(refused.value)


def test_ranks_of_vllm_are_all_or_none():
    with pytest.raises(DeploymentError, match="expected 1 or 4, all GPUs, as vLLM has no other"):
        check_deployment(GROUPED, Deployment("vllm", tensor=4, expert_ranks=2))
    check_deployment(GROUPED, Deployment("vllm", tensor=4, expert_ranks=4))


def test_kv_heads_are_cut_or_copied_evenly():
    with pytest.raises(DeploymentError, match="expected a divisor of the 3 KV heads, or a multiple of them"):
        check_deployment(replace(GROUPED, attention=GroupedQueryAttention(12, 3, 64)), Deployment("sglang", tensor=4))


def test_a_model_with_other_mixers_than_attention_is_refused():
    with pytest.raises(DeploymentError, match="2 of its 3 layers have another mixer of tokens"):
        check_deployment(replace(GROUPED, attention_layers=1), Deployment("sglang"))


def test_queries_without_a_rank_are_cut_as_heads_are():
    """Of hidden 1024, 16 heads of 96: one matrix of queries in place of two."""
    plain = replace(LATENT, attention=replace(LATENT.attention, q_rank=None))
    assert plain.attention.parameters(1024) - LATENT.attention.parameters(1024) == 1024 * 16 * 96 - 384 * (1024 + 1536)
    batch = StepLoad(1.0, 1.0)
    for cut in (1, 8):
        ranked, unranked = (float(step_of(m, tensor=cut).parts(batch)["decode attention"]) for m in (LATENT, plain))
        weights = 1024 * 16 * 96 / cut - 384 * (1024 + 1536 / cut)
        # Read once, and multiplied by a tile of 128 tokens.
        assert unranked - ranked == pytest.approx(3 * (weights * 2 / 1e12 + 128 * 2 * weights / 1e14), rel=1e-2)


def test_a_model_without_attention_is_refused():
    with pytest.raises(DeploymentError, match="attention is not given"):
        check_deployment(replace(GROUPED, attention=None), Deployment("sglang"))
