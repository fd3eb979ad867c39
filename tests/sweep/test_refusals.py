"""Points that cannot be evaluated: each has its own reason, in any order and wherever a sweep stopped."""

import pytest
import yaml
from sweep_keys import DIE, LINK

from jaxmoe.errors import InputError
from jaxmoe.sweep import SweepError, read_study, run_sweep

WHOLE = {"die": {"compute_TFLOPs_per_s": 1}, "link": {"bandwidth_GB_per_s": 10}}
MESH, SWITCH = {"mesh_shape": [2, 2], **WHOLE}, {"kind": "switch", "nodes": 4, **WHOLE}
EXPERTS, TOP_K = "model.num_experts", "model.top_k"
TOKENS, BATCH = "workload.trace.tokens", "workload.batch_tokens"


def by_values(done, *keys):
    return {tuple(point.values[key] for key in keys): row for point, row in zip(done.points, done.rows, strict=True)}


class StopError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("stop", [1, 3])
def test_a_sweep_that_stopped_before_impossible_points_goes_on(study, tmp_path, stop):
    path, folder = study(axes={"hardware": [MESH, SWITCH], "exchange": ["own", "rings_1x2"]}), tmp_path / "stopped"
    folder.mkdir()

    def stopped(done, total):
        if done >= stop:
            raise StopError

    with pytest.raises(StopError):
        run_sweep(read_study(path), folder, stopped)
    done = run_sweep(read_study(path), folder, lambda done, total: None)
    assert (done.computed, len(done.rows)) == (4 - stop, 4)
    assert "use rings_2" in done.rows[3]["note"]


def test_a_study_may_grow_by_impossible_points(sweep):
    sweep(axes={"hardware": [MESH, SWITCH], "exchange": ["own"]})
    done = sweep(axes={"hardware": [SWITCH], "exchange": ["own", "rings_1x2"]})
    assert [row["total_s"] is None for row in done.rows] == [False, True]
    with pytest.raises(SweepError, match="greater than 0"):
        sweep(axes={LINK: [-1], "exchange": ["own"]})


@pytest.mark.parametrize("numbers", [[10, -5], [-5, 10]])
def test_numbers_are_checked_under_every_strategy(sweep, numbers):
    with pytest.raises(SweepError, match="greater than 0"):
        sweep(axes={LINK: numbers, "strategy": ["tp", "ep"]}, zip=[[LINK, "strategy"]])


def test_a_number_that_does_nowhere_is_refused_among_many(sweep):
    with pytest.raises(SweepError, match=f"{LINK} is -5"):
        sweep(axes={DIE: [1, 2], LINK: [-5, 10], "strategy": ["tp", "ep"]})


@pytest.mark.parametrize(("experts", "chosen"), [([4, 16], [8, 2]), ([16, 4], [2, 8])])
def test_values_that_do_not_go_together_are_noted_in_any_order(sweep, experts, chosen):
    done = sweep(axes={EXPERTS: experts, TOP_K: chosen, LINK: [1, 2], "strategy": ["tp", "tp_both_ways"]})
    rows = by_values(done, EXPERTS, TOP_K, LINK, "strategy")
    assert {key[:2] for key, row in rows.items() if row["total_s"] is None} == {(4, 8)}
    assert all("top_k" in row["note"] for key, row in rows.items() if key[:2] == (4, 8))
    assert len(rows) == 16


@pytest.mark.parametrize("batches", [[8, 32], [32, 8]])
def test_what_cannot_be_set_up_is_noted_in_any_order(sweep, batches):
    rows = by_values(sweep(axes={TOKENS: [16, 64], BATCH: batches, "strategy": ["tp"]}), TOKENS, BATCH)
    assert {key for key, row in rows.items() if row["total_s"] is None} == {(16, 32)}
    assert "batch_tokens is 32" in rows[16, 32]["note"]


def test_every_point_has_its_own_reason(sweep):
    done = sweep(axes={EXPERTS: [4, 16], TOP_K: [8, 6, 2]})
    rows = by_values(done, EXPERTS, TOP_K)
    assert "8" in rows[4, 8]["note"]
    assert "6" in rows[4, 6]["note"]


@pytest.mark.slow
def test_drawn_numbers_that_do_not_go_together_are_noted(sweep):
    axes = {EXPERTS: {"from": 4, "to": 8}, TOP_K: {"from": 1, "to": 7}}
    done = sweep(axes=axes, sample={"latin_hypercube": 4, "seed": 199})
    assert {row["total_s"] is None for row in done.rows} == {False, True}
    for (experts, chosen), row in by_values(done, EXPERTS, TOP_K).items():
        assert (row["total_s"] is None) == (chosen > experts)
    with pytest.raises(InputError, match="greater than 0"):
        sweep(axes={LINK: {"from": -1, "to": 8}}, sample={"latin_hypercube": 8})


def test_an_exchange_decides_what_can_be_compared(sweep):
    done = sweep(
        axes={"strategy": ["hybrid", "hybrid_ring"], "exchange": ["own", "rings_1x2_alone", "rings_1x2_both_ways"]}
    )
    rows = by_values(done, "strategy", "exchange")
    assert {key for key, row in rows.items() if not row["comparable"]} == {
        ("hybrid", "rings_1x2_alone"),
        ("hybrid_ring", "own"),
        ("hybrid_ring", "rings_1x2_alone"),
    }
    assert "without what the groups send each other" in rows["hybrid", "rings_1x2_alone"]["note"]
    assert not rows["hybrid_ring", "rings_1x2_both_ways"]["note"]
    assert rows["hybrid", "rings_1x2_alone"]["hash"] != done.best("total")["hash"]


def test_layers_that_a_model_lacks_name_the_key_of_the_study(study, sweep, tmp_path):
    with pytest.raises(SweepError, match=r"study.yaml: layers has \[99\], but .* in layers \[3, 5\]; name some of"):
        sweep(axes={LINK: [1]}, layers=[3, 99])
    assert not list((tmp_path / "out").iterdir())


def test_sizes_that_the_machine_of_a_file_lacks_rows_for_are_noted(study, scenario, tmp_path):
    slow = yaml.safe_load(scenario.read_text())
    slow["hardware"] |= {"mesh_shape": [3, 2], "dies": [{"row": 2, "compute_TFLOPs_per_s": 0.5}]}
    scenario.write_text(yaml.safe_dump(slow))
    (tmp_path / "out").mkdir()
    path = study(axes={"hardware.mesh_shape": [[3, 2], [2, 2]], "strategy": ["tp"]})
    done = run_sweep(read_study(path), tmp_path / "out", lambda done, total: None)
    assert [row["total_s"] is None for row in done.rows] == [False, True]
    assert "dies.0.row is 2; expected a row of the 2x2 mesh" in done.rows[1]["note"]
