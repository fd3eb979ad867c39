"""What the study of camoe claims, against its tables."""

import csv
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[2] / "studies" / "camoe"


def rows(name: str, **values: str) -> list[dict[str, str]]:
    with (STUDY / f"{name}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in values.items())]


def column(some, name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in some])


def test_the_profiler_is_within_its_tolerances():
    for row in rows("profile"):
        most = 5 if row["case"].startswith("noise") else 1
        assert float(row["beta_max_percent"]) < most
        # Phase two draws anew, and is no claim of the baseline.
        assert float(row["alpha_max_percent"]) < (most if row["phase"] == "one" else 1.2 * most)
        if row["phase"] == "two":
            assert int(row["samples"]) * 3 == int(row["samples_for_every_edge"])


def test_latency_falls_with_lambda_as_in_the_paper():
    some = rows("table1", own_node="counted")
    assert [row["lambda"] for row in some] == ["0", "0.05", "0.1", "0.15", "0.2", "0.25"]
    assert (np.diff(column(some, "mean_ms")) < 0).all()
    assert (np.diff(column(some, "p95_ms")) < 0).all()
    away = column(some, "mean_ms_change_percent") - column(some, "paper_mean_ms_change_percent")
    assert np.abs(away).max() < 3
    last = some[-1]
    assert abs(float(last["p95_ms_change_percent"]) - float(last["paper_p95_ms_change_percent"])) < 5
    for name, within in (("mean_ms", 0.005), ("cv", 0.01), ("avg_layer_cv", 0.01)):  # calibrated
        assert float(some[0][name]) == pytest.approx(float(some[0][f"paper_{name}"]), rel=within)
    assert np.ptp(column(some, "avg_layer_cv")) < 0.01


def test_limits_of_experts_bound_the_imbalance_within_layers_and_none_is_the_gate_of_table_1():
    limited = [row for row in rows("capacity") if row["capacity_factor"] != "none"]
    for row in limited:  # loads of at most c times the mean have a cv of at most the root of c - 1
        assert float(row["avg_layer_cv"]) < np.sqrt(float(row["capacity_factor"]) - 1)
    (free,) = rows("capacity", capacity_factor="none", **{"lambda": "0.25"})
    (same,) = rows("token_homes", part_of_tokens_at_node_0="0.25", experts_moved_by_nodes="0", **{"lambda": "0.25"})
    for name in ("mean_ms_change_percent", "cv_change_percent", "avg_layer_cv", "kl", "changed"):
        assert float(free[name]) == pytest.approx(float(same[name]), rel=1e-4)


@pytest.mark.parametrize("tokens", ["unseen", "other_topics"])
def test_a_table_by_gradient_saves_at_least_1_3_times_as_much_as_lambda(tokens):
    rule, table = (rows("gradient", form=form, tokens=tokens) for form in ("rule", "table"))
    assert [row["lambda"] for row in rule] == [row["lambda"] for row in table] == ["0.05", "0.1", "0.15", "0.2", "0.25"]
    ratio = column(table, "saved_percent") / column(rule, "saved_percent")
    assert ratio.min() > (1.3 if tokens == "unseen" else 1)
    if tokens == "unseen":
        assert (column(table, "retained") >= column(rule, "retained")).all()
        assert (column(table, "avg_layer_kl") <= column(rule, "avg_layer_kl")).all()


def test_both_at_once_beat_the_better_of_both_alone_for_every_seed():
    cases = {(row["network"], row["seed"]) for row in rows("joint")}
    assert {network for network, _ in cases} == {"camoe_4nodes", "spine_leaf", "wafer"}
    over_the_best = []
    for network, seed in cases:
        some = {row["corner"]: row for row in rows("joint", network=network, seed=seed)}
        found = {corner: float(row["mean_ms"]) for corner, row in some.items()}
        over_the_best.append(found["at_once"] / min(found["rule"], found["bias"], found["placement"]))
        lost = {corner: 1 - float(row["retained"]) for corner, row in some.items()}
        # Limits are kept on other tokens, nearly: two cases of nine are 1.7 and 2.7 % above what lambda loses.
        assert max(lost.values()) <= 1.03 * lost["rule"]
    assert max(over_the_best) < 0.97  # on spine-leaf, where placement finds nothing with one seed
    assert sorted(over_the_best)[-2] < 0.95


