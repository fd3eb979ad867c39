"""DeviceMemory and what users wait for: by hand, in limits, and against a loop that plays requests one by one."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import GROUPED, LATENT, step_of

from jaxmoe.serving.closed_loop import BACKENDS, Backend, Loop, Overheads, Users, serve, tokens_of_step, wait
from jaxmoe.serving.deployment import Deployment, DeploymentError
from jaxmoe.serving.launch import engine_options, launch_line
from jaxmoe.serving.memory import WORKSPACE, cache_bytes, memory_of
from jaxmoe.serving.step import StepLoad

TURNS = Backend(chunk=1024, mixes=False, seats=64, memory_part=0.9)


def test_weights_and_cache_by_hand():
    memory = memory_of(GROUPED, Deployment("sglang", tensor=2), 1e10, 1000)
    assert memory.experts == 2 * 8 * 3 * 1024 * 512 * 2 / 2
    attention = 3 * 2 * (16 + 4) * 64 * 1024
    others = (attention + 3 * 1024 * 2048 + 2 * 3 * 1024 * 256 + 2 * 1000 * 1024) * 2 / 2
    assert memory.other_weights == others + 2 * 8 * 1024 * 2
    assert memory.cache_per_sequence == 3 * 2 * 2 * 64 * 1000 * 2  # two of four heads on a GPU
    assert memory.sequences == (1e10 - WORKSPACE - memory.experts - memory.other_weights) / memory.cache_per_sequence


def test_latent_vectors_are_on_every_gpu_and_windows_are_kept_alone():
    assert cache_bytes(LATENT, Deployment("sglang", tensor=4), 1000) == 3 * (128 + 32) * 1000 * 2
    windowed = replace(GROUPED, attention=replace(GROUPED.attention, window=100, windowed_layers=2))
    assert cache_bytes(windowed, Deployment("sglang"), 1000) == 2 * 4 * 64 * (1000 + 2 * 100) * 2


def test_copies_of_experts_take_room():
    one, two = (memory_of(GROUPED, Deployment("sglang"), 1e10, 1000, copies) for copies in (1.0, 2.0))
    assert two.experts == 2 * one.experts
    assert two.sequences < one.sequences


def test_what_does_not_fit_is_told_with_what_takes_the_room():
    with pytest.raises(DeploymentError, match=r"grouped does not fit on 1 GPUs of 4.0 usable GB: experts 0.1 GB"):
        memory_of(GROUPED, Deployment("sglang"), 4e9, 1000)


def test_the_nearest_layout_that_fits_is_told():
    """86 MB of weights: a half of them leaves room, and the fewest GPUs come first."""
    capacity = WORKSPACE + 70e6
    with pytest.raises(
        DeploymentError, match=r"It fits with deployment\.tensor 2, data 1 and expert_ranks 1, on 2 GPUs"
    ):
        memory_of(GROUPED, Deployment("sglang"), capacity, 1000)
    memory_of(GROUPED, Deployment("sglang", tensor=2), capacity, 1000)


def test_a_cache_that_no_number_of_gpus_holds_has_another_remedy():
    capacity = WORKSPACE + 1e8
    with pytest.raises(DeploymentError, match=r"Take narrower weights or sequences of [\d,]+ tokens") as refused:
        memory_of(LATENT, Deployment("sglang"), capacity, 10**8)
    longest = int(re.search(r"sequences of ([\d,]+) tokens", str(refused.value))[1].replace(",", ""))
    memory_of(LATENT, Deployment("sglang"), capacity, longest)
    with pytest.raises(DeploymentError):
        memory_of(LATENT, Deployment("sglang"), capacity, longest + 1)


def test_a_single_user_waits_for_nobody():
    step = step_of()
    users = Users(1.0, 512.0, 1e6, requests=np.inf)
    served = serve(step, users, memory_of(GROUPED, step.deployment, 1e12, 1000), TURNS, Overheads())
    each, read = float(step.seconds(StepLoad(1.0, 512 + 5e5))), float(step.seconds(StepLoad(0.0, 512.0, 512.0, 512.0)))
    assert float(served.per_token) == pytest.approx(each, rel=1e-3)
    assert float(served.first_token) == pytest.approx(read + each / 2, rel=1e-2)


def test_constants_add_up():
    loop = Loop(8.0, 100.0, 2.0, 0.01, 0.02, 0.0, False, np.inf)
    bare, loaded = wait(loop, Overheads()), wait(loop, Overheads(step=0.001, prompts=2.0, request=0.5))
    assert float(bare.per_token) == pytest.approx(0.01 + 7 * 2 * 0.02 / 100)
    assert float(loaded.per_token) == pytest.approx(0.011 + 7 * 2 * (2 * 0.02 + 0.001) / 100)
    assert float(loaded.first_token) > float(bare.first_token) + 0.5


def test_requests_without_a_seat_wait_for_one():
    """In the long run, requests in flight are throughput times latency (Little)."""
    loop = Loop(16.0, 200.0, 1.0, 0.01, 0.005, 3.0, False, np.inf)
    served = wait(loop, Overheads())
    throughput = 16 / (200 * float(served.per_token))
    latency = float(served.first_token) + 200 * float(served.per_token)
    assert throughput * latency == pytest.approx(64, rel=0.02)


def played(users: int, prompt_s: float, step_s: float, output: int, requests: int) -> tuple[float, float]:
    """Seconds to the first token and per token of a backend that takes turns, request by request.

    A prompt that waits is read alone before the next step. Outputs are of `output` tokens on average, and differ; the
    next request of a user comes up to a step after the last answer.
    """
    rng = np.random.default_rng(0)
    now, waiting, running = 0.0, [(0.0, each) for each in range(users)], {}
    left, first, each = np.full(users, requests), [], []
    while waiting or running:
        waiting.sort()
        if waiting and (waiting[0][0] <= now or not running):
            since, user = waiting.pop(0)
            now = max(now, since) + prompt_s
            first.append(now - since)
            running[user] = [int(rng.integers(output // 2, output * 3 // 2)), now, 0]
            continue
        now += step_s
        for user in [*running]:
            running[user][2] += 1
            if running[user][2] == running[user][0]:
                length, began, _ = running.pop(user)
                each.append((now - began) / length)
                left[user] -= 1
                if left[user]:
                    waiting.append((now + step_s * rng.random(), user))
    return float(np.mean(first)), float(np.mean(each))


@pytest.mark.parametrize("users", [4, 32, 128])
def test_the_loop_agrees_with_requests_that_are_played(users):
    prompt_s, step_s, output, requests = 0.004, 0.01, 200, 40
    first, each = played(users, prompt_s, step_s, output, requests)
    told = wait(Loop(float(users), output, 1.0, step_s, prompt_s, 0.0, False, requests), Overheads())
    assert float(told.per_token) == pytest.approx(each, rel=0.05)
    assert float(told.first_token) == pytest.approx(first, rel=0.25)


def test_backends_that_mix_read_prompts_beside_the_others():
    step, memory = step_of(), memory_of(GROUPED, Deployment("sglang"), 1e12, 1000)
    mixed, turns = (
        serve(step, Users(64.0, 2048.0, 128.0), memory, TURNS._replace(mixes=mixes), Overheads())
        for mixes in (True, False)
    )
    assert float(mixed.per_token) < float(turns.per_token)  # weights are read once for both
    assert float(mixed.first_token) > float(turns.first_token)


def test_data_parallel_ranks_share_the_users():
    step = step_of(data=2, expert_ranks=2)
    memory = memory_of(GROUPED, step.deployment, 1e12, 1000)
    served = serve(step, Users(64.0, 512.0, 128.0), memory, BACKENDS["sglang"], Overheads())
    assert float(served.decoding) == 32
    assert float(served.tokens_per_s_device(step)) == pytest.approx(32 / float(served.per_token))


@pytest.mark.parametrize(
    ("deployment", "line"),
    [
        (
            Deployment("sglang", tensor=1, data=8, expert_ranks=8, cache="fp8"),
            "python -m sglang.launch_server --model-path m --tp 8 --dp 8 --enable-dp-attention --ep-size 8 "
            "--max-running-requests 104 --kv-cache-dtype fp8_e4m3",
        ),
        (
            Deployment(
                "sglang", data=8, expert_ranks=8, overlap="two_batches", exchange="deepep_low_latency", redundant=8
            ),
            "python -m sglang.launch_server --model-path m --tp 8 --dp 8 --enable-dp-attention --ep-size 8 "
            "--moe-a2a-backend deepep --deepep-mode low_latency --enable-two-batch-overlap --enable-eplb "
            "--ep-num-redundant-experts 8 --max-running-requests 104",
        ),
        (
            Deployment("vllm", data=8, expert_ranks=8, overlap="two_batches", exchange="deepep_normal", redundant=8),
            "vllm serve m --tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel --all2all-backend "
            "deepep_high_throughput --enable-dbo --enable-eplb --eplb-config '{\"num_redundant_experts\": 8}' "
            "--max-num-seqs 13",
        ),
        (
            Deployment("vllm", tensor=4, data=2, expert_ranks=8),
            "vllm serve m --tensor-parallel-size 4 --data-parallel-size 2 --enable-expert-parallel --max-num-seqs 50",
        ),
        (
            Deployment("sglang", tensor=8, drafted=2),
            "python -m sglang.launch_server --model-path m --tp 8 --speculative-algorithm EAGLE "
            "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3 "
            "--max-running-requests 100",
        ),
        (
            Deployment("vllm", tensor=8, drafted=1),
            "vllm serve m --tensor-parallel-size 8 --speculative-config "
            '\'{"method": "mtp", "num_speculative_tokens": 1}\' --max-num-seqs 100',
        ),
        (
            Deployment("trtllm", tensor=8),
            "trtllm-serve m --tp_size 8 --ep_size 1 --max_batch_size 100 --enable_chunked_prefill",
        ),
    ],
    ids=lambda value: getattr(value, "backend", ""),
)
def test_the_line_that_starts_an_engine(deployment, line):
    assert launch_line(deployment, "m", 100) == line


def test_options_of_an_engine_that_takes_them_from_a_file():
    apart = Deployment("trtllm", data=8, cache="fp8")
    assert launch_line(apart, "m", 64).endswith("--enable_chunked_prefill --extra_llm_api_options options.yaml")
    assert engine_options(apart) == "enable_attention_dp: true\nkv_cache_config: {dtype: fp8}"
    drafting = Deployment("trtllm", tensor=8, drafted=1)
    assert launch_line(drafting, "m", 64).endswith("--extra_llm_api_options options.yaml")
    assert engine_options(drafting) == "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1}"
    assert engine_options(Deployment("trtllm", tensor=8)) == engine_options(Deployment("vllm", data=8)) == ""


def test_ranks_of_sglang_share_a_chunk():
    assert BACKENDS["sglang"].chunk_of_rank(8) == 1024
    assert BACKENDS["vllm"].chunk_of_rank(8) == 8192
    step = step_of(data=2, expert_ranks=2)
    users, memory = Users(8.0, 1024.0, 128.0), memory_of(GROUPED, step.deployment, 1e12, 1000)
    shared, own = (
        serve(step, users, memory, TURNS._replace(divides=divides), Overheads()) for divides in (True, False)
    )
    assert float(shared.first_token) > float(own.first_token)  # in two steps, which read the weights twice


# Tokens that are drafted.


def test_tokens_of_a_step_by_hand():
    """Three drafts at a half: 1 + 1/2 + 1/4 + 1/8 tokens; none are drafted without a layer for it."""
    assert tokens_of_step(3, 0.5) == 1.875
    assert (tokens_of_step(0, 0.5), tokens_of_step(2, 1.0), tokens_of_step(2, 0.0)) == (1.0, 3.0, 1.0)


def test_drafts_divide_the_steps_of_an_output_and_not_the_prompts_that_are_read_meanwhile():
    loop = Loop(8.0, 100.0, 2.0, 0.01, 0.02, 0.0, False, np.inf)
    one, some = wait(loop, Overheads()), wait(loop._replace(tokens=1.6), Overheads())
    assert float(some.per_token) == pytest.approx(0.01 / 1.6 + 7 * 2 * 0.02 / 100)
    assert float(one.per_token) - float(some.per_token) == pytest.approx(0.01 * (1 - 1 / 1.6))


@pytest.mark.parametrize("drafted", [1, 2])
def test_users_get_tokens_of_drafts_from_steps_that_verify_them(drafted):
    """One user, whose prompt is short: a step of his sequence gives 1 + 0.8 (+ 0.64) tokens."""
    step, users = step_of(drafted=drafted), Users(1.0, 8.0, 1e6, requests=np.inf, acceptance=0.8)
    served = serve(step, users, memory_of(GROUPED, step.deployment, 1e12, 1000), TURNS, Overheads())
    each = float(step.seconds(StepLoad(1.0, 8 + 5e5, queries=1.0 + drafted)))
    assert float(served.per_token) == pytest.approx(each / sum(0.8**count for count in range(drafted + 1)), rel=1e-3)


def test_the_gradient_by_acceptance_is_its_slope():
    step = step_of(drafted=2)
    memory = memory_of(GROUPED, step.deployment, 1e12, 1000)

    def rate(acceptance):
        users = Users(64.0, 512.0, 128.0, acceptance=acceptance)
        return serve(step, users, memory, TURNS, Overheads()).tokens_per_s_device(step)

    slope = float(jax.grad(rate)(jnp.asarray(0.7)))
    assert slope == pytest.approx(float(rate(0.71) - rate(0.69)) / 0.02, rel=5e-3)
    assert slope > 0


def test_the_layer_that_drafts_takes_memory_as_a_layer_more():
    plain, drafting = (memory_of(GROUPED, Deployment("sglang", drafted=count), 1e10, 1000) for count in (0, 2))
    assert drafting.experts == plain.experts * 3 / 2  # two of its three layers have experts
    assert drafting.cache_per_sequence == plain.cache_per_sequence * 4 / 3
