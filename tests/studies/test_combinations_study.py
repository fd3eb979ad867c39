"""The summary of the study of combinations, on rows made up by hand."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "combinations"


@pytest.fixture(scope="module")
def summary():
    sys.path.insert(0, str(FOLDER))
    try:
        import summary

        yield summary.summary
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("summary", None)


def row(papers, way, total, simulated, **more):
    known = {"machine": "m", "seed": 0, "papers": papers, "way": way, "total_us": total, "attention_us": 0.0}
    return known | {"model_of_replayed_us": total, "simulated_us": simulated} | more


ROWS = [
    row("hd_moe", "static ep token_home", 100.0, 90.0, dispatch_us=30.0, combine_us=30.0, compute_us=40.0),
    row("camoe", "static ep token_home_tree gate", 80.0, 100.0, dispatch_us=20.0, combine_us=20.0, compute_us=40.0),
    row("camoe+moentwine", "moentwine er gate", 60.0, 75.0, dispatch_us=9.0, compute_us=31.0, all_reduce_us=20.0),
    row("camoe+hd_moe", "static hybrid token_home_tree gate", 90.0, 72.0),
    {"machine": "m", "seed": 0, "papers": "wafer_gpu", "way": "wafer_gpu", "reason": "no LLC"},
    {"machine": "m", "seed": 0, "papers": "moentwine", "way": "m", "total_us": 200.0, "attention_us": 320.0},
    {"machine": "m", "seed": 0, "papers": "expert_streaming", "way": "e", "total_us": 900.0, "attention_us": 999.0},
]


def test_the_best_pair_is_held_against_the_best_paper(summary):
    (line,) = summary(ROWS)
    assert (line["hd_moe_us"], line["camoe_us"], line["moentwine_us"], line["wafer_gpu_us"]) == (100.0, 80.0, 200.0, "")
    assert (line["best"], line["papers"]) == ("static ep token_home_tree gate", "camoe+moentwine")
    assert line["faster_percent"] == pytest.approx(25)
    assert line["layer_faster_without_trees_percent"] == pytest.approx(100 * 40 / 420)
    assert line["faster_without_trees_percent"] == pytest.approx(40)  # 60 of 100 us
    assert line["best_without_trees"] == "static ep token_home"
    assert line["combination_without_trees_us"] == 60.0
    # In the simulator others are the best: 72 of 90 us.
    assert line["simulated_faster_percent"] == pytest.approx(20)
    assert line["simulated_without_trees_percent"] == pytest.approx(100 / 6)  # 75 of 90 us
    assert line["largest_error_percent"] == pytest.approx(20)
    assert (line["network_saved_us"], line["experts_saved_us"], line["all_reduce_saved_us"]) == (31.0, 9.0, -20.0)


def test_every_machine_and_seed_has_a_line(summary):
    others = [each | {"seed": 1} for each in ROWS]
    assert [(line["machine"], line["seed"]) for line in summary(ROWS + others)] == [("m", 0), ("m", 1)]
