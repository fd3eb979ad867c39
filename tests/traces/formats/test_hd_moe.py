"""hd_moe's JSON, beyond what test_trace_files holds."""

import json

import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import Hints, TraceError, read_any, write_as


def test_a_file_as_published(tmp_path, choices):
    layers = {"3": choices[:, 1].tolist(), "1": choices[:, 0].tolist()}
    (tmp_path / "t").write_text(json.dumps(layers))
    found = read_any(tmp_path / "t")
    assert (found.format, found.content.layer_ids.tolist(), found.content.seq_name) == ("hd_moe", [1, 3], None)
    assert found.content.experts.tolist() == choices.tolist()
    assert found.content.facts == {"source": "t", "num_experts_from": "largest id + 1"}


@given_trace()
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("hd_moe") / "t.json"
    notes = write_as("hd_moe", path, trace)
    assert notes == ["phase is left out"] + ["seq_start is left out"] * (len(trace.seq_start) > 1)
    assert_same(read_any(path, Hints(trace.num_experts)).content, trace)


def test_missing_choices_cannot_be_written(tmp_path, trace):
    trace.experts[1, 1, 0] = -1
    for name in ("hd_moe", "data_movement", "flame_moe", "vllm", "sglang", "megatron", "tensorrt_llm"):
        with pytest.raises(TraceError, match=rf"(layer 3, token \d misses a choice, which {name})"):
            write_as(name, tmp_path / "t", trace)
    assert list(tmp_path.iterdir()) == []


def test_negative_ids_are_no_missing_choices(tmp_path, refuses):
    (tmp_path / "t.json").write_text('{"0": [[1, 0], [2, -1]]}')
    refuses(tmp_path / "t.json", "layer 0, token 1 chose expert -1")


def test_choices_nested_deeper_than_can_be_shown(tmp_path, refuses):
    (tmp_path / "t").write_text('{"1": [' + "[" * 900 + "]" * 900 + "]}")
    refuses(tmp_path / "t", "layer 1, token 0 is .*expected whole numbers")


def test_a_layer_number_of_more_digits_than_python_reads(tmp_path, refuses):
    (tmp_path / "t").write_text('{"' + "9" * 5000 + '": [[0, 1]]}')
    refuses(tmp_path / "t", "JSON has the key '9999.*expected only layer numbers")
