"""Fronts, winners, elasticities and explanations, against plain loops, finite differences and the rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_keys import CHUNK, DIE, LINK

from jaxmoe.registry import METRICS
from jaxmoe.sweep import SweepError
from jaxmoe.sweep.analysis import elasticities, is_efficient, limits, pareto, winners
from jaxmoe.sweep.explanation import explained, find_point

NAMES = list(METRICS)
LATENCY = "hardware.link.latency_ns"


def quiet(done, total):
    pass


@given(st.one_of(st.lists(st.tuples(*[st.integers(0, 6)] * count), min_size=1, max_size=30) for count in (2, 3)))
def test_the_front_is_what_nothing_beats(costs):
    table = np.array(costs, float)
    beaten = [any((a <= b).all() and (a < b).any() for a in table) for b in table]
    assert is_efficient(table).tolist() == [not each for each in beaten]


@pytest.mark.parametrize("metrics", [2, 3])
def test_many_points_may_all_be_on_the_front(metrics):
    first = np.arange(50_000.0)
    costs = np.stack([first, -first, np.random.default_rng(0).normal(size=first.size)][:metrics], axis=1)
    assert is_efficient(costs).all()


def test_points_without_finite_metrics_are_on_no_front_and_win_nothing(sweep):
    done = sweep(axes={LINK: [1, 2], "strategy": ["tp", "tp_both_ways"]})
    done.rows[0]["total_s"] = float("nan")
    done.rows[1]["total_s"] = float("inf")
    assert all(np.isfinite(row["total_s"]) for row in pareto(done.rows, ["total", "p95"]))
    assert done.best("total") == min(done.rows[2:], key=lambda row: row["total_s"])
    assert all(np.isfinite(winner.row["total_s"]) for winner in winners(done.points, done.rows))


def test_the_front_of_a_sweep(sweep):
    done = sweep(axes={LINK: [1, 2, 4], DIE: [1, 2], "strategy": ["tp", "hybrid_ring"]})
    front = pareto(done.rows, ["total", "utilisation"])
    assert front[0] == done.best("total")
    assert front[-1]["utilisation"] == done.best("utilisation")["utilisation"]
    totals = [row["total_s"] for row in front]
    assert totals == sorted(totals)
    assert {row["strategy"] for row in front} == {"tp"}  # the other cannot be compared
    for names in (["total"], ["total", "total"], ["total", "p90"]):
        with pytest.raises(SweepError, match="expected two or three of total"):
            pareto(done.rows, names)


def test_who_wins_where(sweep):
    done = sweep(axes={LINK: [0.5, 500], "strategy": ["tp", "ep_balanced"], "exchange": ["own", "least_loaded"]})
    won = winners(done.points, done.rows)
    assert len(won) == 2
    for winner in won:
        here = [row for row in done.rows if row[LINK] == winner.row[LINK]]
        assert winner.row["total_s"] == min(row["total_s"] for row in here)
        others = [row["total_s"] for row in here if row["strategy"] != winner.row["strategy"]]
        assert winner.behind == pytest.approx(min(others) / winner.row["total_s"] - 1)


def test_what_limits_points_is_counted_by_strategy():
    rows = [("tp", "node"), ("tp", "link"), ("ep", "link"), ("tp", "node"), ("ep", None)]
    told = limits([{"strategy": strategy, "busiest_kind": kind} for strategy, kind in rows])
    assert told == {"tp": {"node": 2, "link": 1}, "ep": {"link": 1}}


# What a machine states for metrics of its energy, area and price.
STATED = {
    "hardware.die.idle_W": 5,
    "hardware.link.energy_pJ_per_B": 400,
    "hardware.link.area_mm2_per_GB_per_s": 2,
    "hardware.die.price_per_TFLOPs_per_s": 30,
    "hardware.die.price": 10,
}


@pytest.mark.slow
def test_elasticities_are_finite_differences(space, sweep):
    numbers = {LINK: 7.0, DIE: 0.7, LATENCY: 40.0, CHUNK: 33}
    steps = {LINK: 0.07, DIE: 0.007, LATENCY: 0.4, CHUNK: 1}
    both = {"strategy": ["tp", "ep_balanced"]}
    made = space(axes={key: [value] for key, value in numbers.items()} | both, set=STATED)
    answers = elasticities(made, made.points(), quiet)
    # One number at a time is a step below, then a step above.
    ends = [(key, sign) for key in numbers for sign in (-1, 1)]
    beside = {key: [value + sign * steps[key] * (key == at) for at, sign in ends] for key, value in numbers.items()}
    beside[CHUNK] = [int(value) for value in beside[CHUNK]]
    rows = sweep(axes=beside | both, zip=[list(numbers)], set=STATED).rows
    for answer in answers:
        strategy = answer.points[0].values["strategy"]
        own = [row for row in rows if row["strategy"] == strategy]
        for key, low, high in zip(numbers, own[::2], own[1::2], strict=True):
            for at, metric in enumerate(METRICS.values()):
                change = np.log(high[metric.column] / low[metric.column]) / np.log(high[key] / low[key])
                slope = answer.values[0, at, answer.keys.index(key)]
                assert slope == pytest.approx(change, rel=0.01, abs=2e-4), (key, metric.column)


def test_elasticities_by_hand(space):
    """Compute time is in inverse proportion to the rate; the link changes nothing of it."""
    made = space(axes={DIE: [1, 2], LINK: [5], LATENCY: [0], "strategy": ["tp"]})
    (answer,) = elasticities(made, made.points(), quiet)
    compute = answer.values[:, NAMES.index("compute")]
    assert compute == pytest.approx(np.array([[-1, 0, 0], [-1, 0, 0]]), abs=1e-5)


def test_elasticities_pass_through_derived_keys(space):
    """Half of a total goes to links and a tenth of its square to dies: computing takes 1 / total**2."""
    made = space(axes={"total": [8.0], "strategy": ["tp"]}, derived={LINK: "total / 2", DIE: "total ** 2 / 10"})
    (answer,) = elasticities(made, made.points(), quiet)
    assert answer.keys == ("total",)
    assert answer.values[0, NAMES.index("compute"), 0] == pytest.approx(-2, rel=1e-4)
    assert answer.values[0, NAMES.index("dispatch"), 0] == pytest.approx(-1, rel=1e-4)


@pytest.mark.slow
def test_elasticities_leave_out_what_changes_structure(space):
    """`tokens` makes groups as well as a bandwidth, here through two keys in turn."""
    made = space(
        axes={"tokens": [4], "rate": [2.0], LINK: [3.0], "strategy": ["tp"]},
        derived={"twice": "tokens * 2", "workload.batch_tokens": "twice", DIE: "rate * tokens"},
    )
    (answer,) = elasticities(made, made.points(), quiet)
    assert answer.keys == ("rate", LINK)
    assert answer.values[0, NAMES.index("compute"), 0] == pytest.approx(-1, rel=1e-4)


def test_elasticities_of_a_number_that_decides_are_one_clear_error(space):
    made = space(axes={"f": [2.0], "strategy": ["tp"]}, derived={LINK: "10 + (f > 1) * f"})
    with pytest.raises(SweepError, match="decides by numbers and has no slope") as caught:
        elasticities(made, made.points(), quiet)
    assert "\n" not in str(caught.value)


def test_elasticities_need_a_number(space):
    made = space(axes={"strategy": ["tp"]})
    with pytest.raises(SweepError, match="no axis is a number"):
        elasticities(made, made.points(), quiet)


def test_an_explanation_says_what_the_row_says(space, sweep):
    sections = {"axes": {LINK: [2, 30], "strategy": ["ep_balanced", "hybrid_ring"]}, "set": {LATENCY: 50}}
    done, made = sweep(**sections), space(**sections)
    for point, row in zip(done.points, done.rows, strict=True):
        told = explained(made, point)
        assert told.total == pytest.approx(row["total_s"], rel=1e-5)
        assert told.stages == pytest.approx({s: row[f"{s}_s"] for s in told.stages}, rel=1e-5)
        assert told.resources[0].total == pytest.approx(row["busiest_s"], rel=1e-5)
        assert (told.resources[0].kind, told.exchange) == (row["busiest_kind"], row["exchange"])
        assert all(told.beside(stage) >= -1e-12 for stage in told.stages)
        assert told.bound is None or told.bound <= told.total
        assert (told.bound is None) == (point.values["strategy"] == "hybrid_ring")


def test_points_are_found_by_hash_or_row(space):
    points = space(axes={LINK: [1, 2, 3]}).points()
    assert find_point(points, points[1].hash) is points[1]
    assert find_point(points, points[1].hash[:12]) is points[1]
    assert find_point(points, "2") is points[2]
    for text in ("3", "-1", "nonsense", "", *(point.hash[:5] for point in points)):
        with pytest.raises(SweepError, match="a row number from 0 to 2"):
            find_point(points, text)
