"""`jaxmoe evaluate --phase`: what it prints and writes, and what it refuses before any work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kernels_by_hand import kernel_file
from typer.testing import CliRunner

from jaxmoe.cli.app import app
from jaxmoe.hardware.gpu.files import write_kernels
from jaxmoe.methods import UnsuitableSystemError

SCENARIO = """
name: deployed
hardware:
  kind: switch
  nodes: 4
  die: {compute_TFLOPs_per_s: 100, memory_capacity_GB: 20, gemm: {kind: fitted, path: kernels.json, backend: sglang,
        precision: bfloat16}}
  link: {bandwidth_GB_per_s: 100, latency_ns: 0}
model: {hidden_size: 256, expert_size: 128, num_experts: 8, top_k: 2, moe_layer_ids: {count: 3}, vocabulary_size: 500,
        attention: {kind: grouped_query, heads: 8, kv_heads: 2, head_size: 32}}
workload: {trace: {kind: synthetic, tokens: 64}, batch_tokens: 16}
deployment: {backend: sglang, tensor: 2, concurrency: 16, prompt_tokens: 128, output_tokens: 64}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    write_kernels(tmp_path / "kernels.json", replace(kernel_file(), system="made_up"))
    path = tmp_path / "deployed.yaml"
    path.write_text(SCENARIO)
    return path


def evaluate(*arguments: object):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_a_step_its_users_other_layouts_memory_and_the_line(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for said in ("a step of decode", "16 requests in flight", "TP 2 x DP 1", "TP 1 x DP 2", "left for keys and values"):
        assert said in done.output
    assert "sglang.launch_server --model-path PATH_OF_deployed --tp 2 --max-running-requests 16" in done.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    served, parts = summary["served"], summary["step"]["parts_s"]
    assert sum(parts.values()) == pytest.approx(summary["step"]["seconds"])
    assert parts["prefill attention"] == 0
    assert served["tokens_per_s_device"] == pytest.approx(16 / served["per_token_s"] / 2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"summary.json", "throughput.png"}
    read = evaluate(scenario, "--phase", "prefill", "--out", tmp_path / "read", "--json")
    parts = json.loads(read.stdout)["step"]["parts_s"]
    assert parts["decode attention"] == 0 < parts["prefill attention"]
    assert parts["hidden by overlap"] == pytest.approx(0, abs=1e-9)


def test_what_more_of_each_number_gives(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    monkeypatch.setattr("jaxmoe.cli.evaluate_phase.worth", lambda _: {"links": 0.25, "dies": -0.5, "little": 0.004})
    done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / "out", "--elasticities")
    assert done.exit_code == 0, done.output
    after = done.output.split("1 % more of a number")[1]
    assert after.index("dies") < after.index("links")
    assert "little" not in after
    told = json.loads((tmp_path / "out" / "summary.json").read_text())["elasticities"]
    assert told == {"links": 0.25, "dies": -0.5, "little": 0.004}
    alone = evaluate(scenario, "--elasticities", "--out", tmp_path / "alone")
    assert (alone.exit_code, "give --phase decode" in alone.output) == (2, True)
    assert not (tmp_path / "alone").exists()


def test_a_run_without_derivatives_says_so(scenario, tmp_path, monkeypatch):
    def refused(_):
        raise UnsuitableSystemError("times of Run have no derivatives")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    monkeypatch.setattr("jaxmoe.cli.evaluate_phase.worth", refused)
    done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / "out", "--elasticities")
    assert done.exit_code == 0, done.output
    assert "no elasticities: times of Run have no derivatives" in done.output.replace("\n", " ")


def test_what_overlap_hides_is_told(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    given = [f"deployment.{key}" for key in ("overlap=two_batches", "processors=0", "tensor=1", "data=2")]
    done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / "out", *(f"--set={each}" for each in given))
    assert done.exit_code == 0, done.output
    assert "hidden by overlap" in done.output
    step = json.loads((tmp_path / "out" / "summary.json").read_text())["step"]
    assert step["parts_s"]["hidden by overlap"] < 0
    assert sum(step["parts_s"].values()) == pytest.approx(step["seconds"])


@pytest.mark.parametrize("machine", ["kernels", "engine"])
def test_drafted_tokens_are_verified_and_told(scenario, tmp_path, monkeypatch, machine):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    engine = "deployment={backend: sglang, exchange: engine, concurrency: 16, prompt_tokens: 128, output_tokens: 64}"
    given = ["--set", engine] * (machine == "engine")
    drafts = ["--set", "deployment.speculative={tokens: 2, acceptance: 0.5}"]
    told = {}
    for name, more in {"plain": [], "drafts": drafts}.items():
        done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / name, *given, *more)
        assert done.exit_code == 0, done.output
        told[name] = json.loads((tmp_path / name / "summary.json").read_text())
    assert "16 sequences a rank get 1.75 of 3 tokens each" in " ".join(done.output.split())
    plain, drafting = told["plain"], told["drafts"]
    assert drafting["served"]["tokens_of_a_sequence_in_a_step"] == 1.75
    assert drafting["step"]["seconds"] > plain["step"]["seconds"]
    assert drafting["memory_bytes"]["experts"] == pytest.approx(plain["memory_bytes"]["experts"] * 4 / 3)
    if machine == "kernels":
        assert drafting["step"]["parts_s"]["draft"] > 0
        assert "--speculative-num-draft-tokens 3" in done.output


