"""`jaxmoe plan`: files that engines load, converted, shown, compared and checked."""

import json
import re

import numpy as np
import pytest
import yaml

from jaxmoe.experiment.slot_plans import windows_of
from jaxmoe.placement.engine_files import write_slot_plan
from jaxmoe.placement.slots import SlotPlan
from jaxmoe.traces import write_trace
from jaxmoe.traces.synthetic import synthetic_trace

MODEL = {
    "hidden_size": 64,
    "expert_size": 32,
    "num_experts": 4,
    "top_k": 2,
    "moe_layer_ids": {"first": 1, "count": 2},
    "dense_size": 64,
}
MACHINE = {
    "kind": "mesh",
    "mesh_shape": [1, 3],
    "link": {"bandwidth_GB_per_s": 1e-6, "latency_ns": 0},
    "die": {"compute_TFLOPs_per_s": 1, "memory_bandwidth_GB_per_s": 1, "memory_capacity_GB": 1},
}
BEFORE = np.array([[0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 0, 1]])
AFTER = np.array([[0, 1, 1, 2, 0, 3], [0, 1, 2, 3, 0, 1]])


@pytest.fixture
def files(tmp_path):
    paths = {"model": tmp_path / "model.yaml", "machine": tmp_path / "machine.yaml"}
    paths["model"].write_text(yaml.safe_dump(MODEL))
    paths["machine"].write_text(yaml.safe_dump(MACHINE))
    for name, slots in (("before", BEFORE), ("after", AFTER)):
        paths[name] = tmp_path / f"{name}.json"
        write_slot_plan(paths[name], "vllm_ascend", SlotPlan(slots, 3, 4, (1, 2), 3))
    paths["trace"] = tmp_path / "recorded.npz"
    write_trace(paths["trace"], synthetic_trace(40, (1, 2), 4, 2, 1.5, 0.0, 0.0, 3))
    return paths


def told(out):
    return json.loads((out / "summary.json").read_text())


def test_place_for_a_trace(run, files, out, tmp_path):
    path = tmp_path / "trace.npz"
    write_trace(path, synthetic_trace(400, (1, 2), 4, 2, 1.5, 0.0, 0.0, 3))
    given = ("--slots", 6, "--ranks", 3, "--to", "vllm_ascend", "--model", files["model"])
    result = run("plan", "place", path, *given, "--out", out)
    assert result.exit_code == 0, result.output
    found = told(out)["max_over_mean"]
    assert found["same_loads"]["placed"] < found["same_loads"]["in_order"]
    assert found["later_loads"].keys() == found["same_loads"].keys() == {"placed", "eplb", "in_order"}
    placed = json.loads((out / "placement.json").read_text())
    for layer in placed["layer_list"]:
        held = [device["device_expert"] for device in layer["device_list"]]
        assert all(len({*experts}) == 2 for experts in held)
        assert {expert for experts in held for expert in experts} == {0, 1, 2, 3}
    assert "made for the first" in result.stdout


def test_convert_to_an_engine_that_counts_dense_layers(run, files, out):
    result = run("plan", "convert", files["before"], "--to", "sglang", "--model", files["model"], "--out", out)
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "placement.json").read_text())["physical_to_logical_map"]
    assert (len(rows), rows[1], rows[2]) == (3, *BEFORE.tolist())
    assert told(out)["plan"]["redundant_slots"] == 2
    assert "does not state the 3 ranks" in result.stderr


def test_show_tells_the_balance_of_loads(run, files, out):
    trace = synthetic_trace(40, (1, 2), 4, 2, 1.5, 0.0, 0.0, 3)
    given = ("--model", files["model"], "--loads", files["trace"])
    result = run("plan", "show", files["before"], *given, "--out", out)
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {"slots.png", "summary.json"}
    loads = np.array([np.bincount(trace.experts[:, row].ravel(), minlength=4) for row in range(2)], float)
    copies = np.array([np.bincount(row, minlength=4) for row in BEFORE])
    ranks = np.array([(loads[row] / copies[row])[BEFORE[row]].reshape(3, 2).sum(axis=1) for row in range(2)])
    expected = (ranks.max(axis=1) / ranks.mean(axis=1)).mean()
    assert told(out)["plan"]["balance"]["max_over_mean"] == pytest.approx(expected)
    assert "excess over mean" in result.stdout


