"""Metrics that take a search: the bound of every point, and what a short tuning reaches."""

import numpy as np
import pytest
from pyarrow import dataset, parquet
from sweep_keys import DIE, LINK

from jaxmoe.experiment import score, standard_strategies
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.parametric import parametric_run
from jaxmoe.sweep import SweepError, read_study, results, search_metrics
from jaxmoe.sweep.analysis import check_searched
from jaxmoe.sweep.search_metrics import tuned
from jaxmoe.tune.bounds import lower_bound

CAPACITY = "hardware.die.memory_capacity_GB"
METRICS = ["total", "bound"]


def test_the_bound_of_a_point_is_that_of_its_machine(space, sweep):
    """As from a scenario by itself, below every time; rings alone leave traffic out, of which it says nothing."""
    sections = {
        "axes": {LINK: [1, 20], "strategy": ["ep_balanced", "hybrid_ring"]},
        "set": {CAPACITY: 0.001},
        "layers": [3],
        "metrics": METRICS,
    }
    made, done = space(**sections), sweep(**sections)
    for point, row in zip(done.points, done.rows, strict=True):
        if point.values["strategy"] == "hybrid_ring":
            assert np.isnan(row["bound_s"])
            continue
        inputs = inputs_of(made.scenario(point.values), layers="3")
        problem = placement_problem(inputs).under(inputs.exchange(row["exchange"]))
        assert row["bound_s"] == pytest.approx(lower_bound(problem, inputs.evaluation_batches).mean(), rel=1e-5)
        assert 0 < row["bound_s"] <= row["total_s"] * (1 + 1e-5)
    assert done.best("bound")["bound_s"] == min(row["bound_s"] for row in done.rows)


def test_a_search_that_is_asked_for_later_is_added_and_stays(sweep, study, tmp_path):
    """Rows with it take the place of those without as they are written; without being asked for, it stays."""
    axes = {LINK: [1, 20, 30], "strategy": ["tp"]}
    assert all(row["bound_s"] is None for row in sweep(axes=axes).rows)
    assert sweep(axes=axes, metrics=METRICS).computed == 3
    assert sweep(axes=axes, metrics=METRICS).computed == 0
    assert sweep(axes=axes).computed == 0
    rows = dataset.dataset(tmp_path / "out" / "points").to_table().to_pylist()
    assert len(rows) == 3
    assert all(row["bound_s"] > 0 for row in rows)


@pytest.mark.slow
def test_a_kill_between_new_rows_and_the_end_of_old_ones_leaves_none_twice(sweep, tmp_path):
    axes, points = {LINK: [1, 20], "strategy": ["tp"]}, tmp_path / "out" / "points"
    sweep(axes=axes)
    (old,) = points.iterdir()
    kept = old.read_bytes()
    sweep(axes=axes | {DIE: [1]}, metrics=METRICS)  # other points, in another file
    sweep(axes=axes, metrics=METRICS)
    (points / "0000.parquet").write_bytes(kept)
    assert sweep(axes=axes, metrics=METRICS).computed == 0
    rows = dataset.dataset(points).to_table().to_pylist()
    assert len({row["hash"] for row in rows}) == len(rows) == 4
    assert all(row["bound_s"] > 0 for row in rows)


def test_no_moment_has_a_point_twice(sweep, tmp_path, monkeypatch):
    """Rows in the folder after each replacement and each removal of a file, while rows get one more metric."""
    axes, points = {LINK: [1, 20, 30], "strategy": ["tp"]}, tmp_path / "out" / "points"
    sweep(axes=axes)
    seen, conform, replace = [], results.Results._conform, results.Results._replace

    def watched(function):
        def run(self, *arguments):
            function(self, *arguments)
            seen.append([row["hash"] for file in points.iterdir() for row in parquet.read_table(file).to_pylist()])

        return run

    monkeypatch.setattr(results.Results, "_conform", watched(conform))
    monkeypatch.setattr(results.Results, "_replace", watched(replace))
    sweep(axes=axes | {LINK: [1, 20]}, metrics=METRICS)  # in a file of another name
    assert len(seen) >= 2
    assert all(len({*hashes}) == len(hashes) for hashes in seen)


def test_a_search_that_the_study_does_not_ask_for_cannot_be_on_a_front(study):
    with pytest.raises(SweepError, match=r"--pareto names bound, which .*study.yaml does not ask for"):
        check_searched(read_study(study(axes={LINK: [1]})), ["total", "bound"])


@pytest.mark.slow
def test_tuned_times_are_between_the_bound_and_what_ships(space, sweep):
    """Equal for all strategies of a machine, one block or two; somewhere faster than all that ships."""
    axes = {
        LINK: {"from": 0.5, "to": 40, "points": 5, "scale": "log"},
        DIE: [0.2, 2],
        "strategy": ["tp", "ep_balanced"],
    }
    changes = {"workload.trace.skew": 1.2, "model.num_experts": 8}
    sections = {"axes": axes, "set": changes, "layers": [3], "metrics": ["total", "tuned"]}
    made, done = space(**sections), sweep(**sections)
    gains = []
    for machine in range(0, len(done.rows), 2):
        rows = done.rows[machine : machine + 2]
        assert rows[0]["tuned_s"] == rows[1]["tuned_s"]
        inputs = inputs_of(made.scenario(done.points[machine].values), layers="3")
        bound = lower_bound(placement_problem(inputs), inputs.evaluation_batches).mean()
        shipped = min(
            score(inputs, strategy, inputs.evaluation_batches, name).mean.mean()
            for strategy in standard_strategies(inputs)
            for name in (None, *inputs.exchanges)
            if strategy.comparable
        )
        assert bound * (1 - 1e-5) <= rows[0]["tuned_s"] <= shipped * (1 + 1e-5)
        gains.append(shipped / rows[0]["tuned_s"])
    assert max(gains) > 1.01


@pytest.mark.slow
def test_a_tuned_time_does_not_depend_on_the_machines_beside(space, monkeypatch):
    # Even plans are faster along trees where links are slow, and as fast without where ports are.
    ports = ("hardware.ports.injection_GB_per_s", "hardware.ports.ejection_GB_per_s")
    changes = {"workload.trace.skew": 1.2, "model.num_experts": 8, "hardware.die.compute_TFLOPs_per_s": 100}
    changes |= {"tuning.exchanges": ["least_loaded", "corner_host_split_tree"]} | dict.fromkeys(ports, 1)
    set_up = parametric_run(space(axes={LINK: [1]}, set=changes, layers=[3]).scenario({}), (LINK, *ports), "3")
    machines = np.array([[0.5, 1, 100], [100, 1, 1], [0.5, 100, 1], [100, 0.5, 0.5], [0.5, 1, 1]])
    under, descended = [], search_metrics._descended

    def watched(problems, exchange):
        under.append(exchange.description)
        return descended(problems, exchange)

    monkeypatch.setattr(search_metrics, "_descended", watched)
    together = tuned(set_up, machines)
    assert len({*under}) == len(under) == 2  # one block, and machines of either choice
    alone = [tuned(set_up, row[None])[0] for row in machines]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


@pytest.mark.slow
def test_without_room_for_the_experts_nothing_is_tuned(sweep):
    done = sweep(axes={LINK: [1, 2]}, set={CAPACITY: 1e-4}, metrics=["total", "tuned"])
    assert all(np.isnan(row["tuned_s"]) for row in done.rows)
    assert sweep(axes={LINK: [1, 2]}, set={CAPACITY: 1e-4}, metrics=["total", "tuned"]).computed == 0
