"""Megatron-core's router traces: ranks, steps, numbers of layers, and logits in a sidecar."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import Hints, read_any, read_trace, write_as


def line(step, layer, indices, rank=0, **more):
    top = {"num_tokens": len(indices), "topk": len(indices[0]) if indices else 2, "top_indices": indices}
    return {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank} | top | more


def lines(choices, rank=0) -> list[dict]:
    """Two tokens in step 0 and one in step 1, and a block that predicts further tokens."""
    mtp = line(0, 0, [[0, 1]], rank, block="mtp", mtp_idx=0)
    parts = enumerate((choices[:2], choices[2:]))
    return [line(s, layer, part[:, row].tolist(), rank) for s, part in parts for row, layer in enumerate((1, 3))] + [
        mtp
    ]


def write(folder, rank, records):
    folder.mkdir(exist_ok=True)
    (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(tmp_path, choices):
    for rank in (0, 1):
        write(tmp_path / "t", rank, lines(choices[:, :, ::-1] if rank else choices, rank))
    return tmp_path / "t"


def test_ranks_are_sequences(folder, choices):
    found = read_any(folder)
    trace = found.content
    assert (found.format, trace.layer_ids.tolist(), trace.num_experts, trace.logits) == ("megatron", [1, 3], 5, None)
    assert trace.experts.tolist() == choices.tolist() + choices[:, :, ::-1].tolist()
    assert trace.seq_start.tolist() == [0, 3]
    assert trace.seq_name == ("router_trace_rank0.jsonl", "router_trace_rank1.jsonl")


def test_one_file_of_any_name(folder, choices, tmp_path):
    (folder / "router_trace_rank1.jsonl").rename(tmp_path / "other")
    assert read_trace(tmp_path / "other").experts.tolist() == choices[:, :, ::-1].tolist()


def test_older_files_count_layers_from_one(tmp_path, choices):
    old = [{key: value for key, value in record.items() if key != "block"} for record in lines(choices)[:-1]]
    write(tmp_path / "t", 0, old)
    assert read_trace(tmp_path / "t").layer_ids.tolist() == [0, 2]


def test_micro_batches_of_a_step_follow_one_another(tmp_path, choices):
    batches = [line(0, layer, choices[i : i + 1, row].tolist()) for i in range(3) for row, layer in enumerate((1, 3))]
    write(tmp_path / "t", 0, batches)
    assert read_trace(tmp_path / "t").experts.tolist() == choices.tolist()


def bfloat16(numbers) -> bytes:
    """The upper halves of float32, by the struct module."""
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)


def with_logits(folder, choices, rank=0):
    """Lines with the logits 0, 1, 2, .. in a sidecar."""
    records, data, count = lines(choices, rank)[:-1], b"", 0
    for record in records:
        size = 5 * record["num_tokens"]
        block = bfloat16(range(count, count + size))
        record |= {"logit_offset": len(data), "logit_bytes": len(block), "logit_shape": [record["num_tokens"], 5]}
        data, count = data + block, count + size
    write(folder, rank, records)
    (folder / f"logits_rank{rank}.bin").write_bytes(data)
    return records


def test_logits(tmp_path, choices):
    with_logits(tmp_path / "t", choices)
    trace = read_trace(tmp_path / "t")
    assert trace.num_experts == 5
    # Step 0: layer 1 has 0..9, layer 3 10..19; step 1: 20..24 and 25..29.
    expected = [[range(5), range(10, 15)], [range(5, 10), range(15, 20)], [range(20, 25), range(25, 30)]]
    assert trace.logits.tolist() == [[[*map(float, row)] for row in token] for token in expected]


@given_trace(logits=True)
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("megatron") / "t"
    assert write_as("megatron", path, trace) == ["phase is left out"]
    assert_same(read_any(path).content, trace, "seq_start", "logits")


def test_rounded_logits_are_told(tmp_path, trace):
    logits = np.full((3, 2, 5), 1.001, np.float32)
    assert "logits are rounded to bfloat16" in write_as("megatron", tmp_path / "t", replace(trace, logits=logits))
    np.testing.assert_allclose(read_trace(tmp_path / "t").logits, logits, rtol=2**-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, r"rank1.jsonl: step 0 misses layers \[1\]"),
        ({"layer": -1}, "rank1.jsonl: line 1: layer is -1"),
        ({"step": "0"}, "rank1.jsonl: line 1: step is '0'"),
        ({"top_indices": None}, "rank1.jsonl: line 1, layer 1 holds None"),
        ({"num_tokens": 3}, "rank1.jsonl: line 1 has 2 tokens .*num_tokens is 3"),
        ({"topk": 3}, "rank1.jsonl: line 1 has 2 tokens with 2 experts each, .*topk 3"),
        ({"top_indices": [[1, 0], [2]]}, r"rank1.jsonl: line 1, layer 1, token 1 is \[2\], expected 2"),
        ({"top_indices": [[1, 0], [2, 2]]}, "rank1.jsonl: layer 1, token 1 chose expert 2 twice"),
        ({"top_indices": [[1, 0], [2, 5]]}, "rank1.jsonl: layer 1, token 1 chose expert 5"),
        ({"top_indices": [[1, 0], [2, -1]]}, "line 1, layer 1, token 1 chose expert -1"),
        ({"top_indices": [[1, 0, 2], [2, 0, 1]], "topk": 3}, r"layer 1 has tokens with \[2, 3\] experts"),
        ({"top_indices": [[1, 0]], "num_tokens": 1}, "step 0 has different numbers of tokens"),
        ({"rank": 3}, r"rank1.jsonl: has lines of ranks \[1, 3\]"),
        ({"block": None, "top_indices": None}, "line 1"),
    ],
)
def test_bad_lines(folder, refuses, choices, change, message):
    records = lines(choices, 1)
    records[0] |= change
    write(folder, 1, records)
    refuses(folder, message)


def test_bad_files(folder, refuses, choices):
    file = folder / "router_trace_rank1.jsonl"
    content = file.read_text()
    file.write_text(content[: len(content) // 2])
    refuses(folder, "rank1.jsonl: line 3 is not JSON")
    file.write_text('{"step": 0}')
    refuses(folder, r"rank1.jsonl: line 1 has \['step'\], expected step, layer")
    write(folder, 1, lines(choices, 1)[-1:])
    refuses(folder, "rank1.jsonl: has no lines of layers")
    write(folder, 1, [record for record in lines(choices, 1) if record["layer"] == 1])
    refuses(folder, r"rank1.jsonl has layers \[1\], but router_trace_rank0.jsonl has \[1, 3\]; .*pipeline")
    file.rename(folder / "router_trace_rank2.jsonl")
    refuses(folder, r"misses the files of ranks \[1\] of 3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_offset": 55}, "line 4: logits end at byte 65, but the sidecar has 60"),
        ({"logit_bytes": 8}, "line 4: logits of shape .* in 8 bytes .* do not fit 1 tokens"),
        ({"logit_shape": [2, 5]}, "do not fit 1 tokens"),
        ({"logit_shape": "5"}, "do not fit 1 tokens"),
        ({"logit_shape": [1, 6], "logit_bytes": 12, "logit_offset": 0}, "different numbers of experts"),
    ],
)
def test_bad_logits(tmp_path, refuses, choices, change, message):
    records = with_logits(tmp_path / "t", choices)
    records[3] |= change
    write(tmp_path / "t", 0, records)
    refuses(tmp_path / "t", message)


def test_bad_sidecars(tmp_path, refuses, choices):
    records = with_logits(tmp_path / "t", choices)
    sidecar = tmp_path / "t" / "logits_rank0.bin"
    refuses(tmp_path / "t", "of a model with 5 experts, not 6", Hints(6))
    content = sidecar.read_bytes()
    sidecar.write_bytes(content[:-1])
    refuses(tmp_path / "t", "line 4: logits end at byte 60, but the sidecar has 59")
    sidecar.write_bytes(bfloat16([float("nan")]) + content[2:])
    refuses(tmp_path / "t", "logits of layer 1, token 0 are not finite")
    sidecar.unlink()
    refuses(tmp_path / "t", "logits_rank0.bin, the logits, is not beside it")
    del records[1]["logit_offset"]
    write(tmp_path / "t", 0, records)
    refuses(tmp_path / "t", "line 2 has no logits, other lines have")
