"""`jaxmoe trace convert`: what is written, what is told, and what it says of bad input."""

import json

import numpy as np
import pytest
from refusal import refused_in_a_line

from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.traces import GatingTrace, read_loads, read_trace, write_trace

MODEL = """
hidden_size: 64
expert_size: 128
num_experts: 6
top_k: 2
moe_layer_ids: {first: 1, count: 2, step: 2}
num_layers: 5
"""


@pytest.fixture
def source(tmp_path):
    """Three tokens, of which one is decoded, in layers 1 and 3."""
    experts = np.array([[[0, 1], [2, 3]], [[4, 0], [3, 0]], [[2, 1], [0, 1]]], np.int16)
    phase, start = np.array([0, 0, 1], np.int8), np.zeros(1, np.int64)
    write_trace(tmp_path / "t.npz", GatingTrace(experts, 6, np.array([1, 3]), start, None, {"model": "m"}, phase=phase))
    return tmp_path / "t.npz"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "m.yaml").write_text(MODEL)
    return tmp_path / "m.yaml"


@pytest.mark.parametrize(
    "to", ["npz", "hd_moe", "data_movement", "flame_moe", "vllm", "sglang", "megatron", "tensorrt_llm"]
)
def test_there_and_back(run, source, model, tmp_path, to):
    if to == "flame_moe":
        pytest.importorskip("pyarrow")
    result = run("trace", "convert", source, "--to", to, "--out", tmp_path / "there")
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "there" / "summary.json").read_text())
    files = {file.name for file in (tmp_path / "there").iterdir()}
    assert files == {"summary.json", summary["written"]["path"].rpartition("/")[2]}
    expected = {"format": "npz", "kind": "trace", "tokens": 3, "layers": 2, "layer_ids": [1, 3], "num_experts": 6}
    expected |= {"top_k": 2, "sequences": 1, "prefill_tokens": 2, "decode_tokens": 1, "missing_choices": 0}
    assert summary["source"].items() >= expected.items()
    assert summary["source"]["facts"] == {"model": "m"}
    assert {"versions", "device", "wall_s"} < summary.keys()
    # The writer of SGLang's rows cannot know of dense layers after the last one with experts.
    sizes = ["--num-layers", "4"] if to == "sglang" else []
    there = summary["written"]["path"]
    back = run("trace", "convert", there, "--to", "npz", "--model", model, *sizes, "--out", tmp_path / "back")
    assert back.exit_code == 0, back.output
    assert f" {to} " in back.stdout
    copy, original = read_trace(tmp_path / "back" / "trace.npz"), read_trace(source)
    assert copy.experts.tolist() == original.experts.tolist()
    assert (copy.layer_ids.tolist(), copy.num_experts) == ([1, 3], 6)


def test_what_is_left_out_is_told(run, source, out):
    result = run("trace", "convert", source, "--to", "hd_moe", "--out", out)
    assert "note: phase is left out" in result.stderr
    assert json.loads((out / "summary.json").read_text())["written"]["notes"] == ["phase is left out"]


def test_load_counts(run, tmp_path, out):
    counts = np.arange(6).reshape(2, 3)
    np.savez(tmp_path / "l.npz", counts=counts, top_k=2)
    result = run("trace", "convert", tmp_path / "l.npz", "--to", "tensorrt_llm", "--out", out)
    assert result.exit_code == 0, result.output
    assert read_loads(out / "loads").counts[0].tolist() == counts.tolist()
    figures = json.loads((out / "summary.json").read_text())["source"]
    assert (figures["kind"], figures["windows"], figures["choices"]) == ("load counts", 1, 15)


def test_options_give_what_a_source_leaves_open(run, tmp_path, out):
    (tmp_path / "t").write_text("[[[0, 1], [2, 3]]]")
    options = ["--num-experts", 8, "--layer-ids", "4,6"]
    result = run("trace", "convert", tmp_path / "t", "--to", "npz", *options, "--out", out)
    assert result.exit_code == 0, result.output
    trace = read_trace(out / "trace.npz")
    assert (trace.num_experts, trace.layer_ids.tolist()) == (8, [4, 6])


def test_a_model_of_hugging_face(run, tmp_path, out, source):
    config = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 6}
    config |= {"num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100, "tie_word_embeddings": False}))
    run("trace", "convert", source, "--to", "vllm", "--out", tmp_path / "there")
    there = tmp_path / "there" / "trace.jsonl"
    result = run("trace", "convert", there, "--to", "npz", "--model", tmp_path / "config.json", "--out", out)
    assert result.exit_code == 2
    assert "rows of 2 layers, but the model has experts in 4" in result.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--to", "pickle"], ["--to is 'pickle'", "npz, tensorrt_llm"]),
        (["--to", "npz", "--layer-ids", "a"], ["--layer-ids is 'a'"]),
        (["--to", "npz", "--layer-ids", "3,1"], ["--layer-ids is '3,1'", "ascending"]),
        (["--to", "npz", "--num-experts", "7"], ["t.npz", "of a model with 6 experts, not 7"]),
        (["--to", "npz", "--model", "none-such.yaml"], ["--model", "none-such.yaml"]),
        (["--to", "npz", "--model", "none-such"], ["--model", "none-such"]),
    ],
)
def test_bad_options(run, source, out, options, expected):
    refused_in_a_line(run("trace", "convert", source, *options, "--out", out), out, *expected)


def test_bad_sources(run, tmp_path, out, source):
    refused_in_a_line(
        run("trace", "convert", tmp_path / "absent", "--to", "npz", "--out", out), out, "absent: no such trace"
    )
    source.write_bytes(source.read_bytes()[:100])
    refused_in_a_line(run("trace", "convert", source, "--to", "npz", "--out", out), out, "t.npz: not a readable npz")
    np.savez(source, counts=np.ones((2, 3), int))
    refused_in_a_line(
        run("trace", "convert", source, "--to", "hd_moe", "--out", out), out, "load counts cannot be written"
    )


def test_nothing_is_half_written(run, source, out):
    trace = read_trace(source)
    experts = trace.experts.copy()
    experts[2, 0, 0] = -1
    write_trace(source, GatingTrace(experts, 6, trace.layer_ids, trace.seq_start, None, {}))
    result = run("trace", "convert", source, "--to", "megatron", "--out", out)
    refused_in_a_line(result, out, "layer 1, token 2 misses a choice", "or write npz")


def test_verbs_read_every_format(scenario, tmp_path):
    rng = np.random.default_rng(0)
    rows = np.array([[rng.permutation(4)[:2] for _ in range(2)] for _ in range(64)])
    (tmp_path / "t").write_text(json.dumps(rows.tolist()))  # vLLM's, whose layers the scenario's model tells
    inputs = read_inputs(scenario, None, tmp_path / "t", "5")
    assert inputs.layer_ids == (5,)
    assert inputs.trace.experts[:, 0].tolist() == rows[:, 1].tolist()