@pytest.mark.parametrize("hour", [{"hardware.die": 2}, {"hardware.die": 5, "deployment": 2}, {"deployment": 2}])
def test_a_million_tokens_by_the_power_of_boards_and_the_price_of_hours(scenario, tmp_path, monkeypatch, hour):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    prices = [f"--set={section}.price_per_device_hour={price}" for section, price in hour.items()]
    given = ["--set=hardware.die.board_W=500", *prices]
    done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / "out", *given)
    assert done.exit_code == 0, done.output
    assert "board power x time" in done.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    rate, cost = summary["served"]["tokens_per_s_device"], summary["million_output_tokens"]
    assert cost["J"] == pytest.approx(1e6 * 500 / rate)
    assert cost["price"] == pytest.approx(1e6 * 2 / 3600 / rate)


@pytest.mark.parametrize("given", [["hardware.die.gemm=null"], ["deployment.exchange=engine"]])
def test_the_engine_times_machines_without_kernels_and_all_that_ask_for_it(scenario, tmp_path, monkeypatch, given):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    plain = "deployment={backend: sglang, concurrency: 16, prompt_tokens: 128, output_tokens: 64}"
    done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / "out", *(f"--set={e}" for e in (plain, *given)))
    assert done.exit_code == 0, done.output
    for said in ("16 sequences a rank", "static on 4 nodes", "memory of a node", "at most 48 tokens of prompts"):
        assert said in done.output.replace("\n", " ")
    assert "launch_server" not in done.output
    assert "million" not in done.output
    step = json.loads((tmp_path / "out" / "summary.json").read_text())["step"]
    assert [*step["parts_s"]] == ["dispatch", "compute", "combine", "attention", "head", "hidden by overlap"]
    assert sum(step["parts_s"].values()) == pytest.approx(step["seconds"])


REFUSED = {
    "heads": (["--set", "deployment.tensor=3"], "deployment.tensor is 3; expected a divisor of the 8 heads"),
    "GPUs": (
        ["--set", "deployment.tensor=8"],
        "is 8; expected at most the 4 GPUs of the machine. The nearest is deployment.tensor 4",
    ),
    "groups": (
        ["--set", "deployment.data=4"],
        "is 8; expected at most the 4 GPUs of the machine. The nearest is deployment.data 2",
    ),
    "memory": (["--set", "hardware.die.memory_capacity_GB=4"], "does not fit on 2 GPUs of 3.5 usable GB: experts 0.0"),
    "processors": (
        ["--set", "deployment.overlap=two_batches", "--set", "deployment.processors=10"],
        "deployment.processors is 10; expected at most 9",
    ),
    "exchange": (
        ["--set", "deployment.exchange=deepep_normal", "--set", "deployment.expert_ranks=2"],
        "has no exchanges of DeepEP; take deployment.exchange collectives",
    ),
    "none": (["--set", "deployment=null"], "no deployment. Write for example deployment: {backend: sglang, tensor: 8}"),
    "none in the engine": (
        ["--set", "deployment=null", "--set", "hardware.die.gemm=null"],
        "no deployment. Write for example deployment: {backend: vllm, concurrency: 64}",
    ),
    "roofline": (["--set", "hardware.die.gemm=null"], "deployment.tensor is 2, but deployed is timed by the engine"),
    "engine": (["--set", "deployment.exchange=engine"], "where attention is that of the system"),
    "room": (
        ["--set", "hardware.die.memory_capacity_GB=0.0005", "--set", "deployment={backend: sglang, exchange: engine}"],
        # 6.2 MB of weights and 1.2 MB of one sequence
        "It fits on 17 nodes with system: {name: static, plan: tp}, which spreads experts evenly; or take narrower",
    ),
    "no kernels": (
        ["--set", "hardware.die.gemm=null", "--set", "deployment={backend: sglang, exchange: deepep_normal}"],
        "deployment.exchange is deepep_normal, whose kernels deployed does not have; expected engine",
    ),
    "trace": (
        ["--set", "deployment={backend: vllm, exchange: engine, concurrency: 64}"],
        "deployment.concurrency is 64; expected less than 64, as a step takes 1 of the 64 tokens of workload.trace",
    ),
    "trace of drafts": (
        ["--set", "deployment={backend: vllm, exchange: engine, concurrency: 32, speculative: {acceptance: 0.5}}"],
        "deployment.concurrency is 32; expected less than 32, as a step takes 2 of the 64 tokens of workload.trace",
    ),
    "acceptance": (["--set", "deployment.speculative={tokens: 1}"], "deployment.speculative.acceptance"),
    "certainty": (
        ["--set", "deployment.speculative={acceptance: 1.2}"],
        "deployment.speculative.acceptance is 1.2; expected",
    ),
    "layers": (["--layers", "0"], "beside --phase, which times the whole model; drop one, or give --set evaluation"),
    "backend": (["--set", "deployment.backend=triton"], 'deployment.backend is "triton"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_told_before_any_work(scenario, tmp_path, case):
    given, said = REFUSED[case]
    done = evaluate(scenario, "--phase", "decode", "--out", tmp_path / "out", *given)
    assert done.exit_code == 2
    assert said in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
