"""FLAME-MoE's Parquet: files made with pyarrow alone, whose names tell iteration and layer."""

import sys

import numpy as np
import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import Hints, read_any, read_trace, write_as

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SCORES = [[0.5, 0.25], [0.75, 0.125], [0.5, 0.5]]


def write(file, indices, scores=SCORES, kind=None):
    columns = {"indices": arrow.array(indices, kind or arrow.list_(arrow.int16()))}
    if scores is not None:
        halves = [[np.float16(score) for score in row] for row in scores]
        columns["scores"] = arrow.array(halves, arrow.list_(arrow.float16()))
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), file)


@pytest.fixture
def folder(tmp_path, choices):
    """Two iterations; layers 1 and 3 are called 2 and 4, as Megatron counts."""
    for iteration in (20, 7):
        for row, layer in enumerate((2, 4)):
            write(tmp_path / "t" / f"{iteration}" / f"layer_{layer:02d}.parquet", choices[:, row].tolist())
    return tmp_path / "t"


def test_a_folder(folder, choices):
    found = read_any(folder)
    trace = found.content
    assert (found.format, trace.layer_ids.tolist(), trace.num_experts) == ("flame_moe", [1, 3], 5)
    assert trace.experts.tolist() == [*choices.tolist()] * 2
    assert (trace.seq_name, trace.seq_start.tolist()) == (("iteration 7", "iteration 20"), [0, 3])
    assert trace.weights.dtype == np.float16
    assert trace.weights[:, 1].tolist() == SCORES * 2


@pytest.mark.parametrize(
    "name", ["iter_0000005/layer_02.parquet", "layer2-iteration-5.parquet", "5/layer-02/x.parquet", "layer_2/5.parquet"]
)
def test_numbers_in_names(tmp_path, choices, name):
    write(tmp_path / "t" / name, choices[:, 0].tolist(), None)
    trace = read_trace(tmp_path / "t")
    assert (trace.seq_name, trace.layer_ids.tolist(), trace.weights) == (("iteration 5",), [1], None)


def test_one_file_by_its_content(tmp_path, choices):
    write(tmp_path / "layer_02.txt", choices[:, 0].tolist())
    assert read_trace(tmp_path / "layer_02.txt").layer_ids.tolist() == [1]


@given_trace(weights=True)
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("flame") / "t"
    assert write_as("flame_moe", path, trace) == ["phase is left out"]
    back = read_any(path, Hints(trace.num_experts)).content
    assert_same(back, trace, "seq_start", "weights")
    assert write_as("flame_moe", path, back) == []
    assert read_any(path, Hints(trace.num_experts)).content.seq_name == back.seq_name


@pytest.mark.parametrize(
    ("indices", "scores", "message"),
    [
        ([[0, 1], [2], [3, 4]], SCORES, r"indices of token 1 are \[2\], expected 2 as in token 0"),
        ([[0, 1], None, [3, 4]], SCORES, "indices of token 1 are None"),
        ([[0, 1], [2, None], [3, 4]], SCORES, "indices of token 1 have a null"),
        ([[0, 1], [2, 3], [3, 5]], SCORES, "layer 3, token 2 chose expert 5"),
        ([[0, 1], [2, 3], [3, 3]], SCORES, "layer 3, token 2 chose expert 3 twice"),
        ([[0, 1], [2, 3], [3, -1]], SCORES, "layer 3, token 2 chose expert -1"),
        ([[0, 1], [2, 3]], SCORES[:2], "layer 3 has 2 tokens .*layer 1 has 3 tokens"),
        ([[0, 1], [2, 3], [3, 4]], [[1, 0], [1, float("nan")], [1, 0]], "weights of layer 3, token 1 are not finite"),
        ([[0, 1], [2, 3], [3, 4]], [[1, 0], [1, float("inf")], [1, 0]], "weights of layer 3, token 1 are not finite"),
        ([[0, 1], [2, 3], [3, 4]], [[1], [1], [1]], "scores are not one for each"),
        ([[0, 1], [2, 3], [3, 4]], None, r"iteration 20: layers \[3\] have no scores"),
        ([], [], "indices is empty"),
    ],
)
def test_bad_columns(folder, refuses, indices, scores, message):
    write(folder / "20" / "layer_04.parquet", indices, scores)
    refuses(folder, message)


def test_wrong_types(folder, refuses):
    write(folder / "20" / "layer_04.parquet", [[0.5]], None, arrow.list_(arrow.float32()))
    refuses(folder, r"20/layer_04.parquet: indices has type list<.*float.*expected list<int16>")
    parquet.write_table(arrow.table({"ids": [1]}), folder / "20" / "layer_04.parquet")
    refuses(folder, "20/layer_04.parquet: has no column indices")


def test_files_that_do_not_fit(folder, refuses, choices):
    file = folder / "20" / "layer_04.parquet"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    refuses(folder, "20/layer_04.parquet: not readable as Parquet")
    file.unlink()
    refuses(folder, r"iteration 20 has layers \[2\], but 7 has \[2, 4\]")
    file.write_bytes(content)
    write(folder / "20" / "copy_layer_4.parquet", choices[:, 0].tolist())
    refuses(folder, "are both iteration 20, layer 4")
    (folder / "20" / "copy_layer_4.parquet").rename(folder / "other.parquet")
    refuses(folder, "other.parquet: the name has no layer number")
    (folder / "other.parquet").rename(folder / "20" / "layer_00.parquet")
    refuses(folder, "counts layers from 1")


def test_without_pyarrow(folder, refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuses(folder, r"needs pyarrow; install it with: .*pip install '.*\[traces\]'")


def test_columns_whose_names_are_not_text(folder, refuses):
    file = folder / "20" / "layer_04.parquet"
    file.write_bytes(file.read_bytes().replace(b"indices", b"indi\xffes"))
    refuses(folder, "20/layer_04.parquet: (not readable as Parquet|has no column)")