def test_diff_tells_bytes_and_the_busiest_link(run, files, out):
    given = (files["before"], files["after"], "--model", files["model"], "--machine", files["machine"])
    result = run("plan", "diff", *given, "--weight-bytes", 2, "--out", out)
    assert result.exit_code == 0, result.output
    found = told(out)
    # Expert 0 of layer 1 goes from rank 0 to rank 2, over both links of the line, at 1000 B/s.
    size = 3 * 64 * 32 * 2
    assert (found["copies"], found["copies_by_layer"]) == (1, {"1": 1, "2": 0})
    assert (found["bytes"], found["busiest_link_bytes"], found["busiest_link"]) == (size, size, [0, 1])
    assert found["at_least_s"] == pytest.approx(size / 1000, rel=1e-5)
    assert "with the network to itself [s]" in result.stdout


def test_check(run, files, out):
    given = ("--model", files["model"], "--machine", files["machine"])
    result = run("plan", "check", files["before"], *given, "--out", out)
    assert result.exit_code == 0, result.output
    assert all(check["holds"] for check in told(out)["checks"].values())
    small = yaml.safe_dump(MACHINE | {"die": MACHINE["die"] | {"memory_capacity_GB": 2e-5}})
    files["machine"].write_text(small)
    result = run("plan", "check", files["before"], *given, "--out", out)
    assert result.exit_code == 2
    assert "memory (4.915e-05 GB of weights a rank, 2e-05 GB of room)" in result.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("convert", "before", "--to", "onnx"), "--to is 'onnx', expected one of eplb, sglang"),
        (("convert", "nowhere.json", "--to", "eplb"), "nowhere.json: no such file"),
        (("diff", "before", "after"), "--model is not given"),
        (("place", "nowhere.npz", "--slots", 8, "--ranks", 2, "--to", "eplb"), "nowhere.npz"),
        (("place", "trace", "--slots", 7, "--ranks", 2, "--to", "eplb"), "7 slots do not divide by 2"),
        (("place", "trace", "--slots", 2, "--ranks", 2, "--to", "eplb"), "2 slots cannot hold 4 experts"),
    ],
)
def test_bad_input(run, files, out, given, expected):
    result = run("plan", *(files.get(part, part) for part in given), "--out", out)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ([0, 0], "counts no token in any layer; record again while the engine serves requests"),
        ([0, 5], "counts no token in the layers [1]; leave them out where they have no experts, else record again"),
    ],
)
def test_layers_without_any_choice_are_not_placed(run, files, out, tmp_path, used, said):
    path = tmp_path / "counts.npz"
    np.savez(path, counts=np.outer(used, [1, 1, 1, 1]), num_experts=4, layer_ids=[1, 2])
    given = ("--model", files["model"], "--out", out)
    placed = run("plan", "place", path, "--slots", 6, "--ranks", 3, "--to", "eplb", *given)
    advised = run("plan", "advise", path, "--machine", files["machine"], *given)
    shown = run("plan", "show", files["before"], "--loads", path, *given)
    for result in (placed, advised, shown):
        assert result.exit_code == 2, result.output
        assert f"{path} {said}" in result.stderr
    assert not out.exists()


def test_steps_without_tokens_are_left_out(tmp_path):
    counts = np.arange(24).reshape(3, 2, 4)
    counts[1] = 0  # of a buffer that was not full
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": counts.tolist()}))
    windows, layers = windows_of(path, None)
    assert (windows.tolist(), layers) == (counts[[0, 2]].tolist(), (0, 1))


