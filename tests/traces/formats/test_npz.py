"""The project's npz: every part comes back, load counts have windows, and large arrays are mapped."""

import json
import subprocess
import sys
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import (
    GatingTrace,
    Hints,
    LoadCounts,
    TraceError,
    read_any,
    read_loads,
    read_trace,
    write_as,
    write_trace,
)
from jaxmoe.traces import write_trace_in_parts as in_parts
from jaxmoe.traces.formats import arrays, npz


def full(choices, **changed) -> GatingTrace:
    """A trace with every part, a missing choice among them."""
    experts = choices.copy()
    experts[1, 0, 1] = -1
    parts = {
        "experts": experts,
        "num_experts": 5,
        "layer_ids": np.array([1, 3]),
        "seq_start": np.array([0, 2]),
        "is_repeat": np.array([False, True, False]),
        "facts": {"model": "small"},
        "weights": np.arange(12, dtype=np.float16).reshape(3, 2, 2) / 16,
        "logits": np.arange(30, dtype=np.float16).reshape(3, 2, 5) / 4,
        "phase": np.array([0, 1, 0], np.int8),
        "seq_name": ("math", "code"),
    }
    return GatingTrace(**parts | changed)


def assert_equal(back, trace):
    assert_same(back, trace, "seq_start", "is_repeat", "weights", "logits", "phase")
    assert (back.seq_name, back.facts) == (trace.seq_name, trace.facts)
    assert [getattr(back, name).dtype for name in ("experts", "weights", "phase")] == ["i2", "f2", "i1"]


@pytest.mark.parametrize("most", [0, npz.COMPRESSED_BYTES], ids=["stored", "compressed"])
def test_every_part_comes_back(tmp_path, choices, monkeypatch, most):
    monkeypatch.setattr(npz, "COMPRESSED_BYTES", most)
    write_trace(tmp_path / "t.npz", full(choices))
    assert_equal(read_trace(tmp_path / "t.npz"), full(choices))
    with np.load(tmp_path / "t.npz") as file:  # numpy can read it all
        assert file["logits"].tolist() == full(choices).logits.tolist()


def test_a_text_phase_is_a_fact(tmp_path, choices):
    np.savez(tmp_path / "t.npz", experts=choices, num_experts=5, phase="decode")
    trace = read_trace(tmp_path / "t.npz")
    assert (trace.phase, trace.facts) == (None, {"phase": "decode"})
    write_trace(tmp_path / "copy.npz", trace)
    assert read_trace(tmp_path / "copy.npz").facts == {"phase": "decode"}
    with pytest.raises(TraceError, match=r"facts named \['phase'\]"):
        write_trace(tmp_path / "other.npz", full(choices, facts={"phase": "decode"}))


@given_trace(weights=True, logits=True)
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("npz") / "t.npz"
    assert write_as("npz", path, trace) == []
    assert_same(read_trace(path), trace, "seq_start", "weights", "logits", "phase")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": np.full((3, 2, 2), np.nan)}, "weights of layer 0, token 0 are not finite"),
        ({"weights": np.full((3, 2, 2), np.inf)}, "weights of layer 0, token 0 are not finite"),
        ({"logits": np.full((3, 2, 5), -np.inf)}, "logits of layer 0, token 0 are not finite"),
        ({"logits": np.zeros((3, 2, 4))}, "logits has shape"),
        ({"weights": np.zeros((3, 2, 2), int)}, "weights has type int64"),
        ({"phase": [0, 1, 2]}, "token 2 has phase 2"),
        ({"phase": [0, 1]}, r"phase has shape \(2,\)"),
        ({"seq_name": [1]}, "seq_name is int64"),
        ({"seq_name": ["a", "b"]}, "seq_name has 2 names for the 1 sequences"),
        ({"experts": np.full((3, 2, 2), -2)}, "chose expert -2"),
    ],
)
def test_optional_arrays_that_do_not_fit(tmp_path, choices, refuses, changed, message):
    np.savez(tmp_path / "t.npz", **{"experts": choices, "num_experts": 5} | changed)
    refuses(tmp_path / "t.npz", message)


# Large files.


def test_stored_arrays_are_mapped_in_place(tmp_path, choices):
    np.savez(tmp_path / "t.npz", experts=choices, num_experts=5, weights=np.ones((3, 2, 2), np.float16))
    trace = read_trace(tmp_path / "t.npz")
    assert isinstance(trace.experts, np.memmap)
    assert isinstance(trace.weights, np.memmap)
    np.testing.assert_array_equal(trace.experts, choices)
    assert not trace.experts.flags.writeable


