"""Trace files keep what they are given, and files that are no trace say why."""

import json
import pickle
import re
import time

import numpy as np
import pytest

from jaxmoe.traces import GatingTrace, TraceError, read_trace, synthetic_trace, write_trace

EXPERTS = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 0]], [[2, 1], [0, 1]]], np.int16)


def small(**facts) -> GatingTrace:
    return GatingTrace(EXPERTS, 4, np.array([5, 7]), np.array([0, 2]), np.array([False, True, False]), facts)


def arrays(**changed) -> dict:
    """The arrays of a legal npz, some changed, those that are `None` left out."""
    given = {"experts": EXPERTS, "num_experts": 4} | changed
    return {name: array for name, array in given.items() if array is not None}


def layers(**changed) -> dict:
    """A legal JSON object of layers 2 and 10 with three tokens each, some layers changed."""
    return {"10": [[1, 0], [3, 2], [0, 2]], "2": [[0, 1], [2, 3], [1, 3]]} | changed


# What comes back.


def test_npz_round_trip(tmp_path):
    path = tmp_path / "trace.npz"
    write_trace(path, small(model="small", dataset="none"))
    back = read_trace(path)
    np.testing.assert_array_equal(back.experts, EXPERTS)
    assert back.experts.dtype == np.int16
    assert (back.num_experts, back.layer_ids.tolist(), back.seq_start.tolist()) == (4, [5, 7], [0, 2])
    assert back.is_repeat.tolist() == [False, True, False]
    assert back.facts == {"model": "small", "dataset": "none"}
    assert [file.name for file in tmp_path.iterdir()] == ["trace.npz"]


def test_written_file_has_the_arrays_of_the_layout(tmp_path):
    write_trace(tmp_path / "trace.npz", small(license="MIT"))
    with np.load(tmp_path / "trace.npz") as file:
        assert set(file.files) == {"experts", "num_experts", "layer_ids", "seq_start", "is_repeat", "license"}
        assert (file["experts"].dtype, file["num_experts"].shape, file["license"].shape) == (np.int16, (), ())


def test_optional_arrays_have_defaults_and_gate_weights_are_left(tmp_path):
    np.savez(tmp_path / "trace.npz", **arrays(weights=np.ones(EXPERTS.shape, np.float16), phase="decode"))
    trace = read_trace(tmp_path / "trace.npz")
    assert (trace.layer_ids.tolist(), trace.seq_start.tolist(), trace.is_repeat) == ([0, 1], [0], None)
    assert trace.facts == {"phase": "decode"}


def test_json_layers_come_in_numeric_order(tmp_path):
    path = tmp_path / "experts.txt"  # content decides, not the name
    path.write_text(json.dumps(layers()))
    trace = read_trace(path)
    assert trace.layer_ids.tolist() == [2, 10]
    np.testing.assert_array_equal(trace.experts[:, 0], layers()["2"])
    np.testing.assert_array_equal(trace.experts[:, 1], layers()["10"])
    assert (trace.num_experts, read_trace(path, 6).num_experts) == (4, 6)


def test_number_of_experts_must_agree(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays())
    assert read_trace(path, 4).num_experts == 4
    with pytest.raises(TraceError, match=r"trace\.npz: is of a model with 4 experts, not 8"):
        read_trace(path, 8)
    np.savez(path, **arrays(num_experts=None))
    assert read_trace(path, 8).num_experts == 8
    with pytest.raises(TraceError, match="does not state num_experts"):
        read_trace(path)


# What is refused. Every message starts with the file's name.


def refuses(path, message, num_experts=None):
    with pytest.raises(TraceError, match=rf"^{re.escape(str(path))}: .*{message}"):
        read_trace(path, num_experts)


def test_missing_files_and_folders(tmp_path):
    refuses(tmp_path / "absent.npz", "no such trace file")
    refuses(tmp_path, "not readable .*directory")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04", "not a readable npz"),
        (b"experts: 8\n", "neither npz nor JSON"),
        (b"\xff\xfe\x00", "neither npz nor JSON"),
        (pickle.dumps({"experts": [1]}), "neither npz nor JSON"),
        (b"[" * 100_000, "neither npz nor JSON"),
        (b'{"0": [[1, 0], [2', "neither npz nor JSON"),
        (b'{"0": [[1, 0]], "0": [[1, 0]]}', "has the key '0' twice"),
    ],
    ids=["empty", "zip head", "text", "binary", "pickle", "deep", "truncated JSON", "equal keys"],
)
def test_files_of_another_kind(tmp_path, content, message):
    (tmp_path / "trace").write_bytes(content)
    refuses(tmp_path / "trace", message)