def test_place_takes_counts_that_sglang_takes(run, out, tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": [[0, 0, 0, 0], [9, 1, 1, 1], [1, 1, 9, 1]]}))  # layer 0 is dense
    result = run("plan", "place", path, "--slots", 6, "--ranks", 3, "--to", "vllm_ascend", "--out", out)
    assert result.exit_code == 0, result.output
    assert told(out)["plan"]["layer_ids"] == [1, 2]
    placed = json.loads((out / "placement.json").read_text())["layer_list"]
    held = [[expert for device in layer["device_list"] for expert in device["device_expert"]] for layer in placed]
    assert (held[0].count(0), held[1].count(2)) == (3, 3)  # the hot expert gets the copies


@pytest.mark.slow
def test_place_for_the_time_of_a_layer(run, files, out, tmp_path):
    path = tmp_path / "trace.npz"
    write_trace(path, synthetic_trace(400, (1, 2), 4, 2, 1.5, 0.0, 0.0, 3))
    given = ("--slots", 6, "--ranks", 3, "--to", "vllm_ascend", "--model", files["model"])
    timed = ("--machine", files["machine"], "--tokens", 64, "--before", files["before"], "--steps", 5)
    result = run("plan", "place", path, *given, *timed, "--out", out)
    assert result.exit_code == 0, result.output
    found = told(out)["layer_s"]
    assert found["same_loads"]["tuned"] <= min(found["same_loads"].values()) * (1 + 1e-6)
    assert {"tuned", "eplb", "before"} <= found["later_loads"].keys()
    assert "mean time of a layer" in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ranks", 2, "--slots", 4), "--machine has 3 nodes"),
        (("--ranks", 3, "--slots", 6, "--choice", "closest"), "expected one of even"),
        (("--ranks", 3, "--slots", 3), "each of the 4 experts"),
    ],
)
def test_place_for_time_refuses(run, files, out, options, said):
    given = ("--to", "plan", "--model", files["model"], "--machine", files["machine"], "--tokens", 8)
    result = run("plan", "place", files["trace"], *options, *given, "--out", out)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not list(out.glob("*")) if out.exists() else True


@pytest.mark.parametrize(
    ("room", "slots", "remedy"), [(2.5, 9, "give at most 6"), (1.5, 6, "use more or larger ranks")]
)
def test_slots_that_memory_does_not_hold_are_refused(run, files, out, room, slots, remedy):
    """A slot is an expert of 3 x 64 x 32 weights of 2 bytes in each of two layers; `room` is for so many of a rank."""
    slot = 2 * 3 * 64 * 32 * 2e-9
    small = MACHINE | {"die": MACHINE["die"] | {"memory_capacity_GB": room * slot}}
    files["machine"].write_text(yaml.safe_dump(small))
    given = ("--model", files["model"], "--machine", files["machine"], "--to", "plan", "--out", out)
    result = run("plan", "place", files["trace"], "--ranks", 3, "--slots", slots, *given)
    assert result.exit_code == 2, result.output
    needed = f"need {slots / 3 * slot:.4g} GB, and --machine has {room * slot:.4g} GB; {remedy}"
    assert f"--slots is {slots}; those of a rank in 2 layers {needed}" in " ".join(result.stderr.split())
    assert not out.exists()


def test_advice_where_nothing_fits_says_what_is_needed(run, files, out):
    small = MACHINE | {"die": MACHINE["die"] | {"memory_capacity_GB": 1e-5}}
    files["machine"].write_text(yaml.safe_dump(small))
    whole = yaml.safe_dump(MODEL | {"attention": {"kind": "grouped_query", "heads": 4, "kv_heads": 2, "head_size": 16}})
    files["model"].write_text(whole)
    given = ("--model", files["model"], "--machine", files["machine"], "--to", "plan", "--tokens", 64)
    result = run("plan", "advise", files["trace"], *given, "--out", out)
    assert result.exit_code == 2, result.output
    assert "GB of a rank for its weights, and --machine has 1e-05 GB" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_advise_ends_in_one_sentence_and_a_file(run, files, out, tmp_path):
    path = tmp_path / "trace.npz"
    write_trace(path, synthetic_trace(400, (1, 2), 4, 2, 1.5, 0.0, 0.0, 3))
    given = ("--model", files["model"], "--machine", files["machine"], "--tokens", 64, "--to", "vllm_ascend")
    result = run("plan", "advise", path, *given, "--out", out)
    assert result.exit_code == 0, result.output
    report = told(out)
    assert report["action"] in report["actions"]
    assert report["advice"] in " ".join(result.stdout.split())
    headings = "".join(line for line in result.stdout.splitlines() if line.startswith("┃"))
    assert re.search(r"\b[mµn]?s\b", headings)
    assert "counted: the 2 MoE layers of the trace" in " ".join(result.stdout.split())
    for action in report["actions"].values():
        assert action["tokens_per_s"] == pytest.approx(action["tokens"] / action["step_s"])
        assert action["tokens_per_s_device"] == pytest.approx(action["tokens_per_s"] / 3)
    assert {"max_over_mean", "mean_over_max", "excess_over_mean"} <= report["actions"][report["action"]][
        "balance"
    ].keys()
    assert (out / "placement.json").exists()
    low, high = report["sampled_gain"]["interval"]
    assert low <= report["sampled_gain"]["mean"] <= high
    assert (report["tokens"], report["confidence"] == "high") == (400, report["tokens_to_settle"] is None)
    assert "95% interval" in report["advice"]


