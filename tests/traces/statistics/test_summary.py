"""The figures of a summary: against loops, and on the real traces against the table of their data card."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import traces as oracle

from jaxmoe.traces import GatingTrace, load_counts, read_trace
from jaxmoe.traces.statistics import by_layer, count_pairs, count_shuffled, summarise, summarise_loads

seeds = st.integers(0, 2**32 - 1)
NAMES = {
    "load_max_over_mean",
    "load_cv",
    "token_pair_coverage_top20",
    "layer_pair_coverage_top20",
    "coactivation_coverage_top10",
    "token_reuse",
}
NAMES_ON_RECORD = {"load_max_over_mean": "max_over_mean", "load_cv": "cv", "token_reuse": "reuse_next_token"}


def summary_of(trace: GatingTrace, seed=0):
    return summarise(trace.layer_ids, trace.top_k, count_pairs(trace), count_shuffled(trace, seed), seed)


@given(seeds)
def test_figures_are_those_of_loops(seed):
    trace = oracle.random_trace(seed)
    found, counts = summary_of(trace).figures, oracle.pair_counts(trace)
    above = np.triu_indices(oracle.EXPERTS, 1)
    for layer, load in enumerate(counts["load"].tolist()):
        together = counts["together"][layer][above].tolist()
        share = [value / sum(load) for value in load]
        products = [share[i] * share[j] for i, j in zip(*above, strict=True)]
        top = sum(sorted(products, reverse=True)[: round(0.1 * len(products))])
        slots, pairs = counts["slots"][layer], counts["layer_pairs"][layer].ravel() if layer < 2 else [0]
        expected = {
            "load_max_over_mean": max(load) / (sum(load) / len(load)),
            "load_cv": oracle.cv(load),
            "token_pair_coverage_top20": oracle.coverage(counts["token_pairs"][layer].ravel().tolist(), 0.2),
            "layer_pair_coverage_top20": oracle.coverage(list(pairs), 0.2),
            "coactivation_coverage_top10": oracle.coverage(together, 0.1),
            "coactivation_coverage_top10_baseline": top,
            "coactivation_coverage_top10_independent": top / sum(products),
            "token_reuse": counts["shared"][layer] / slots if slots else np.nan,
        }
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][layer], value, rtol=1e-9, err_msg=name)


def test_every_figure_has_a_baseline_in_plain_json():
    trace = oracle.random_trace(1, missing=0)
    report = summary_of(trace).report()
    expected = NAMES | {f"{name}_baseline" for name in NAMES} | {"coactivation_coverage_top10_independent"}
    assert set(report["mean"]) == expected
    assert [set(layer) for layer in report["layers"]] == [{"layer_id"} | expected] * 3
    assert [layer["layer_id"] for layer in report["layers"]] == [4, 7, 2]
    assert report["layers"][2]["layer_pair_coverage_top20"] is None
    assert report["mean"]["layer_pair_coverage_top20"] is not None
    json.dumps(report, allow_nan=False)


def test_what_one_token_of_one_choice_lacks_is_none():
    trace = GatingTrace(np.zeros((1, 1, 1), int), 4, np.arange(1), np.array([0]), None, {})
    mean = summary_of(trace).report()["mean"]
    assert mean["load_max_over_mean"] == 4
    for name in NAMES - {"load_max_over_mean", "load_cv"}:
        assert mean[name] is None


def test_loads_alone_have_figures_of_loads():
    trace = oracle.random_trace(2)
    whole, loads = summary_of(trace).figures, summarise_loads(load_counts(trace), 0).figures
    assert set(loads) == {f"load_{name}{of}" for name in ("max_over_mean", "cv") for of in ("", "_baseline")}
    for name, values in loads.items():
        np.testing.assert_array_equal(values, whole[name])


def test_what_does_not_exist_is_none():
    report = by_layer(
        np.array([3, 5]), {"known": np.array([1.0, np.nan]), "steps": np.array([2.0]), "none": np.array([])}
    )
    assert report == {
        "mean": {"known": 1.0, "steps": 2.0, "none": None},
        "layers": [
            {"layer_id": 3, "known": 1.0, "steps": 2.0, "none": None},
            {"layer_id": 5, "known": None, "steps": None, "none": None},
        ],
    }


def data_card(folder) -> dict[str, list[list[float]]]:
    """The numbers in the cells of the table of real statistics, by file."""
    text = (folder / "README.md").read_text().split("## Real statistics", 1)[1].split("\n\nHow the numbers", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if ".npz" in line]
    return {name: [[float(n) for n in re.findall(r"\d+(?:\.\d+)?", cell)] for cell in cells] for name, *cells in rows}


@pytest.mark.slow
def test_the_real_traces_give_the_table_of_their_data_card(shared):
    """Figures to the digits printed. Baselines of shuffled tokens are of another shuffle, so nearly the same."""
    card = data_card(shared / "traces")
    assert len(card) == 13
    for name, (loads, load_cv, tokens, layers, together, lowest, highest, reuse) in card.items():
        summary = summary_of(read_trace(shared / "traces" / name))
        mean, figures = summary.mean(), summary.figures
        shown, chance = figures["token_reuse"], figures["token_reuse_baseline"]
        exact = {
            mean["load_max_over_mean"]: loads[0],
            figures["load_max_over_mean"].max(): loads[1],
            mean["load_cv"]: load_cv[0],
            mean["token_pair_coverage_top20"]: tokens[0],
            mean["layer_pair_coverage_top20"]: layers[0],
            mean["coactivation_coverage_top10"]: together[0],
            mean["coactivation_coverage_top10_baseline"]: together[1],
            shown[0]: lowest[0],
            shown[-1]: highest[0],
            shown.mean(): reuse[0],
        }
        assert [round(value, 2) for value in exact] == list(exact.values()), name
        if len(reuse) == 4:
            assert (round(shown.max(), 2), int(shown.argmax())) == (reuse[2], reuse[3]), name
        shuffled = [mean["token_pair_coverage_top20_baseline"], mean["layer_pair_coverage_top20_baseline"]]
        shuffled += [chance[0], chance[-1], chance.mean()]
        printed = [tokens[1], layers[1], lowest[1], highest[1], reuse[1]]
        np.testing.assert_allclose(shuffled, printed, atol=0.015, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral-8x7b/math.npz",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deepseek-v2-lite/intent.npz", "gpt-oss-20b/tulu3_polyglot.npz")
        ),
    ],
)
def test_the_real_traces_give_the_reuse_of_every_layer(shared, name):
    recorded = json.loads((shared / "traces" / "stats_per_layer.json").read_text())[name]
    figures = summary_of(read_trace(shared / "traces" / name)).figures
    for theirs, ours in NAMES_ON_RECORD.items():
        np.testing.assert_allclose(figures[theirs], recorded[ours], atol=6e-5)