def test_the_own_node_has_a_part_and_the_variant_without_it_explains_how_far_routing_changes():
    def at(network: str, own: str, scale: str) -> dict[str, float]:
        (row,) = rows("own_node", network=network, own_node=own, logit_scale=scale, **{"lambda": "0.25"})
        return {name: float(value) for name, value in row.items() if name not in ("network", "own_node")}

    for network in ("camoe_4nodes", "even"):
        counted, without, alone = (at(network, own, "1.31") for own in ("counted", "left_out", "alone"))
        saved = [-each["mean_ms_change_percent"] for each in (counted, without, alone)]
        assert saved[0] > saved[1] > saved[2] > 0
        assert saved[1] > 2 / 3 * saved[0]
    # Without the own node, with logits on a scale that makes as much of the latency go, cv and KL are near the paper's.
    calibrated = at("camoe_4nodes", "left_out", "0.9")
    assert abs(calibrated["mean_ms_change_percent"] + 15.8) < 1
    assert calibrated["cv_change_percent"] > 8
    assert 0.0149 / 2 < calibrated["kl"] < 0.0149


def test_table_2_is_that_of_one_rank_but_for_what_layers_differ():
    paper = column(rows("ranks", counted_on="all"), "paper_cv_change_percent")
    for node, near in (("1", True), ("2", True), ("3", True), ("all", False)):
        some = [row for row in rows("ranks", counted_on=node) if row["tokens"] in ("3046", "12184")]
        away = np.abs(column(some, "cv_change_percent") - paper)
        kl, told = column(some, "kl")[1:], column(some, "paper_kl")[1:]
        assert (away.max() < 1.2) == near
        assert (np.abs(kl / told - 1).max() < 0.2) == near
        assert (column(some, "avg_layer_kl")[1:] < 0.3 * column(some, "paper_avg_layer_kl")[1:]).all()  # missed


def test_all_nodes_together_are_those_of_table_1():
    for one, other in zip(rows("ranks", counted_on="all"), rows("table1", own_node="counted"), strict=True):
        assert float(one["cv"]) == pytest.approx(float(other["cv"]), rel=1e-4)
        assert float(one["kl"]) == pytest.approx(float(other["kl"]), rel=1e-2, abs=1e-6)


def test_recorded_choices_are_the_same_whatever_is_assumed_of_the_others():
    for trace in {row["trace"] for row in rows("recorded")}:
        for strength in ("0.1", "0.25"):
            some = {row["logits"]: row for row in rows("recorded", trace=trace, **{"lambda": strength})}
            assert len({row["unbiased_ms"] for row in some.values()}) == 1
            saved = {name: float(row["saved_percent"]) for name, row in some.items()}
            assert min(saved.values()) >= 0
            assert max(saved, key=saved.__getitem__).startswith("bound")


def test_eq_9_is_right_where_pairs_have_links_of_their_own_and_the_congestion_model_elsewhere():
    assert len(rows("traffic")) == 500

    def error(model: str, **values: str) -> float:
        some = rows("traffic", **values)
        return float(np.abs(column(some, f"{model}_s") / column(some, "simulated_s") - 1).mean())

    assert error("eq9", network="camoe_4nodes") < 0.001
    for network in ("switch_8", "spine_leaf", "wafer_4x8"):
        assert error("congestion", network=network, **{"class": "moe"}) < 0.03
        assert error("eq9", network=network, **{"class": "moe"}) > 0.8


def test_one_slow_endpoint_sets_the_time():
    as_they_are, faster = (rows("slow_endpoint", others=others) for others in "12")
    times = column(as_they_are, "simulated_ms")
    np.testing.assert_allclose(times / times[0], [1, 2, 4, 8], rtol=0.01)
    np.testing.assert_allclose(column(faster, "simulated_ms"), times, rtol=0.002)


def test_the_controller_finds_the_link_and_costs_little():
    some = rows("controller")
    believed = column(some, "believed_slowness")
    assert (np.abs(believed[:200] - 1) < 0.2).all()
    assert (np.abs(believed[220:] - 2) < 0.2).all()
    late = slice(220, None)
    assert column(some, "controlled_ms")[late].mean() < 1.05 * column(some, "for_the_network_ms")[late].mean()
    assert float(some[-1]["probed_bytes"]) < 0.01 * column(some, "moved_bytes").sum()


def test_the_gate_is_fast_enough():
    found = {row["what"]: float(row["least_ms"]) for row in rows("speed")}
    assert found["gather and add"] < 20
    assert found["with Top-K"] < 400


def test_paths_between_unlike_gpus_are_found_and_the_gate_saves_on_them():
    assert column(rows("unlike_paths"), "alpha_ns") == pytest.approx([429, 2 * 429, 2 * 900, 8325], rel=0.01)
    some = rows("unlike")
    assert (np.diff(column(some, "simulated_ms")) < 0).all()
    assert column(some, "congestion_ms") == pytest.approx(column(some, "simulated_ms"), rel=0.02)
    # Two pairs share the host's links, which Eq. 9 prices as if each had them alone.
    assert (column(some, "eq9_ms") < 0.7 * column(some, "simulated_ms")).all()
