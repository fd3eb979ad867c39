"""Load counts without names: .npy, CSV and JSON, and which layers their rows are of."""

import json

import numpy as np
import pytest

from jaxmoe.traces import Hints, LoadCounts, read_any, write_as

COUNTS = [[5, 0, 7], [1, 2, 3]]
LINES = {"comma": "5,0,7\n1,2,3\n", "tab": "5\t0\t7\n1\t2\t3", "semicolon": "5; 0; 7\n\n1; 2; 3\n"}


@pytest.fixture
def same(tmp_path):
    """Files that all hold the same counts."""
    files = {name: tmp_path / name for name in LINES}
    for name, text in LINES.items():
        files[name].write_text(text)
    files |= {"npy": tmp_path / "c.npy", "savetxt": tmp_path / "c.txt", "json": tmp_path / "c.json"}
    np.save(files["npy"], np.array(COUNTS))
    np.savetxt(files["savetxt"], np.array(COUNTS))  # as 5.000e+00 0.000e+00 7.000e+00
    files["json"].write_text(json.dumps(COUNTS))
    return files


@pytest.mark.parametrize("name", [*LINES, "npy", "savetxt", "json"])
def test_the_same_counts_are_read_from_all(same, name):
    found = read_any(same[name])
    assert found.format == "bare_counts"
    assert found.content.counts.tolist() == [COUNTS]
    assert found.content.layer_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("hints", "layers", "rows"),
    [
        (Hints(3, 2, (1, 2), 3), [1, 2], COUNTS),  # a row for each layer with experts
        (Hints(3, 2, (1,), 2), [1], COUNTS[1:]),  # a row for each layer, of which the first is dense
    ],
)
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_rows_are_of_the_model_s_layers(tmp_path, kind, hints, layers, rows):
    counts = np.array([[0, 0, 0], COUNTS[1]] if len(rows) == 1 else COUNTS)
    path = tmp_path / f"c.{kind}"
    np.save(path, counts) if kind == "npy" else np.savez(path, counts=counts)
    found = read_any(path, hints).content
    assert (found.layer_ids.tolist(), found.counts.tolist()) == (layers, [rows])


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_rows_that_nobody_could_tell_the_layers_of_are_refused(tmp_path, refuses, kind):
    path = tmp_path / f"c.{kind}"
    np.save(path, np.array(COUNTS)) if kind == "npy" else np.savez(path, counts=np.array(COUNTS))
    refuses(path, "has rows of 2 layers, but the model has experts in 3; give a row", Hints(3, 2, (1, 2, 3), 4))


def test_stated_layers_need_no_row_for_each(tmp_path):
    np.savez(tmp_path / "c.npz", counts=np.array(COUNTS), layer_ids=np.array([2, 3]))
    assert read_any(tmp_path / "c.npz", Hints(3, 2, (1, 2, 3), 4)).content.layer_ids.tolist() == [2, 3]


def test_an_npz_may_hold_windows_alone(tmp_path):
    windows = np.arange(12).reshape(2, 2, 3)
    np.savez(tmp_path / "c.npz", counts=windows)
    found = read_any(tmp_path / "c.npz").content
    assert found.counts.tolist() == windows.tolist()
    assert len(found.window_name) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5,0,7\n1,2\n", "row 1 has 2 numbers, row 0 has 3"),
        ("5,0,7\n1,b,3\n", "line 2 is '1,b,3', expected counts of experts, numbers alone"),
        ("e0,e1\n5,7\n", "line 1 is 'e0,e1', expected .*; leave out names of columns and rows"),
        ("5,0.5,7\n", "expected whole numbers of tokens"),
        ("5,-1,7\n", "expert 1, window 0 are negative"),
        ("[[1, 2], [3]]", "row 1 has 1 numbers, row 0 has 2"),
    ],
)
def test_what_is_no_table_of_counts_is_told(tmp_path, refuses, text, message):
    (tmp_path / "c.csv").write_text(text)
    refuses(tmp_path / "c.csv", message, Hints())


def test_an_array_of_three_axes_could_be_a_trace_or_windows(tmp_path, refuses):
    np.save(tmp_path / "c.npy", np.zeros((2, 2, 3), int))
    refuses(
        tmp_path / "c.npy", r"single array .*experts \[token, layer, top_k\].*counts \[window, layer, expert\]", Hints()
    )


def test_written_counts_come_back_summed(tmp_path):
    loads = LoadCounts(np.arange(12).reshape(2, 2, 3), np.arange(1, 3), 2, ("a", "b"), {})
    lost = ["layer_ids become positions", "windows are summed", "top_k is left out"]
    assert write_as("bare_counts", tmp_path / "c.json", loads) == lost
    assert read_any(tmp_path / "c.json").content.counts.tolist() == [[[6, 8, 10], [12, 14, 16]]]