@pytest.mark.parametrize("verb", ["place", "advise"])
def test_a_trace_with_other_choices_than_the_model_s_is_refused(run, files, out, tmp_path, verb):
    write_trace(tmp_path / "trace.npz", synthetic_trace(40, (1, 2), 4, 3, 1.5, 0.0, 0.0, 3))
    given = {"place": ("--slots", 6, "--ranks", 3), "advise": ("--machine", files["machine"])}[verb]
    result = run("plan", verb, tmp_path / "trace.npz", *given, "--model", files["model"], "--to", "plan", "--out", out)
    assert result.exit_code == 2
    assert "tokens chose 3 experts, but --model has top_k 2" in " ".join(result.stderr.split())
    assert not out.exists()


def test_the_flags_of_an_engine_are_told(run, files, out):
    given = ("--slots", 6, "--ranks", 3, "--to", "sglang", "--model", files["model"], "--out", out)
    result = run("plan", "place", files["trace"], *given)
    assert result.exit_code == 0, result.output
    flags = f"--ep-size 3 --ep-num-redundant-experts 2 --init-expert-location {out / 'placement.json'}"
    assert flags in " ".join(result.stderr.split())


@pytest.mark.parametrize(("to", "numbers"), [("tensorrt_llm", True), ("plan", True), ("eplb", False)])
def test_layers_that_nothing_numbers_are_told(run, out, tmp_path, to, numbers):
    """Bare counts have rows: which layers of the model these are, a model says."""
    (tmp_path / "loads.csv").write_text("90,1,1,1\n1,1,1,90\n")
    result = run("plan", "place", tmp_path / "loads.csv", "--slots", 6, "--ranks", 3, "--to", to, "--out", out)
    assert result.exit_code == 0, result.output
    said = "layers are taken for 0 to 1 of the model; if it has dense ones, give --model"
    assert (said in " ".join(result.stderr.split())) == numbers


def test_loads_of_other_layers_than_the_model_s_are_refused(run, files, out, tmp_path):
    np.savez(tmp_path / "loads.npz", counts=np.array([[9, 1, 1, 1]]))  # the model has experts in layers 1 and 2
    given = ("--slots", 6, "--ranks", 3, "--to", "sglang", "--model", files["model"], "--out", out)
    result = run("plan", "place", tmp_path / "loads.npz", *given)
    assert result.exit_code == 2
    assert "has rows of 1 layers, but the model has experts in 2" in " ".join(result.stderr.split())
    np.savez(tmp_path / "loads.npz", counts=np.array([[9, 1, 1, 1]]), layer_ids=np.array([0]))
    result = run("plan", "place", tmp_path / "loads.npz", *given)
    assert result.exit_code == 2
    assert "is of the layers [0], --model has experts in [1, 2]" in " ".join(result.stderr.split())
    assert not out.exists()


def test_bare_counts_are_placed_in_the_layers_that_have_experts(run, files, out, tmp_path):
    (tmp_path / "loads.csv").write_text("90,1,1,1\n1,1,1,90\n")
    given = ("--slots", 6, "--ranks", 3, "--to", "sglang", "--model", files["model"], "--out", out)
    assert run("plan", "place", tmp_path / "loads.csv", *given).exit_code == 0
    rows = json.loads((out / "placement.json").read_text())["physical_to_logical_map"]
    assert [row.count(0) for row in rows[1:]] == [3, 1]  # layer 0 is dense; copies of what is hot
    assert [row.count(3) for row in rows[1:]] == [1, 3]


def test_more_slots_than_different_copies_are_refused(run, files, out):
    given = ("--ranks", 3, "--to", "eplb", "--model", files["model"], "--out", out)
    result = run("plan", "place", files["trace"], "--slots", 15, *given)
    assert result.exit_code == 2
    assert "--slots is 15; expected at most 12, with which each of 3 ranks" in " ".join(result.stderr.split())
    assert run("plan", "place", files["trace"], "--slots", 15, "--repeats", *given).exit_code == 0


def test_an_empty_placement_is_told(run, tmp_path):
    (tmp_path / "empty.json").touch()
    result = run("plan", "show", tmp_path / "empty.json")
    assert result.exit_code == 2
    assert "empty.json: the file is empty; get it again" in " ".join(result.stderr.split())
