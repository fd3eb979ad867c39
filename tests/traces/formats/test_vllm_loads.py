"""Load statistics of vLLM's open proposal of a file for EPLB."""

import json

import numpy as np
import pytest

from jaxmoe.traces import Hints, LoadCounts, read_any, write_as

# Two layers, three experts in four slots; the second layer has other copies.
RECORD = {
    "record_type": "eplb_load_stats",
    "version": 1,
    "step": 7,
    "num_ranks": 2,
    "expert_load": [[10, 1, 5, 2], [2, 8, 1, 3]],
    "p2l_map": [[0, 1, 2, 0], [1, 2, 0, 1]],
}


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_slots_add_up_to_experts(tmp_path):
    other = RECORD | {"step": 9, "p2l_map": [[0, 1, 2, 1], [2, 1, 0, 1]]}
    path = lines(tmp_path / "stats.jsonl", {"record_type": "session_metadata"}, RECORD, other)
    found = read_any(path, Hints(3, 2, (1, 2), 3))
    assert found.format == "vllm"
    np.testing.assert_array_equal(found.content.counts[0], [[12, 1, 5], [1, 5, 8]])
    np.testing.assert_array_equal(found.content.counts[1], [[10, 3, 5], [1, 11, 2]])
    assert (found.content.window_name, found.content.layer_ids.tolist()) == (("step 7", "step 9"), [1, 2])
    assert read_any(path).content.num_experts == 3


def test_written_counts_come_back(tmp_path):
    counts = np.arange(12).reshape(2, 2, 3)
    loads = LoadCounts(counts, np.arange(2), None, ("step 0", "step 1"), {})
    assert write_as("vllm", tmp_path / "l.jsonl", loads) == ["layer_ids become positions"]
    back = read_any(tmp_path / "l.jsonl").content
    np.testing.assert_array_equal(back.counts, counts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"p2l_map": [[0, 1, 2], [0, 1, 2]]}, r"eplb_load_stats 0: expert_load is \(2, 4\), p2l_map \(2, 3\)"),
        ({"expert_load": [[1, 2], [3]]}, "expert_load is .*, expected whole numbers"),
        ({"expert_load": [[0.5] * 4] * 2}, "expected whole numbers"),
        ({"p2l_map": None}, "p2l_map is None, expected"),
        ({"p2l_map": [[0, 1, 2, 3]] * 2}, "has the expert 3, but the model 3 experts"),
        ({"expert_load": [[1] * 4], "p2l_map": [[0, 1, 2, 0]]}, "has 1 layers, but the model has experts in 2"),
    ],
)
def test_records_that_do_not_fit(tmp_path, refuses, changed, message):
    refuses(lines(tmp_path / "stats.jsonl", RECORD | changed), message, Hints(3, 2, (1, 2), 3))
