"""vLLM's routed experts: rows are of MoE layers only."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import Hints, TraceError, read_any, read_trace, write_as


def npy(array) -> str:
    """An array as the server sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def response(array, **more):
    return {"id": "r", "choices": [{"index": 0, "text": "", "routed_experts": npy(array)}]} | more


@pytest.mark.parametrize("bare", ["text", "lists", "quoted"])
def test_bare_payloads(tmp_path, hints, choices, bare):
    text = {"text": npy(choices) + "\n", "lists": json.dumps(choices.tolist()), "quoted": json.dumps(npy(choices))}
    (tmp_path / "t").write_text(text[bare])
    found = read_any(tmp_path / "t", hints)
    assert (found.format, found.content.layer_ids.tolist()) == ("vllm", [1, 3])
    assert found.content.experts.tolist() == choices.tolist()
    assert (found.content.num_experts, found.content.phase) == (5, None)


@pytest.mark.parametrize("lines", [True, False])
def test_responses(tmp_path, hints, choices, lines):
    usage = {"usage": {"prompt_tokens": 2, "completion_tokens": 2}}
    answers = [
        response(choices, **usage),
        response(choices[:2], id="s", usage={"prompt_tokens": 1, "completion_tokens": 2}),
    ]
    text = "\n".join(map(json.dumps, answers)) + "\n" if lines else json.dumps(answers)
    (tmp_path / "t").write_text(text)
    trace = read_trace(tmp_path / "t", hints=hints)
    assert (trace.seq_name, trace.seq_start.tolist()) == (("r", "s"), [0, 3])
    assert trace.phase.tolist() == [0, 0, 1, 0, 1]


def test_prompts_apart_and_several_choices(tmp_path, hints, choices):
    ends = [{"index": i, "routed_experts": choices[2:].tolist()} for i in range(2)]
    (tmp_path / "t").write_text(json.dumps({"choices": ends, "prompt_routed_experts": npy(choices[:2])}))
    trace = read_trace(tmp_path / "t", hints=hints)
    assert trace.experts.tolist() == choices.tolist() * 2
    assert (trace.phase.tolist(), trace.seq_start.tolist()) == ([0, 0, 1] * 2, [0, 3])


@given_trace()
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("vllm") / "t.jsonl"
    write_as("vllm", path, trace)
    back = read_any(path, Hints(trace.num_experts, layer_ids=tuple(trace.layer_ids.tolist()))).content
    assert_same(back, trace, "seq_start", "phase")


def test_names_come_back(tmp_path, trace, hints):
    write_as("vllm", tmp_path / "t", replace(trace, seq_name=("a", "b"), phase=None))
    back = read_trace(tmp_path / "t", hints=hints)
    assert (back.seq_name, back.phase) == (("a", "b"), None)


GOOD = np.array([[[0, 1], [2, 3]]], np.int16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(GOOD)[:100], r"shape \[1, 2, 2\] has 8 bytes, but there are 0"),
        (npy(GOOD)[:-3] + "%%%", "neither npz nor JSON"),
        ([response(GOOD), {"choices": [{"text": ""}]}], "record 1 has no routed_experts"),
        ([response(GOOD), response(GOOD[:, :1])], "r has 1 layers with 2 experts per token, but r has 2"),
        ([response(GOOD), response(GOOD[..., :1])], "r has 2 layers with 1 experts per token"),
        (response(GOOD.astype(np.float32)), r"record 0: routed_experts are float32"),
        (response(GOOD[0]), r"record 0: routed_experts are int16 of shape \(2, 2\)"),
        (response(GOOD[:0]), r"experts has shape \(0, 2, 2\)"),
        (response(np.array([None])), "record 0: routed_experts: not a .npy .*pickle"),
        (base64.b64encode(b"\x93NUMPY\x01\x00\x76\x00{'descr': (" + bytes(200)).decode(), "its header is"),
        ([[[0, [1]], [2, 3]]], "token 0 is .*expected whole numbers"),
        ([[[0, 2**70], [2, 3]]], "more than 64 bits"),
        ({"choices": 5, "usage": {}, "meta_info": {"routed_experts": [], "prompt_tokens": []}}, "prompt_tokens is"),
        (response(GOOD * 2), "layer 3, token 0 chose expert 6, expected 0..4"),
        (response(GOOD * 0), "layer 1, token 0 chose expert 0 twice"),
        (response(GOOD - 1), "record 0: row 0, token 0 chose expert -1"),
        (response(GOOD, usage={"prompt_tokens": 3, "completion_tokens": 2}), "choices of 1 tokens, .*make 4"),
        (response(GOOD, usage={"prompt_tokens": "3", "completion_tokens": 2}), "prompt_tokens is '3'"),
        (response(GOOD, prompt_routed_experts=npy(GOOD[:, :1])), r"prompt have shape \(1, 1, 2\)"),
        ([[[0, 1], [2]]], r"token 0 is \[\[0, 1\], \[2\]\], expected the same"),
        ([[[0, 1], [2, 3]], [[0, 1]]], "token 1 is .*expected the same"),
        ([[[0, 1], [2, 0.5]]], r"token 0 is .*0\.5.*expected whole numbers"),
        ([[[0, 1], [2, "3"]]], "token 0 is .*'3'.*expected whole numbers"),
    ],
)
def test_bad_payloads(tmp_path, refuses, content, message):
    (tmp_path / "t").write_text(content if isinstance(content, str) else json.dumps(content))
    refuses(tmp_path / "t", message)


def test_a_truncated_line_is_named(tmp_path, refuses):
    line = json.dumps(response(GOOD))
    (tmp_path / "t").write_text(f"{line}\n{line[:50]}")
    refuses(tmp_path / "t", "line 2 is not JSON")


def test_layers_must_be_known(tmp_path, refuses):
    (tmp_path / "t").write_text(json.dumps(response(GOOD)))
    refuses(
        tmp_path / "t",
        "which layers of the model its 2 rows are; give --model, or --layer-ids to jaxmoe trace",
        Hints(5),
    )
    refuses(tmp_path / "t", "has rows of 2 layers, but the model has experts in 3", Hints(5, layer_ids=(1, 2, 3)))


def test_going_back_to_prefill_cannot_be_written(tmp_path, trace):
    trace.phase[:] = [1, 0, 0]
    with pytest.raises(TraceError, match="goes back from decode to prefill, which vllm"):
        write_as("vllm", tmp_path / "t", trace)