def test_fortran_order_is_kept(tmp_path, choices):
    np.savez(tmp_path / "t.npz", experts=np.asfortranarray(choices), num_experts=5)
    np.testing.assert_array_equal(read_trace(tmp_path / "t.npz").experts, choices)


def test_large_compressed_arrays_are_mapped_from_a_temporary_file(tmp_path, choices, monkeypatch):
    monkeypatch.setattr(arrays, "UNPACKED_BYTES", 16)
    monkeypatch.setattr(arrays, "PIECE_BYTES", 7)
    write_trace(tmp_path / "t.npz", full(choices))
    back = read_trace(tmp_path / "t.npz")
    assert isinstance(back.experts, np.memmap)
    assert_equal(back, full(choices))


@pytest.mark.parametrize("limit", [16, arrays.UNPACKED_BYTES])
def test_damaged_data_are_noticed(tmp_path, choices, refuses, monkeypatch, limit):
    monkeypatch.setattr(arrays, "UNPACKED_BYTES", limit)
    np.savez(tmp_path / "t.npz", experts=choices, num_experts=5)
    data = bytearray((tmp_path / "t.npz").read_bytes())
    data[data.index(choices.tobytes())] ^= 1
    (tmp_path / "t.npz").write_bytes(data)
    refuses(tmp_path / "t.npz", "not a readable npz .*CRC")


def test_an_array_shorter_than_its_header_tells_is_noticed(tmp_path, refuses):
    for method in (0, ZIP_DEFLATED):
        with ZipFile(tmp_path / "t.npz", "w", method) as archive, archive.open("experts.npy", "w") as member:
            header = {"descr": "<i2", "fortran_order": False, "shape": (10**6, 2, 2)}
            np.lib.format.write_array_header_1_0(member, header)
            member.write(bytes(100))
        refuses(tmp_path / "t.npz", "not a readable npz")


SMALL_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from jaxmoe.traces import load_counts, read_trace, write_trace_in_parts
from jaxmoe.traces import trace