def test_single_array_file(tmp_path):
    np.save(tmp_path / "trace.npy", EXPERTS)
    refuses(tmp_path / "trace.npy", "a single array")


def test_truncated_and_damaged_npz(tmp_path):
    path = tmp_path / "trace.npz"
    write_trace(path, small(model="small"))
    whole = path.read_bytes()
    for length in (5, 40, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:length])
        refuses(path, "not a readable npz")
    data = bytearray(whole)
    start = 30 + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
    data[start] = 0xFF  # the first array becomes a compressed block of a type that does not exist
    path.write_bytes(bytes(data))
    refuses(path, "not a readable npz")


class Trap:
    """Unpickling it would be noticed."""

    def __reduce__(self):
        return pytest.fail, ("the file was unpickled",)


@pytest.mark.parametrize("name", ["experts", "model"])
def test_objects_are_never_unpickled(tmp_path, name):
    np.savez(tmp_path / "trace.npz", **arrays(**{name: np.array([Trap()], object)}))
    refuses(tmp_path / "trace.npz", "not a readable npz .*pickle")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"experts": None}, "has no array experts, only .*num_experts"),
        ({"experts": None, "counts": np.ones((2, 4))}, "load counts have no token order"),
        ({"experts": EXPERTS.astype(np.float32)}, "experts has type float32"),
        ({"experts": np.array("many")}, "experts has type <U4"),
        ({"experts": EXPERTS[0]}, r"experts has shape \(2, 2\)"),
        ({"experts": np.int16(3)}, r"experts has shape \(\)"),
        ({"num_experts": 3}, "layer 1, token 0 chose expert 3, expected 0..2"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 4.0}, "num_experts is float64"),
        ({"num_experts": [4, 4]}, r"num_experts is int64 of shape \(2,\)"),
        ({"experts": EXPERTS * 0}, "layer 0, token 0 chose expert 0 twice"),
        ({"layer_ids": [1, 2, 3]}, "layer_ids has shape"),
        ({"seq_start": [0, 2, 1]}, "seq_start"),
        ({"seq_start": [0, 3]}, "seq_start"),
        ({"is_repeat": [True]}, "is_repeat has shape"),
    ],
)
def test_npz_files_that_are_no_trace(tmp_path, changed, message):
    np.savez(tmp_path / "trace.npz", **arrays(**changed))
    refuses(tmp_path / "trace.npz", message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[[0, 1]]], "JSON holds a list, expected an object"),
        (3, "JSON holds a int"),
        ({}, "JSON holds an empty object"),
        (layers(model=[[0, 1]]), "has the key 'model', expected only layer numbers"),
        (layers(**{"-1": [[0, 1]]}), "has the key '-1'"),
        (layers(**{"02": layers()["2"]}), "layer_ids names a layer twice"),
        (layers(**{"2": []}), r"layer 2 holds \[\], expected a list of tokens"),
        (layers(**{"2": {"0": [0, 1]}}), "layer 2 holds .*, expected a list of tokens"),
        (layers(**{"10": [[1, 0], [3], [0, 2]]}), r"layer 10, token 1 is \[3\], expected 2 expert ids"),
        (layers(**{"10": [[1, 0], 3, [0, 2]]}), "layer 10, token 1 is 3, expected a list"),
        (layers(**{"10": [[1, 0], [3, 2], [0, 2.0]]}), r"layer 10, token 2 is \[0, 2.0\], expected whole numbers"),
        (layers(**{"10": [[1, 0], [float("nan"), 2], [0, 2]]}), r"layer 10, token 1 is \[nan, 2\]"),
        (layers(**{"10": [[1, 0], [True, 2], [0, 2]]}), r"layer 10, token 1 is \[True, 2\]"),
        (layers(**{"10": [[1, 0], ["3", 2], [0, 2]]}), r"layer 10, token 1 is \['3', 2\]"),
        (layers(**{"10": [[1, 0], [10**30, 2], [0, 2]]}), "layer 10 holds an expert id of more than 64 bits"),
        (layers(**{"10": [[1, 0], [-3, 2], [0, 2]]}), "layer 10, token 1 chose expert -3"),
        (layers(**{"10": [[1, 0], [3, 3], [0, 2]]}), "layer 10, token 1 chose expert 3 twice"),
        (layers(**{"10": [[1, 0], [3, 2]]}), "layer 10 has 2 tokens .*layer 2 has 3 tokens"),
        (layers(**{"10": [[1], [3], [2]]}), "layer 10 has 3 tokens with 1 experts"),
        ({"0": [[], []]}, r"experts has shape \(2, 1, 0\)"),
        ({"0": [[40000]]}, "num_experts is 40001, expected 1 to 32768"),
        ({"9" * 30: [[0]]}, "expected only layer numbers"),
    ],
)
def test_json_files_that_are_no_trace(tmp_path, content, message):
    (tmp_path / "trace.json").write_text(json.dumps(content))
    refuses(tmp_path / "trace.json", message)


