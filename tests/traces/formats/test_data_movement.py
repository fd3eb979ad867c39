"""The data-movement study's requests: one file, and a whole tree of folders."""

import json

import pytest
from made_up import assert_same, given_trace

from jaxmoe.traces import Hints, TraceError, read_any, read_trace, write_as

# Five layers, of which 1 and 3 have experts; two tokens of prefill and two decode steps.
STEPS = [
    {"0": None, "1": [[0, 1], [4, 0]], "2": None, "3": [[2, 3], [3, 0]], "4": None},
    {"0": None, "1": [[2, 1]], "2": None, "3": [[0, 1]], "4": None},
    {"0": None, "1": [[3, 1]], "2": None, "3": [[4, 1]], "4": None},
]
EXPERTS = [[[0, 1], [2, 3]], [[4, 0], [3, 0]], [[2, 1], [0, 1]], [[3, 1], [4, 1]]]


def tree(folder, **files):
    """Requests in the folders of a data set, by subject and name."""
    for place, steps in ({"anatomy/b": STEPS[:2], "anatomy/a": STEPS} | files).items():
        file = folder / "org" / "model" / "mmlu" / f"{place}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(steps if isinstance(steps, str) else json.dumps(steps))
    return folder


def test_one_request(tmp_path):
    (tmp_path / "request").write_text(json.dumps(STEPS))
    found = read_any(tmp_path / "request")
    trace = found.content
    assert (found.format, trace.layer_ids.tolist(), trace.num_experts) == ("data_movement", [1, 3], 5)
    assert trace.experts.tolist() == EXPERTS
    assert (trace.phase.tolist(), trace.seq_start.tolist(), trace.seq_name) == ([0, 0, 1, 1], [0], ("request",))


def test_a_tree_of_requests(tmp_path):
    trace = read_trace(tree(tmp_path), 8)
    assert trace.seq_name == ("org/model/mmlu/anatomy/a.json", "org/model/mmlu/anatomy/b.json")
    assert trace.experts.tolist() == EXPERTS + EXPERTS[:3]
    assert (trace.seq_start.tolist(), trace.phase.tolist()) == ([0, 4], [0, 0, 1, 1, 0, 0, 1])
    assert trace.facts == {"source": tmp_path.name, "model": "org/model", "dataset": "mmlu/anatomy"}
    assert trace.num_experts == 8


def test_folders_inside_the_tree_have_the_same_names(tmp_path):
    tree(tmp_path, **{"law/c": STEPS})
    assert read_trace(tmp_path).facts["dataset"] == "mmlu"
    facts = read_trace(tmp_path / "org" / "model" / "mmlu" / "law").facts
    assert (facts["model"], facts["dataset"]) == ("org/model", "mmlu/law")
    assert read_trace(tmp_path / "org" / "model" / "mmlu" / "law" / "c.json").facts["model"] == "org/model"


@given_trace()
def test_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("movement") / "t"
    assert write_as("data_movement", path, trace) == []
    assert_same(read_any(path, Hints(trace.num_experts)).content, trace, "seq_start", "phase")


def test_model_and_names_come_back(tmp_path, trace):
    write_as("data_movement", tmp_path / "t", trace)
    back = read_trace(tmp_path / "t", 5)
    assert (back.facts["model"], back.facts["dataset"]) == ("org/small", "mmlu/anatomy")
    assert back.seq_name == tuple(f"org/small/mmlu/anatomy/0000{i}_{i}.json" for i in range(2))


def test_phases_that_the_format_cannot_tell(tmp_path, trace):
    trace.phase[:] = [1, 0, 0]
    with pytest.raises(TraceError, match="sequence 0 goes back from decode to prefill"):
        write_as("data_movement", tmp_path / "t", trace)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ('[{"0": [[1, 0]', "neither npz nor JSON"),
        ("", "neither npz nor JSON"),
        ({"1": [[0, 1]]}, "not a request"),
        ([], "not a request"),
        ([1, 2], "not a request"),
        ([*STEPS, 3], "step 3: holds 3, expected an object"),
        ([{"1": None}], "null for every layer"),
        ([*STEPS, {"1": [[0, 1]], "3": None}], r"step 3: has experts in layers \[1\], but step 0 in \[1, 3\]"),
        ([*STEPS, {"1": [[0, 1]], "3": [[0, 1], [1, 2]]}], r"step 3: layers have different .*\{1: 1, 3: 2\}"),
        ([*STEPS, {"1": [[0, 1]], "x": [[0, 1]]}], "step 3: JSON has the key 'x'"),
        ([*STEPS, {"1": [[0, 1, 2]], "3": [[0, 1]]}], r"layer 1, token 4 is \[0, 1, 2\], expected 2"),
        ([*STEPS, {"1": [[0, 1.5]], "3": [[0, 1]]}], "layer 1, token 4 .*expected whole numbers"),
        ([*STEPS, {"1": [[0, -1]], "3": [[0, 1]]}], "layer 1, token 4 chose expert -1"),
        ([*STEPS, {"1": [[0, 5]], "3": [[0, 1]]}], "layer 1, token 4 chose expert 5, expected 0..4"),
        ([*STEPS, {"1": [[3, 3]], "3": [[0, 1]]}], "layer 1, token 4 chose expert 3 twice"),
        ([{"2": [[0, 1]]}], r"has experts in layers \[2\], but org.*a.json in \[1, 3\]"),
        ([{"1": [[0]], "3": [[1]]}], "2 layers with 1 experts per token"),
        ([{"1": [], "3": []}], "step 0: layer 1 holds .*expected a list of tokens"),
    ],
)
def test_one_bad_file_is_named(tmp_path, refuses, steps, message):
    refuses(tree(tmp_path, **{"law/bad": steps}), f"org/model/mmlu/law/bad.json.*{message}")


def test_files_of_two_models(tmp_path, refuses):
    tree(tmp_path)
    (tmp_path / "org" / "model").rename(tmp_path / "org" / "other")
    refuses(tree(tmp_path), "files of 2 models, org/model, org/other")