trace.chunks.__defaults__ = (2**21,)
tokens, path = 50_000, Path(sys.argv[1])
part = np.broadcast_to(np.arange(8, dtype=np.int16), (2_500, 60, 8))
arguments = dict(num_tokens=tokens, num_experts=16, top_k=8, layer_ids=range(60), facts={})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_trace_in_parts(path, (part for _ in range(tokens // len(part))), **arguments)
counts = load_counts(read_trace(path)).counts
print(path.stat().st_size, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), counts.sum())
"""


def test_a_large_trace_needs_little_memory(tmp_path):
    arguments = [sys.executable, "-c", SMALL_MEMORY, str(tmp_path / "t.npz")]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    size, memory, choices = map(int, shown.split())
    assert size > 48e6
    assert memory < 32e6  # the work on chunks, here of 2 MiB
    assert choices == 50_000 * 60 * 8


def test_parts_make_the_same_trace(tmp_path, choices):
    arguments = {"num_tokens": 3, "num_experts": 5, "top_k": 2, "layer_ids": (1, 3), "facts": {"model": "small"}}
    arguments |= {"seq_start": np.array([0, 2]), "seq_name": ("a", "b"), "phase": np.array([0, 1, 0], np.int8)}
    in_parts(tmp_path / "t.npz", iter([choices[:2].astype(int), choices[2:]]), **arguments)
    trace = read_trace(tmp_path / "t.npz")
    assert isinstance(trace.experts, np.memmap)
    np.testing.assert_array_equal(trace.experts, choices)
    assert (trace.layer_ids.tolist(), trace.seq_start.tolist(), trace.seq_name) == ([1, 3], [0, 2], ("a", "b"))
    assert (trace.phase.tolist(), trace.facts) == ([0, 1, 0], {"model": "small"})


@pytest.mark.parametrize(
    ("tokens", "scale", "message"),
    [
        (4, 1, "the parts have 3 tokens in all, expected 4"),
        (2, 1, "the part at token 0 has shape"),
        (3, 2, "chose expert 6"),
        (3, 0, "twice"),
    ],
)
def test_parts_that_do_not_fit_leave_the_older_file(tmp_path, choices, tokens, scale, message):
    (tmp_path / "t.npz").write_text("old")
    arguments = {"num_tokens": tokens, "num_experts": 5, "top_k": 2, "layer_ids": (1, 3), "facts": {}}
    with pytest.raises(TraceError, match=message):
        in_parts(tmp_path / "t.npz", [choices * scale], **arguments)
    assert (tmp_path / "t.npz").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


# Load counts.


def loads(**changed) -> dict:
    groups = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    given = {"counts": groups.sum(0), "num_experts": 3, "top_k": 2, "layer_ids": [4, 7], "model": "small"}
    return given | {"counts_by_group": groups, "group_name": ["a", "b"]} | changed


def test_load_counts_with_groups(tmp_path):
    np.savez(tmp_path / "l.npz", **loads())
    back = read_loads(tmp_path / "l.npz")
    assert (back.counts.shape, back.counts.dtype, back.window_name) == ((2, 2, 3), np.int64, ("a", "b"))
    assert (back.layer_ids.tolist(), back.top_k, back.facts) == ([4, 7], 2, {"model": "small"})


def test_load_counts_of_requests_and_of_all(tmp_path):
    requests = np.ones((3, 2, 4), np.int16)
    np.savez(tmp_path / "l.npz", counts=requests.sum(0), counts_by_request=requests)
    back = read_loads(tmp_path / "l.npz")
    assert (back.window_name, back.layer_ids.tolist(), back.top_k) == (
        ("request 0", "request 1", "request 2"),
        [0, 1],
        None,
    )
    np.savez(tmp_path / "l.npz", counts=requests.sum(0))
    assert read_loads(tmp_path / "l.npz").window_name == ("all",)


@pytest.mark.parametrize("windows", [1, 2])
def test_written_load_counts_come_back(tmp_path, windows):
    names = ("all",) if windows == 1 else ("a", "b")
    written = LoadCounts(np.arange(windows * 6).reshape(windows, 2, 3), np.array([4, 7]), 2, names, {"model": "x"})
    assert write_as("npz", tmp_path / "l.npz", written) == []
    back = read_any(tmp_path / "l.npz")
    np.testing.assert_array_equal(back.content.counts, written.counts)
    assert (back.format, back.content.window_name, back.content.facts) == ("npz", names, {"model": "x"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"counts": np.ones((2, 3))}, "counts is not the sum of its windows"),
        ({"counts": np.ones(3, int)}, r"counts has shape \(3,\)"),
        ({"counts_by_group": -loads()["counts_by_group"]}, "are negative"),
        ({"num_experts": 4}, "counts has 3 experts, but num_experts is 4"),
        ({"top_k": 5}, "top_k is 5"),
        ({"group_name": ["a"]}, "window_name has 1 names for 2 windows"),
    ],
)
def test_load_counts_that_do_not_fit(tmp_path, refuses, changed, message):
    np.savez(tmp_path / "l.npz", **loads(**changed))
    refuses(tmp_path / "l.npz", message, Hints())


def test_a_trace_is_counted_where_load_counts_are_wanted(tmp_path, trace):
    write_trace(tmp_path / "t.npz", trace)
    assert read_loads(tmp_path / "t.npz").counts.sum() == trace.experts.size


def test_load_counts_are_no_trace_and_have_no_tokens_to_write(tmp_path):
    np.savez(tmp_path / "l.npz", **loads())
    with pytest.raises(TraceError, match="load counts have no token order"):
        read_trace(tmp_path / "l.npz")
    with pytest.raises(TraceError, match="cannot be written as megatron"):
        write_as("megatron", tmp_path / "x", read_loads(tmp_path / "l.npz"))


def test_recorded_load_counts(shared):
    folder = shared / "traces"
    olmoe = read_loads(folder / "olmoe-1b-7b" / "load_alpaca_examples_000-767.npz")
    assert (olmoe.counts.shape, olmoe.counts.sum(), olmoe.top_k) == ((768, 16, 64), 8375168, 8)
    assert olmoe.window_name[767] == "request 767"
    mixtral = read_loads(folder / "mixtral-8x7b" / "load_c4.npz")
    assert (mixtral.layer_ids.tolist(), mixtral.window_name) == ([0, 7, 15], ("all",))
    for path in sorted(folder.glob("gpt-oss-20b/load_*.npz")):
        with np.load(path) as file:
            assert read_loads(path).window_name == tuple(file["group_name"])


def test_recorded_weights_and_names_come_back(shared, tmp_path):
    trace = read_trace(shared / "traces" / "gpt-oss-20b" / "tulu3_polyglot.npz")
    assert trace.weights is not None
    assert len(trace.seq_name or ()) == 4
    write_trace(tmp_path / "copy.npz", trace)
    copy = read_trace(tmp_path / "copy.npz")
    np.testing.assert_array_equal(copy.weights, trace.weights)
    assert copy.seq_name == trace.seq_name
    assert json.dumps(copy.facts)