def test_json_of_a_larger_model(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps(layers()))
    refuses(tmp_path / "trace.json", "layer 2, token 1 chose expert 3, expected 0..2", num_experts=3)


def test_failed_writing_keeps_the_older_file_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "trace.npz"
    write_trace(path, small(model="old"))

    def broken(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", broken)
    with pytest.raises(OSError, match="disk full"):
        write_trace(path, small(model="new"))
    assert read_trace(path).facts == {"model": "old"}
    assert [file.name for file in tmp_path.iterdir()] == ["trace.npz"]


@pytest.mark.parametrize("name", ["experts", "weights", "file"])
def test_facts_cannot_take_the_name_of_an_array(tmp_path, name):
    with pytest.raises(TraceError, match=rf"facts named \['{name}'\] cannot be written"):
        write_trace(tmp_path / "trace.npz", small(**{name: "text"}))
    assert list(tmp_path.iterdir()) == []


# Real files.


@pytest.mark.parametrize(
    ("name", "shape", "num_experts", "sequences", "model"),
    [
        ("mixtral-8x7b/coding", (12138, 32, 2), 8, 10, "Mixtral-8x7B"),
        ("deepseek-v2-lite/intent", (8222, 26, 6), 64, 127, "DeepSeek-V2-Lite"),
        ("gpt-oss-20b/tulu3_polyglot", (1331, 24, 4), 32, 4, "openai/gpt-oss-20b"),
    ],
)
def test_recorded_npz(shared, tmp_path, name, shape, num_experts, sequences, model):
    trace = read_trace(shared / "traces" / f"{name}.npz", num_experts)
    assert (trace.experts.shape, trace.num_experts, len(trace.seq_start)) == (shape, num_experts, sequences)
    assert trace.facts["model"].startswith(model)
    assert {"dataset", "source", "license", "phase"} < trace.facts.keys()
    assert (trace.is_repeat is not None) == (model == "Mixtral-8x7B")
    write_trace(tmp_path / "copy.npz", trace)
    copy = read_trace(tmp_path / "copy.npz")
    np.testing.assert_array_equal(copy.experts, trace.experts)
    assert copy.facts == trace.facts


def test_recorded_json_equals_its_npz(shared):
    json_trace = read_trace(shared / "traces" / "raw" / "hd-moe_mixtral_reasoning.json")
    npz_trace = read_trace(shared / "traces" / "mixtral-8x7b" / "reasoning.npz")
    np.testing.assert_array_equal(json_trace.experts, npz_trace.experts)
    np.testing.assert_array_equal(json_trace.layer_ids, npz_trace.layer_ids)
    assert json_trace.num_experts == npz_trace.num_experts == 8


def test_recorded_load_counts_are_no_trace(shared):
    refuses(shared / "traces" / "mixtral-8x7b" / "load_c4.npz", "load counts have no token order")


def test_large_json_is_read_in_seconds(tmp_path):
    trace = synthetic_trace(8386, range(32), 8, 2, skew=0.5, coactivation=0.2, reuse=0.2, seed=0)
    path = tmp_path / "large.json"
    path.write_text(json.dumps({str(layer): trace.experts[:, layer].tolist() for layer in range(32)}))
    start = time.process_time()
    np.testing.assert_array_equal(read_trace(path).experts, trace.experts)
    assert time.process_time() - start < 5
