"""`jaxmoe trace stats` and `compare`: their files, what they tell of small traces, and of bad input."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from oracles import traces as oracle
from refusal import refused

from jaxmoe.cli.trace import stats
from jaxmoe.placement import Placement, write_plan
from jaxmoe.traces import write_trace
from jaxmoe.traces.statistics import count_pairs, count_shuffled, summarise

PICTURES = {
    "load",
    "reuse",
    "token_heatmaps",
    "layer_heatmaps",
    "coactivation",
    "coverage",
    "phases",
    "nodes",
    "long_tail",
    "topics",
}


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def some_trace(seed=1, **changes):
    """No choice is missing, and sequences are of two topics."""
    sequences = {"seq_start": np.array([0, 10, 20]), "seq_name": ("law", "art", "law")}
    return dataclasses.replace(oracle.random_trace(seed, missing=0), **(sequences | changes))


@pytest.fixture
def undrawn(monkeypatch):
    """No pictures, which take most of the time."""
    monkeypatch.setattr(stats, "draw_statistics", lambda *_: None)


@pytest.fixture
def file(tmp_path):
    """Writes a trace."""

    def write(name="t", **changes):
        write_trace(tmp_path / f"{name}.npz", some_trace(**changes))
        return tmp_path / f"{name}.npz"

    return write


@pytest.fixture
def loads(tmp_path):
    """Writes load counts."""

    def write(name, counts, **arrays):
        np.savez(tmp_path / f"{name}.npz", counts=np.array(counts), num_experts=np.shape(counts)[-1], **arrays)
        return tmp_path / f"{name}.npz"

    return write


def test_a_trace_gives_its_figures_and_pictures(run, file, out):
    result = run("trace", "stats", file(), "--out", out, "--seed", "3", "--window", "10")
    assert result.exit_code == 0, result.output
    summary, trace = summary_of(out), some_trace()
    expected = summarise(trace.layer_ids, trace.top_k, count_pairs(trace), count_shuffled(trace, 3), 3).report()
    assert {key: summary[key] for key in ("mean", "layers")} == expected
    assert summary["source"]["tokens"] == oracle.TOKENS
    assert summary["seed"] == 3
    assert (summary["nodes"]["nodes"], summary["nodes"]["windows"]) == (3, 3)
    assert summary["long_tail"]["batch_tokens"] == [16, 32]
    assert set(summary["phases"]["layers"][0]) == {
        "layer_id",
        *(f"spearman_{of}{end}" for of in ("load", "token_heatmap", "layer_heatmap") for end in ("", "_baseline")),
    }
    assert summary["topics"]["names"] == ["law", "art"]
    names = {path.stem for path in out.glob("*.png")}
    assert names == PICTURES
    assert {path.name for path in out.iterdir()} - {f"{name}.png" for name in names} == {"summary.json", "layers.csv"}
    assert "token_reuse" in result.stdout


def test_the_table_of_layers_holds_what_the_summary_holds(run, file, out, undrawn):
    run("trace", "stats", file(), "--out", out)
    with (out / "layers.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    for row, layer in zip(rows, summary_of(out)["layers"], strict=True):
        assert row.pop("file") == "t"
        assert row == {name: "" if value is None else str(value) for name, value in layer.items()}


def test_the_same_seed_gives_the_same_summary(run, file, tmp_path, undrawn):
    found = []
    for name, seed in (("one", 5), ("again", 5), ("other", 6)):
        run("trace", "stats", file(), "--seed", seed, "--out", tmp_path / name)
        summary = summary_of(tmp_path / name)
        found.append({key: summary[key] for key in ("mean", "layers", "nodes", "long_tail", "phases")})
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_trace_without_extras_has_none_of_their_figures(run, file, out, undrawn):
    result = run("trace", "stats", file(phase=None, seq_name=None), "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert summary["phases"] is summary["topics"] is None


def test_one_token_of_one_layer_will_do(run, file, out):
    alone = {"experts": np.zeros((1, 1, 1), np.int16), "layer_ids": np.array([3]), "seq_start": np.array([0])}
    result = run("trace", "stats", file(**alone, phase=None, seq_name=None), "--out", out)
    assert result.exit_code == 0, result.output
    assert summary_of(out)["mean"]["token_reuse"] is None


def test_a_trace_of_missing_choices_alone_will_do(run, file, out):
    result = run("trace", "stats", file(experts=np.full((37, 3, 3), -1, np.int16)), "--out", out)
    assert result.exit_code == 0, result.output
    assert set(summary_of(out)["mean"].values()) == {None}


def test_load_counts_give_the_figures_of_loads(run, loads, out, undrawn):
    path = loads("c", [[1, 2, 3, 6], [3, 3, 3, 3]], top_k=2, layer_ids=np.array([4, 9]))
    result = run("trace", "stats", path, "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert summary["source"]["kind"] == "load counts"
    assert [layer["load_max_over_mean"] for layer in summary["layers"]] == [2, 1]
    assert set(summary["mean"]) == {f"load_{name}{of}" for name in ("max_over_mean", "cv") for of in ("", "_baseline")}


def test_files_are_topics_of_one_model(run, file, loads, out):
    counts = np.zeros((3, oracle.EXPERTS), int)
    counts[:, 2] = 5
    path = loads("c", counts, top_k=3, layer_ids=np.array([4, 7, 2]))
    result = run("trace", "stats", file("a"), file("b", seed=2), path, "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert list(summary["files"]) == summary["topics"]["names"] == ["a", "b", "c"]
    assert summary["topics"]["top_experts"]["c"] == [[2]] * 3
    assert np.diagonal(summary["topics"]["overlap"]).tolist() == [1, 1, 1]
    assert {path.name for path in out.iterdir()} == {"summary.json", "layers.csv", "reuse.png", "topics.png"}


def test_a_plan_says_which_node_has_what(run, file, tmp_path, out, undrawn):
    share = np.zeros((1, oracle.EXPERTS, 2), np.float32)
    share[..., 0] = 1  # all on one of two nodes
    write_plan(tmp_path / "plan.npz", Placement(share, (1, 2), "sharded", (7,)))
    result = run("trace", "stats", file(), "--placement", tmp_path / "plan.npz", "--out", out)
    assert result.exit_code == 0, result.output
    nodes = summary_of(out)["nodes"]
    assert [layer["layer_id"] for layer in nodes["layers"]] == [7]
    assert nodes["mean"]["window_max_over_mean_mean"] == nodes["mean"]["batch_max_over_mean_p95"] == 2


def test_a_plan_of_another_model_is_refused(run, file, plan, out):
    refused(run("trace", "stats", file(), "--placement", plan, "--out", out), out, "--placement is of 4 experts")
    refused(
        run("trace", "stats", file(), "--placement", plan, "--nodes", 2, "--out", out),
        out,
        "--nodes exclude each other",
    )


def test_bad_files_are_named(run, file, tmp_path, out):
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04")
    refused(run("trace", "stats", tmp_path / "none.npz", "--out", out), out, "none.npz", "no such")
    refused(run("trace", "stats", tmp_path / "bad.npz", "--out", out), out, "bad.npz")
    refused(run("trace", "stats", file(), file(), "--out", out), out, "given twice")
    refused(run("trace", "stats", file(), "--nodes", "7", "--out", out), out, "--nodes is 7", "6 experts")
    assert run("trace", "stats", "--out", out).exit_code == 2
    assert run("trace", "stats", file(), "--window", "0", "--out", out).exit_code == 2


def test_files_of_two_models_are_refused(run, file, loads, out):
    other = loads("c", [[1, 2]], top_k=1)
    refused(run("trace", "stats", file(), other, "--out", out), out, "2 experts", "one model")
    refused(run("trace", "compare", file(), other, "--out", out), out, "t.npz has 6 experts", "c.npz has 2")
    apart = loads("d", np.ones((1, 6), int), top_k=1, layer_ids=np.array([9]))
    refused(run("trace", "stats", file(), apart, "--out", out), out, "no layer in common")
    refused(run("trace", "compare", file(), apart, "--out", out), out, "[4, 7, 2]", "[9]")


def test_a_trace_compared_with_itself(run, file, out):
    result = run("trace", "compare", file(), file(), "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    mean = summary["mean"]
    assert mean["kl_a_b"] == mean["kl_b_a"] == 0
    for name in ("load_spearman", "token_heatmap_spearman", "layer_heatmap_spearman", "hot_experts_common"):
        assert mean[name] == pytest.approx(1)
    for name in ("token_pair_coverage_top20", "layer_pair_coverage_top20", "coactivation_coverage_top10"):
        assert mean[f"{name}_of_a_in_b"] == pytest.approx(mean[f"{name}_of_b_in_b"])
    assert summary["verdict"]["serves"] is True
    assert "A plan tuned on A serves B" in result.stdout
    assert {path.name for path in out.iterdir()} == {"summary.json", "top_experts.png", "comparison.png"}


def test_loads_compared_by_hand(run, loads, out):
    """Balanced on A, experts 0 and 1 share a node, and B has nothing else to do."""
    a = loads("a", [[1, 1, 2, 2], [1, 1, 2, 2]], top_k=1, layer_ids=np.array([5, 6]))
    b = loads("b", [[4, 4, 0, 0]], top_k=1, layer_ids=np.array([6]))
    result = run("trace", "compare", a, b, "--nodes", "3", "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    (layer,) = summary["layers"]
    smooth_a, smooth_b = np.array([2, 2, 3, 3]) / 10, np.array([5, 5, 1, 1]) / 12
    assert layer["kl_a_b"] == pytest.approx((smooth_a * np.log(smooth_a / smooth_b)).sum())
    assert layer["kl_b_a"] == pytest.approx((smooth_b * np.log(smooth_b / smooth_a)).sum())
    assert layer["load_spearman"] == pytest.approx(-1)
    assert layer["hot_experts_common"] == 0
    assert (layer["node_max_over_mean_balanced_on_a"], layer["node_max_over_mean_balanced_on_b"]) == (3, 1.5)
    assert summary["verdict"]["serves"] is False
    assert summary["verdict"]["cost"] == 2
    assert "does not serve B" in result.stdout
    assert "100 % more" in result.stdout


def test_ctrl_c_leaves_nothing_behind(run, file, out, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stats, "find", interrupt)
    result = run("trace", "stats", file(), "--out", out)
    assert result.exit_code == 130
    assert result.stderr == "interrupted; nothing was written\n"
    assert not out.parent.exists()
