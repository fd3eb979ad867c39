"""What more of each number of a machine gives, against the same deployment with that number written otherwise."""

from dataclasses import replace

import numpy as np
import pytest
from kernels_by_hand import kernel_file
from test_exchanges import FILE, WIDE, exchange, wide_step

from jaxmoe.config import load_scenario
from jaxmoe.experiment.deployment import Deployed
from jaxmoe.experiment.machine_deployment import compared
from jaxmoe.experiment.number_worth import worth
from jaxmoe.hardware.gpu.deepep import Links, LowLatencyKernel
from jaxmoe.hardware.gpu.files import write_kernels
from jaxmoe.hardware.gpu.sheet import Sheet
from jaxmoe.serving.closed_loop import BACKENDS, Overheads, Users, serve
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.memory import memory_of

MESH = """
name: worth
hardware:
  mesh_shape: [2, 2]
  die: {compute_TFLOPs_per_s: 5, memory_bandwidth_GB_per_s: 500, memory_capacity_GB: 4}
  link: {bandwidth_GB_per_s: 50, latency_ns: 100}
model: {hidden_size: 256, expert_size: 128, num_experts: 8, top_k: 2, moe_layer_ids: {count: 3}, vocabulary_size: 500,
        attention: {kind: grouped_query, heads: 8, kv_heads: 2, head_size: 32}}
workload: {trace: {kind: synthetic, tokens: 256}, batch_tokens: 16}
deployment: {backend: sglang, concurrency: 16, prompt_tokens: 128, output_tokens: 64}
evaluation: {iterations: 2}
"""
BUFFER = (
    "hardware.memory=[{name: SRAM, bandwidth_GB_per_s: 4000, capacity_GB: 0.01}, {name: DDR, bandwidth_GB_per_s: 60}]"
)
SYSTEMS = {
    "static": ("system={name: static, plan: ep_balanced}",),
    "hd_moe": ("system={name: hd_moe, plan: ep_balanced}",),
    "moentwine": ("system={name: moentwine, tp: 2}",),
    "expert_streaming": (
        "system={name: expert_streaming, attention: false, control_ns: 0, scheduling_ns: 0}",
        "hardware.die={compute_TFLOPs_per_s: 5}",
        BUFFER,
    ),
    # Without a bias, which would follow the links: what a system decides stays as it is in derivatives.
    "camoe": (
        "system={name: camoe, plan: ep_runs, lambda_cost: 0}",
        "costs.exchange=token_home",
        "workload.trace={kind: preset, preset: qwen3-30b-a3b, tokens: 256, logits: 1.31}",
        "model.num_experts=128",
        "model.top_k=8",
    ),
}
KEYS = {
    "FLOP/s of dies": "hardware.die.compute_TFLOPs_per_s",
    "bandwidth of links": "hardware.link.bandwidth_GB_per_s",
    "latency of links": "hardware.link.latency_ns",
}
STEP = 0.004  # where a longer of two changes within more, a difference is of both


def tokens_per_s(path, *overrides: str) -> float:
    own = next(compared(load_scenario(path, overrides)))
    return float(own.serve().tokens_per_s_device(own.step))


@pytest.mark.parametrize(
    "system", [*(["static"]), *(pytest.param(name, marks=pytest.mark.slow) for name in [*SYSTEMS][1:])]
)
def test_numbers_of_a_machine_against_differences(system, tmp_path):
    path, given = tmp_path / "worth.yaml", SYSTEMS[system]
    path.write_text(MESH)
    scenario = load_scenario(path, given)
    found = worth(next(compared(scenario)))
    for name, key in KEYS.items():
        section, number = key.rsplit(".", 1)
        value = getattr(getattr(scenario.hardware, section.rsplit(".", 1)[1]), number)
        up, down = (tokens_per_s(path, *given, f"{key}={value * (1 + step)}") for step in (STEP, -STEP))
        assert found[name] == pytest.approx((up - down) / (up + down) / STEP, rel=0.02, abs=2e-3), name
    assert found["FLOP/s of dies"] + found["bandwidth of links"] > 0.01
    # All that takes time is a rate or a latency: a machine with all of these twice as good serves twice as much.
    together = sum(-share if name.startswith("latency") else share for name, share in found.items())
    assert together == pytest.approx(1.0, abs=0.01)


