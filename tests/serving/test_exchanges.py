"""Exchanges of a deployed step: how far tokens go, what they take of a GPU, and overlaps that cannot be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_by_hand import SHEET, kernel_file, known
from test_step import GROUPED, step_of

from jaxmoe.experiment.step_replay import replay_of
from jaxmoe.hardware.gpu.deepep import Links, LowLatencyKernel, NormalKernel
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile, KnownExchange
from jaxmoe.hardware.gpu.files import KernelFileError
from jaxmoe.serving.deployment import Deployment, DeploymentError, check_deployment
from jaxmoe.serving.exchanges import DeepEP
from jaxmoe.serving.gating import expert_loads
from jaxmoe.serving.kernels import Kernels
from jaxmoe.serving.step import ModelStep, StepLoad

WIDE = replace(GROUPED, num_experts=256, top_k=8, expert_groups=8, groups_per_token=4, expert_size=256)
FREE = -40.0  # the logarithm of no time


def exchange(side: str, form: type, part: str, across: str, **numbers: float) -> KnownExchange:
    """A kernel of one number, its launch, unless others are given."""
    fields = {name: jnp.float32(numbers.get(name, FREE)) for name in form.__dataclass_fields__}
    names = {"side": side, "part": part, "across": across, "version": "one"}
    return KnownExchange(names, form(**fields), (0.9, 1.1), {"rows": 1})


FILE = ExchangeFile(
    "made_up",
    "by hand",
    Links(1e9, 1e9),
    10,
    (
        # A normal dispatch at the whole rate of the links inside a node, and nothing else.
        exchange("dispatch", NormalKernel, "transmit", "node", link=30.0, network=30.0, overlap=5.0),
        exchange("combine", NormalKernel, "transmit", "node", launch=np.log(3e-4), link=30.0, network=30.0),
        exchange("dispatch", LowLatencyKernel, "avg_t", "node", launch=np.log(1e-4), link=30.0, network=30.0),
        exchange("combine", LowLatencyKernel, "avg_t", "node", launch=np.log(2e-4), link=30.0, network=30.0),
    ),
)


def wide_step(deepep: ExchangeFile | None = FILE, spread: float = 0.0, **layout) -> ModelStep:
    deployment = Deployment("sglang", data=8, expert_ranks=8, **layout)
    gating = expert_loads(256, 8, 8, spread, redundant=deployment.redundant)
    return ModelStep(WIDE, deployment, Kernels(kernel_file(), "sglang"), gating, deepep)


def test_a_dispatch_by_hand():
    """1,000 tokens of 1,056 B to the GPUs of their four groups, over links of 100 GB/s: seven of eight leave."""
    step = wide_step(exchange="deepep_normal")
    reached = 4 * (1 - np.prod([(96 - at) / (128 - at) for at in range(8)]))
    seconds = 1000 * reached * (1 - 1 / 8) * 1024 * (1 + 4 / 128) / 1e11
    assert float(step.exchange.there(jnp.asarray(1000.0)).seconds) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("ranks", [8, 32, 128])
def test_how_far_a_token_goes_is_that_of_draws(ranks):
    """Four of eight groups at random, then eight experts of these; experts lie on GPUs in turn, eight to a node."""
    rng, gpus, nodes = np.random.default_rng(0), [], []
    for _ in range(4000):
        groups = rng.choice(8, 4, replace=False)
        experts = rng.choice(128, 8, replace=False)
        at = (groups[experts // 32] * 32 + experts % 32) * ranks // 256
        gpus.append(len(set(at)))
        nodes.append(len(set(at // 8)))
    deployment = Deployment("sglang", data=ranks, expert_ranks=ranks, exchange="deepep_low_latency")
    everywhere = replace(
        FILE, exchanges=tuple(replace(e, names={**e.names, "across": "nodes"}) for e in FILE.exchanges)
    )
    file = everywhere if ranks > 8 else FILE
    deepep = DeepEP(WIDE, deployment, Kernels(kernel_file(), "sglang"), expert_loads(256, 8, ranks), file)
    assert deepep._reached(ranks) == pytest.approx(np.mean(gpus), rel=0.01)
    assert deepep._reached(deepep.nodes) == pytest.approx(np.mean(nodes), rel=0.01)


# Between GPUs that links join, over several nodes.

JOINED = replace(SHEET, node=4, domain=72)
TIMED = {
    name: known("alltoall", 2, 1, launch=launch, framework="trtllm", moe_dtype="bfloat16",
                op_name=f"alltoall_{name}", kernel_source="NVLinkTwoSided")
    for name, launch in (("prepare", 1e-5), ("dispatch", 2e-5), ("combine", 4e-5))
}  # fmt: skip


def joined_step(spread: float = 0.0, backend: str = "trtllm", sheet=JOINED, **layout) -> ModelStep:
    deployment = Deployment(backend, **({"data": 64, "expert_ranks": 64, "exchange": "all_to_all"} | layout))
    kernels = Kernels(replace(kernel_file(*TIMED.values()), sheet=sheet), backend)
    return ModelStep(WIDE, deployment, kernels, expert_loads(256, 8, 64, spread), FILE)


def test_an_all_to_all_of_a_domain_by_hand():
    """What leaves a GPU over its links, what is copied in memory, and what one pair carries, one after another."""
    exchange_ = joined_step().exchange
    reached = 32 * (1 - np.prod([(124 - at) / (128 - at) for at in range(8)]))  # GPUs of four of eight groups

    def seconds(bytes_, local, launch):
        link = 1000 * reached * bytes_ / 1e11
        return launch + link * (63 / 64 + 1 / 64) + 1000 * local / 1e12

    counts = seconds(64, (1 + reached) * 64, 1e-5)
    vectors = seconds(2048, (1 + reached) * 2048, 2e-5)
    results = seconds(2048, 9 * 2048, 4e-5)
    assert float(exchange_.there(jnp.asarray(1000.0)).seconds) == pytest.approx(counts + vectors, rel=1e-3)
    assert float(exchange_.back(jnp.asarray(1000.0)).seconds) == pytest.approx(results, rel=1e-3)


def test_one_gpu_alone_has_no_all_to_all():
    alone = joined_step(data=1, expert_ranks=1)
    assert float(alone.parts(StepLoad(64.0, 500.0))["exchange"]) == 0


def test_the_fullest_rank_decides_when_an_exchange_ends():
    """As if all had the choices of that one; the simulator replays the same."""
    even, uneven = joined_step(), joined_step(0.8)
    more = float(expert_loads(256, 8, 64, 0.8)(jnp.asarray(64 * 1000.0)).slots) / 8000
    assert more > 1.3
    taken, asked = (
        step.exchange.there(jnp.asarray(tokens)).seconds for step, tokens in ((uneven, 1000.0), (even, 1000.0 * more))
    )
    assert float(taken) == pytest.approx(float(asked), rel=1e-3)
    deepep = wide_step(exchange="deepep_normal", spread=0.8).exchange.there(jnp.asarray(1000.0)).seconds
    full = float(expert_loads(256, 8, 8, 0.8)(jnp.asarray(8000.0)).slots) / 8000
    alike = wide_step(exchange="deepep_normal").exchange.there(jnp.asarray(1000.0)).seconds
    assert float(deepep) == pytest.approx(full * float(alike), rel=1e-3)
    load = StepLoad(128.0, 500.0)
    assert replay_of(uneven, load).seconds == pytest.approx(float(uneven.seconds(load)), rel=1e-4)


def test_all_gpus_of_a_domain_are_a_node_to_deepep():
    step = joined_step(exchange="deepep_normal", backend="sglang")
    assert step.exchange.nodes == 1
    reached = 32 * (1 - np.prod([(124 - at) / (128 - at) for at in range(8)]))
    seconds = 1000 * reached * (1 - 1 / 64) * 1024 * (1 + 4 / 128) / 1e11
    assert float(step.exchange.there(jnp.asarray(1000.0)).seconds) == pytest.approx(seconds, rel=1e-3)
    with pytest.raises(KernelFileError, match="no dispatch of deepep_normal on 8 nodes"):
        joined_step(exchange="deepep_normal", backend="sglang", sheet=SHEET)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"sheet": SHEET}, "all_to_all on 64 GPUs; expected at most 8, which one domain of links joins"),
        ({"backend": "sglang"}, "all_to_all, which sglang does not have; take deepep_low_latency"),
        ({"expert_ranks": 32}, "but expert_ranks is 32; expected 64, all GPUs, or exchange collectives"),
    ],
)
def test_an_all_to_all_that_cannot_be_is_told(layout, said):
    with pytest.raises(DeploymentError) as refused:
        joined_step(**layout)
    assert said in str(refused.value)


def test_the_gradient_of_an_all_to_all_by_its_link_is_the_slope():
    def seconds(factor):
        return joined_step(0.8, sheet=replace(JOINED, link=SHEET.link * factor)).seconds(StepLoad(512.0, 500.0))

    slope = float(jax.grad(seconds)(1.0))
    assert slope == pytest.approx(float(seconds(1.01) - seconds(0.99)) / 0.02, rel=0.02)
    assert slope < 0


def test_dense_layers_of_deepep_do_not_exchange_and_hooks_take_no_processors():
    names = [
        stage.name
        for stage in wide_step(exchange="deepep_low_latency").lower(StepLoad(*map(jnp.float32, (8, 9, 0, 1, 1))))
    ]
    assert [name for name in names if "exchange" in name] == ["exchange there", "exchange back"]
    load = StepLoad(64.0, 500.0)
    serial, hooked, held = (
        float(wide_step(exchange="deepep_low_latency", overlap=overlap, processors=processors).seconds(load))
        for overlap, processors in (("serial", None), ("shared_beside_dispatch", None), ("shared_beside_dispatch", 10))
    )
    shared = float(wide_step(exchange="deepep_low_latency").parts(load)["shared"])
    assert serial - hooked == pytest.approx(shared, rel=1e-3)  # it is shorter than the way there, and hidden by it
    assert held == pytest.approx(serial, rel=1e-5)  # an exchange on all processors hides nothing


def test_processors_that_are_set_aside_slow_kernels_that_compute():
    step = wide_step(exchange="deepep_normal", overlap="two_batches", processors=5)
    assert float(step.free.sheet.bf16) == float(SHEET.bf16) / 2
    assert float(step.free.sheet.bandwidth) == float(SHEET.bandwidth)
    assert float(step.kernels.sheet.bf16) == float(SHEET.bf16)


@pytest.mark.parametrize("overlap", ["serial", "two_batches"])
def test_the_gradient_by_links_and_network_is_the_slope(overlap):
    deployment = Deployment("sglang", data=16, expert_ranks=16, exchange="deepep_normal", overlap=overlap, processors=2)
    gating = expert_loads(256, 8, 16)
    sent = {"link": 0.0, "network": 0.0, "overlap": -2.0}
    exchanges = tuple(exchange(side, NormalKernel, "transmit", "nodes", **sent) for side in ("dispatch", "combine"))

    def rate(factors):
        sheet = replace(SHEET, link=SHEET.link * factors[0], bandwidth=SHEET.bandwidth * factors[2])
        file = replace(FILE, exchanges=exchanges, links=Links(1e11, 2e10 * factors[1]))
        kernels = Kernels(replace(kernel_file(), sheet=sheet), "sglang")
        return 512.0 / ModelStep(WIDE, deployment, kernels, gating, file).seconds(StepLoad(512.0, 500.0))

    slope = jax.grad(rate)(jnp.ones(3))
    for at in range(3):
        step = 0.01 * jnp.eye(3)[at]
        around = float(rate(1 + step) - rate(1 - step)) / 0.02
        assert around > 0
        assert float(slope[at]) == pytest.approx(around, rel=0.02)


def test_exchanges_that_are_not_known_are_refused():
    with pytest.raises(KernelFileError, match=r"has no exchanges of DeepEP; take deployment\.exchange collectives"):
        wide_step(None, exchange="deepep_normal")
    deployment = Deployment("sglang", data=16, expert_ranks=16, exchange="deepep_normal")
    with pytest.raises(KernelFileError, match="no dispatch of deepep_normal on 2 nodes"):
        DeepEP(WIDE, deployment, Kernels(kernel_file(), "sglang"), expert_loads(256, 8, 16), FILE)
    deployment = Deployment("trtllm", data=8, expert_ranks=8, exchange="all_to_all")
    with pytest.raises(KernelFileError, match=r"no all-to-all between GPUs; take deployment\.exchange collectives"):
        ModelStep(WIDE, deployment, Kernels(kernel_file(), "trtllm"), expert_loads(256, 8, 8))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"data": 4, "exchange": "deepep_normal"}, "expert_ranks is 1; expected 4, all GPUs, or exchange collectives"),
        (
            {"data": 4, "expert_ranks": 4, "exchange": "deepep_normal", "processors": 0},
            "expected at least 2, a channel",
        ),
        (
            {"data": 12, "expert_ranks": 12, "redundant": 4, "exchange": "deepep_normal"},
            "on 12 GPUs; expected a multiple of 8, whole domains of links",
        ),
        ({"backend": "trtllm", "tensor": 2, "overlap": "two_batches"}, "which TensorRT-LLM does not have; take serial"),
        ({"tensor": 2, "overlap": "shared_beside_dispatch"}, "with deployment.data 1 every GPU has all tokens"),
        (
            {"tensor": 4, "expert_ranks": 4, "redundant": 2},
            "expert_ranks is 4; expected a divisor of the 8 experts and 2",
        ),
    ],
)
def test_what_cannot_overlap_is_told(layout, said):
    with pytest.raises(DeploymentError) as refused:
        check_deployment(GROUPED, Deployment(**{"backend": "sglang"} | layout))
    assert said in str(refused.value)


def test_a_model_without_shared_experts_has_none_to_overlap():
    plain = replace(GROUPED, shared_experts=None)
    with pytest.raises(DeploymentError, match="grouped has no shared experts; take serial"):
        check_deployment(plain, Deployment("sglang", data=2, overlap="shared_beside_dispatch"))


# Loads.


def test_copies_by_eplb_flatten_loads_of_ranks():
    plain, copied, even = (
        expert_loads(64, 4, 8, spread=spread, redundant=redundant)(jnp.asarray(4096.0))
        for spread, redundant in ((0.8, 0), (0.8, 8), (0.0, 0))
    )
    mean = 4096 * 4 / 8
    assert float(even.slots) == pytest.approx(mean)
    assert float(even.heaviest) == pytest.approx(mean / 8)
    assert mean < float(copied.slots) < 1.1 * mean < 1.2 * mean < float(plain.slots)


def test_queries_of_a_sequence_share_its_keys():
    """Two tokens of each sequence: more than one token each, less than twice as many sequences."""
    step = step_of()
    one, two, many = (
        float(step.parts(StepLoad(count, 4000.0, queries=queries))["decode attention"])
        for count, queries in ((64.0, 1.0), (64.0, 2.0), (128.0, 1.0))
    )
    assert one <= two < many
    assert float(step.parts(StepLoad(64.0, 4000.0, queries=2.0))["experts"]) == pytest.approx(
        float(step.parts(StepLoad(128.0, 4000.0))["experts"])
    )
