"""SGLang's routed experts: rows are of all layers, zeros in dense ones, from an offset on."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import Hints, read_any, read_trace, write_as

LAYERS = 5


def text(choices) -> str:
    """Choices of layers 1 and 3 as the server sends them."""
    rows = np.zeros((len(choices), LAYERS, 2), "<i4")
    rows[:, [1, 3]] = choices
    return base64.b64encode(rows.tobytes()).decode()


def response(choices, **meta):
    return {"text": "", "meta_info": {"id": "r", "routed_experts": text(choices)} | meta}


@pytest.mark.parametrize("known", [Hints(top_k=2, num_layers=5), Hints(5, 2, (1, 3), 5)], ids=["sizes", "all"])
@pytest.mark.parametrize("bare", [True, False])
def test_layers_get_the_numbers_of_the_model(tmp_path, choices, known, bare):
    (tmp_path / "t").write_text(text(choices) if bare else json.dumps(response(choices)))
    found = read_any(tmp_path / "t", known)
    assert (found.format, found.content.layer_ids.tolist()) == ("sglang", [1, 3])
    assert found.content.experts.tolist() == choices.tolist()


def test_tokens_before_the_offset_are_missing(tmp_path, choices, hints):
    meta = {"routed_experts_start_len": 2, "prompt_tokens": 3, "completion_tokens": 3}
    (tmp_path / "t").write_text(json.dumps(response(choices, **meta)))
    trace = read_trace(tmp_path / "t", hints=hints)
    assert trace.experts.tolist() == [[[-1, -1]] * 2] * 2 + choices.tolist()
    assert (trace.phase.tolist(), trace.seq_name) == ([0, 0, 0, 1, 1], ("r",))


@pytest.mark.parametrize("place", ["meta_info", "sgl_ext", "sglext"])
def test_chat_completions(tmp_path, choices, hints, place):
    extra = {place: {"routed_experts": text(choices)}}
    chat = {"id": "c", "choices": [{"index": 0} | extra], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}
    if place == "sglext":
        chat = {"choices": [{"index": 0}], "usage": chat["usage"], "id": "c"} | extra
    (tmp_path / "t").write_text(json.dumps(chat) + "\n" + json.dumps(chat))
    trace = read_trace(tmp_path / "t", hints=hints)
    assert (trace.seq_name, trace.phase.tolist()) == (("c", "c"), [0, 0, 1] * 2)


@given_trace()
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("sglang") / "t.jsonl"
    assert write_as("sglang", path, trace) == []
    layers = tuple(trace.layer_ids.tolist())
    back = read_any(path, Hints(trace.num_experts, trace.top_k, layers, layers[-1] + 1)).content
    assert_same(back, trace, "seq_start", "phase")


def test_missing_tokens_at_the_start_and_names_come_back(tmp_path, trace, hints):
    trace.experts[0] = -1
    write_as("sglang", tmp_path / "t", replace(trace, seq_name=("a", "b")))
    back = read_trace(tmp_path / "t", hints=replace(hints, num_layers=4))
    assert_same(back, trace, "seq_start", "phase")
    assert back.seq_name == ("a", "b")


GOOD = np.array([[[0, 1], [2, 3]]], np.int32)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (Hints(top_k=2), "does not state the number of layers; give --model, or --num-layers to jaxmoe trace"),
        (Hints(num_layers=5), "does not state top_k; give --model, or --top-k to jaxmoe trace"),
        (Hints(top_k=2, num_layers=4), "40 bytes, no multiple of 4 layers x 2 experts x 4"),
        (Hints(5, 2, (0, 1), 5), r"has choices in layers \[3\], where the model has no experts"),
        (Hints(5, 2, (1, 7), 5), r"the model has experts in \[7\]"),
        (Hints(5, 1, None, 10), "whether the layers with zeros only are dense or always chose expert 0"),
        (Hints(3, 2, (1, 3), 5), "layer 3, token 0 chose expert 3, expected 0..2"),
        (Hints(5, 2, (1, 2, 3), 5), "layer 2, token 0 chose expert 0 twice"),
    ],
)
def test_models_that_do_not_fit(tmp_path, refuses, known, message):
    (tmp_path / "t").write_text(json.dumps(response(GOOD)))
    refuses(tmp_path / "t", message, known)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (text(GOOD)[:-4], "bytes, no multiple of"),
        (response(GOOD * 0), "zeros in every layer"),
        (response(GOOD - 1), "layer 1, token 0 chose expert -1"),
        (response(GOOD, routed_experts="%"), "record 0: not readable as base64"),
        (response(GOOD, routed_experts_start_len=-1), "routed_experts_start_len is -1"),
        (response(GOOD, prompt_tokens=3, completion_tokens=1), "choices of 1 tokens, .*make 3"),
        ([response(GOOD), {"text": ""}], "record 1 has no routed_experts"),
        ([response(GOOD), response(GOOD, routed_experts=[[[1]]])], "record 1: routed_experts are a list"),
    ],
)
def test_bad_payloads(tmp_path, refuses, content, message):
    known = Hints(5, 2, None, 5) if message.startswith("zeros") else None
    (tmp_path / "t").write_text(content if isinstance(content, str) else json.dumps(content))
    refuses(tmp_path / "t", message, *([known] if known else []))


def test_a_start_that_no_response_has(tmp_path, choices, refuses):
    (tmp_path / "t").write_text(json.dumps(response(choices, routed_experts_start_len=10**12)))
    refuses(tmp_path / "t", "routed_experts_start_len is 1000000000000, expected at most 4194304 tokens")