def test_the_acceptance_of_drafts_against_differences(tmp_path):
    path = tmp_path / "worth.yaml"
    path.write_text(MESH)
    key = "deployment.speculative.acceptance"
    found = worth(next(compared(load_scenario(path, (f"{key}=0.7",)))))
    up, down = (tokens_per_s(path, f"{key}={0.7 * (1 + step)}") for step in (STEP, -STEP))
    assert found["acceptance of drafts"] == pytest.approx((up - down) / (up + down) / STEP, rel=0.02)
    assert 0.2 < found["acceptance of drafts"] < 0.7 / 1.7  # less than of tokens of a step: prompts are read as before


def test_numbers_of_a_data_sheet_against_differences(tmp_path):
    file = replace(kernel_file(), system="made_up")
    path = tmp_path / "worth.yaml"
    gemm = "gemm: {kind: fitted, path: kernels.json, backend: sglang, precision: bfloat16}"
    path.write_text(
        MESH.replace("memory_capacity_GB: 4}", f"memory_capacity_GB: 20, {gemm}}}").replace(
            "backend: sglang, conc", "backend: sglang, tensor: 2, conc"
        )
    )

    def with_sheet(**numbers: float) -> None:
        write_kernels(tmp_path / "kernels.json", replace(file, sheet=replace(file.sheet, **numbers)))

    with_sheet()
    found = worth(next(compared(load_scenario(path))))
    assert len(found) == len([name for name in Sheet.__dataclass_fields__ if name not in ("node", "domain")])
    for name, field in {
        "bandwidth of memory": "bandwidth",
        "FLOP/s in BF16": "bf16",
        "bandwidth of links": "link",
    }.items():
        rates = []
        for step in (STEP, -STEP):
            with_sheet(**{field: getattr(file.sheet, field) * (1 + step)})
            rates.append(tokens_per_s(path))
        up, down = rates
        assert found[name] == pytest.approx((up - down) / (up + down) / STEP, rel=0.02, abs=2e-3), name
    assert found["bandwidth of memory"] > 0.01


def test_the_network_between_nodes_against_differences():
    """DeepEP over two nodes, whose tokens cross a network at its whole rate: what steps take there, users wait for."""
    kernels = [
        exchange(side, LowLatencyKernel, "avg_t", "nodes", launch=np.log(1e-5), link=30.0, network=30.0)
        for side in ("dispatch", "combine")
    ]
    step = replace(
        wide_step(replace(FILE, links=Links(1e11, 1e9), exchanges=tuple(kernels))),
        deployment=Deployment("sglang", data=16, expert_ranks=16, exchange="deepep_low_latency"),
    )
    users = Users(256.0, 128.0, 512.0)
    memory = memory_of(WIDE, step.deployment, 1e11, 384)

    def rate(network: float) -> float:
        given = replace(step, deepep=replace(step.deepep, links=step.deepep.links._replace(network=network)))
        return float(serve(given, users, memory, BACKENDS["sglang"], Overheads()).tokens_per_s_device(given))

    found = worth(Deployed(step, memory, users, BACKENDS["sglang"], Overheads()))
    name = "bandwidth of the network between nodes"
    up, down = rate(1e9 * (1 + STEP)), rate(1e9 * (1 - STEP))
    assert found[name] == pytest.approx((up - down) / (up + down) / STEP, rel=0.02)
    assert found[name] > 0.1
    within = worth(Deployed(wide_step(exchange="collectives"), memory, users, BACKENDS["sglang"], Overheads()))
    assert name not in within
