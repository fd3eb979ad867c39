"""Commands that read the config.json of a model: bytes at the head of their tables, what was read, what is left out."""

import json
from pathlib import Path

import pytest
import yaml

from jaxmoe.traces import write_trace
from jaxmoe.traces.synthetic import synthetic_trace

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]},
    "torch_dtype": "bfloat16",
}
MACHINE = {
    "kind": "mesh",
    "mesh_shape": [1, 3],
    "link": {"bandwidth_GB_per_s": 1, "latency_ns": 0},
    "die": {"compute_TFLOPs_per_s": 1, "memory_bandwidth_GB_per_s": 1, "memory_capacity_GB": 1},
}
HEAD = "bytes: experts 1, dense 1, attention 2, activations 2, KV 2"
EXPERT = 3 * 64 * 32


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("config.json", "machine.yaml", "scenario.yaml", "trace.npz")}
    paths["config.json"].write_text(json.dumps(CONFIG))
    paths["machine.yaml"].write_text(yaml.safe_dump(MACHINE))
    write_trace(paths["trace.npz"], synthetic_trace(40, (1, 2), 4, 2, 1.5, 0.0, 0.0, 3))
    scenario = {
        "hardware": MACHINE,
        "model": str(paths["config.json"]),
        "workload": {"batch_tokens": 8, "trace": {"kind": "synthetic", "tokens": 32}},
        "strategies": {"hybrid_regions": 1},
        "evaluation": {"batches": 2},
        "validation": {"batches": 1},
    }
    paths["scenario.yaml"].write_text(yaml.safe_dump(scenario))
    return paths


def place(files: dict[str, Path], *others: object) -> list[object]:
    given = ("--slots", 6, "--ranks", 3, "--to", "plan", "--tokens", 8, "--machine", files["machine.yaml"])
    return ["plan", "place", files["trace.npz"], *given, "--model", files["config.json"], *others]


@pytest.mark.parametrize("verb", ["evaluate", "simulate", "plan place"])
def test_bytes_of_the_model_are_at_the_head(run, files, out, verb):
    one = [verb, files["scenario.yaml"], "--layers", "1"] + (["--iterations", 2] if verb == "simulate" else [])
    result = run(*(place(files) if verb == "plan place" else one), "--out", out)
    assert result.exit_code == 0, result.output
    assert HEAD in " ".join(result.stdout.split())
    known = json.loads((out / "summary.json").read_text())["bytes_per_element"]
    assert (known["experts"], known["attention"], known["dispatch"], known["kv"]) == (1, 2, 2, 2)
    assert "read by its fields: num_experts 4 from num_experts; num_layers 3 from num_hidden_layers" in result.stderr
    assert "not counted: 1 x what predicts further tokens (num_nextn_predict_layers); embeddings" in result.stderr


def test_an_expert_of_a_plan_has_the_bytes_of_the_model(run, files, out, tmp_path):
    """The machine's memory holds two layers of slots at one byte a weight, and not at two."""
    room = MACHINE["die"] | {"memory_capacity_GB": 4 * EXPERT * 1.5e-9}
    files["machine.yaml"].write_text(yaml.safe_dump(MACHINE | {"die": room}))
    assert run(*place(files), "--out", tmp_path / "placed").exit_code == 0
    (plan,) = (tmp_path / "placed").glob("placement*")
    given = ("--model", files["config.json"], "--machine", files["machine.yaml"])
    result = run("plan", "check", plan, *given, "--out", out)
    assert result.exit_code == 0, result.output
    result = run("plan", "check", plan, *given, "--weight-bytes", 2, "--out", tmp_path / "wide")
    assert result.exit_code == 2
    assert f"{4 * EXPERT * 2 / 1e9:.4g} GB of weights a rank" in result.stderr


def test_a_new_scenario_has_what_was_read(run, files, out):
    result = run("init", "--machine", files["machine.yaml"], "--model", files["config.json"], "--out", out)
    assert result.exit_code == 0, result.output
    assert "read by its fields" in result.stderr
    written = yaml.safe_load((out / "scenario.yaml").read_text())
    assert written["model"]["bytes"] == {"experts": 1, "dense": 1, "attention": 2, "activations": 2, "kv": 2}
    assert written["costs"]["weight_bytes_per_element"] is None
