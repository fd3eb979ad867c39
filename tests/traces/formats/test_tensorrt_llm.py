"""TensorRT-LLM's expert statistics: counts, and choices where a version writes them."""

import json
import re

import numpy as np
import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import Hints, LoadCounts, TraceError, read_any, read_loads, write_as

KINDS = {"int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32"}


def safetensors(file, arrays):
    """A file of arrays, by hand."""
    header, data = {"__metadata__": {"by": "hand"}}, b""
    for name, array in arrays.items():
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": KINDS[str(array.dtype)], "shape": list(array.shape), "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def meta_of(num_experts, top_k):
    return json.dumps({"num_experts": num_experts, "num_experts_per_token": top_k})


def all_at_the_start(content):
    return re.sub(rb"\[\d+, \d+\]", lambda span: b"[0, 40]".ljust(len(span[0])), content)


META = {"num_experts": 5, "num_experts_per_token": 2}


@pytest.fixture
def counts(tmp_path):
    """Two ranks with iterations 50 and 51 of layers 3 and 10; rank 1 counts ten times as much."""
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "meta_info.json").write_text(json.dumps(META))
    for rank, scale in enumerate((1, 10)):
        names = [f"{iteration}_{layer}" for iteration in (51, 50) for layer in (10, 3)]
        safetensors(folder / f"rank{rank}.safetensors", {n: np.arange(5) * scale + i for i, n in enumerate(names)})
    return folder


@pytest.fixture
def tokens(counts, choices):
    """The same with choices: two tokens in iteration 50, one in 51."""
    for rank in (0, 1):
        parts = {50: choices[:2], 51: choices[2:]}
        arrays = {
            f"{i}_{layer}": part[:, row].astype(np.int32)
            for i, part in parts.items()
            for row, layer in enumerate((3, 10))
        }
        safetensors(counts / f"token_selected_experts_rank{rank}.safetensors", arrays)
    return counts


def test_counts_of_ranks_add_up(counts):
    found = read_any(counts)
    loads = found.content
    assert (found.format, loads.top_k, loads.layer_ids.tolist()) == ("tensorrt_llm", 2, [3, 10])
    assert loads.window_name == ("iteration 50", "iteration 51")
    assert loads.counts[0, 0].tolist() == [6, 17, 28, 39, 50]  # 50_3 is the last of both ranks
    assert loads.counts[1, 1].tolist() == [0, 11, 22, 33, 44]


def test_choices_are_a_trace(tokens, choices):
    trace = read_any(tokens).content
    assert (trace.layer_ids.tolist(), trace.num_experts, trace.seq_start.tolist()) == ([3, 10], 5, [0, 3])
    assert trace.experts.tolist() == choices.tolist() * 2


@given_trace()
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("tensorrt") / "t"
    assert write_as("tensorrt_llm", path, trace) == ["phase is left out"]
    assert_same(read_any(path).content, trace, "seq_start")
    loads = read_loads(path)
    for file in path.glob("token_selected_*"):
        file.unlink()
    np.testing.assert_array_equal(read_loads(path).counts, loads.counts)  # the counts beside the choices


def test_written_counts_come_back(tmp_path):
    names = ("iteration 0", "iteration 1")
    loads = LoadCounts(np.arange(12).reshape(2, 2, 3), np.array([4, 7]), 2, names, {})
    assert write_as("tensorrt_llm", tmp_path / "t", loads) == []
    back = read_loads(tmp_path / "t")
    np.testing.assert_array_equal(back.counts, loads.counts)
    assert (back.layer_ids.tolist(), back.top_k, back.window_name) == ([4, 7], 2, names)
    with pytest.raises(TraceError, match="top_k is not known"):
        write_as("tensorrt_llm", tmp_path / "u", LoadCounts(loads.counts, loads.layer_ids, None, names, {}))


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("rank1", {"50_3": np.arange(5)}, r"rank1.*: iteration 50 has layers \[3\], but iteration 50 of rank0"),
        ("rank1", {"50_3": np.arange(5), "50_10": np.arange(5)}, "rank1.safetensors has other iterations than rank0"),
        ("rank1", {"x": np.arange(5)}, "rank1.safetensors: has an array 'x'"),
        ("rank1", {"50_3": np.ones(5, np.float32)}, "rank1.safetensors: 50_3 has type float32"),
        ("rank1", {}, "rank1.safetensors: has no arrays"),
        ("rank3", {"50_3": np.arange(5)}, r"misses the files of ranks \[2\] of 4"),
    ],
)
def test_counts_that_do_not_fit(counts, refuses, name, arrays, message):
    safetensors(counts / f"{name}.safetensors", arrays)
    refuses(counts, message)


def test_counts_of_another_size(counts, refuses):
    refuses(counts, "of a model with 5 experts, not 6", Hints(6))
    (counts / "meta_info.json").write_text(json.dumps(META | {"num_experts": 6}))
    refuses(counts, r"rank0.safetensors: 50_3 has shape \(5,\), expected \(6,\)", Hints())


@pytest.mark.parametrize(
    "meta",
    [
        "",
        "[",
        "[]",
        "{}",
        '{"num_experts": 5}',
        '{"num_experts": "5"}',
        meta_of(-1, 2),
        meta_of(5, -2),
        meta_of(10**12, 2),
        meta_of(5, 6),
    ],
)
def test_bad_meta(counts, refuses, meta):
    (counts / "meta_info.json").write_text(meta)
    refuses(counts, "meta_info.json")


def test_files_that_are_missing(counts, refuses):
    lone = counts / "rank0.safetensors"
    refuses(lone, "has no meta_info.json; give the folder")
    lone.unlink()
    refuses(counts, r"misses the files of ranks \[0\] of 2")
    (counts / "rank1.safetensors").unlink()
    refuses(counts, "but no rank0.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "51_3|50_3 of shape .* is at bytes"),
        (lambda content: content[:20], "not a readable safetensors file"),
        (lambda content: b"", "not a readable safetensors file"),
        (lambda content: b"\xff" * 8 + content[8:], "not a readable safetensors file"),
        (lambda content: content.replace(b'"I64"', b'"B16"'), "has type B16"),
        (lambda content: content.replace(b'"shape"', b'"shapf"'), "is described as"),
        (lambda content: content.replace(b"[5]", b"-5 "), "is described as|not a readable"),
        (lambda content: content.replace(b'"I64"', b"[[]] "), "is described as"),
        (lambda content: all_at_the_start(content)[:-80], "arrays of 160 bytes in 80"),
        (lambda content: content.replace(b"[5]", b"[6]"), r"shape \[6\] has 48 bytes, but there are 40"),
    ],
)
def test_damaged_arrays(counts, refuses, change, message):
    file = counts / "rank1.safetensors"
    file.write_bytes(change(file.read_bytes()))
    refuses(counts, f"rank1.safetensors: .*({message})")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([[0, 1, 2]], r"50_3 has shape \(1, 3\), expected \[token, 2\]"),
        ([[0, 5]], "layer 3, token 0 chose expert 5"),
        ([[0, -1]], "iteration 50, layer 3, token 0 chose expert -1"),
        ([[1, 1]], "layer 3, token 0 chose expert 1 twice"),
        ([[0, 1], [1, 2]], "iteration 50: layer 10 has 1 tokens .*layer 3 has 2 tokens"),
    ],
)
def test_bad_choices(tokens, refuses, chosen, message):
    arrays = {"50_3": np.array(chosen, np.int32), "50_10": np.array([[0, 1]], np.int32)}
    safetensors(tokens / "token_selected_experts_rank0.safetensors", arrays)
    refuses(tokens, f"token_selected_experts_rank0.safetensors: .*{message}")


def test_choices_of_fewer_ranks(tokens, refuses):
    (tokens / "token_selected_experts_rank1.safetensors").unlink()
    refuses(tokens, "counts of 2 ranks, but choices of 1")


def test_unsigned_counts_add_up(counts):
    for rank in (0, 1):
        file = counts / f"rank{rank}.safetensors"
        file.write_bytes(file.read_bytes().replace(b'"I64"', b'"U64"'))
    assert read_loads(counts).counts[0, 0].tolist() == [6, 17, 28, 39, 50]


def test_ranks_far_beyond_the_first_are_told_at_once(counts, refuses):
    (counts / "rank1.safetensors").rename(counts / "rank999999999999.safetensors")
    refuses(counts, r"misses the files of ranks \[1, 2, 3, 4, 5, 6, 7, 8\] of 1000000000000")
