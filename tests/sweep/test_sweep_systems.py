"""Sweeps over systems, their settings and plans: times as by `jaxmoe simulate`, and what does not go with them."""

import math

import numpy as np
import pytest
from sweep_keys import LINK

from jaxmoe.config import ConfigError
from jaxmoe.experiment.clock import StageClock
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.simulation import iterations_of, simulate
from jaxmoe.experiment.strategies import given_plans
from jaxmoe.latency import LayerTime
from jaxmoe.placement import Placement, write_plan
from jaxmoe.sweep import SweepError
from jaxmoe.sweep.analysis import elasticities, winners
from jaxmoe.sweep.rollouts import _by_layer

LATENCY = "hardware.link.latency_ns"
HD_MOE = {"name": "hd_moe", "experts": 1}


def simulated(space, point, iterations):
    """Times by `jaxmoe simulate` at a point, s [step, layer]."""
    inputs = inputs_of(space.scenario(point.values), layers=space.study.layers)
    (plan,) = given_plans([inputs.scenario.system.plan], inputs, compared=())
    told = simulate(inputs, plan, iterations_of(inputs, iterations), 1, StageClock(), lambda *_: None)
    return told.runs[told.system].time


@pytest.mark.parametrize(
    "plans", [["ep_balanced"], pytest.param(["ep_balanced", "tp"], marks=pytest.mark.slow)], ids=len
)
def test_times_are_those_of_simulate(space, sweep, plans):
    """Machines that differ in numbers share what is set up; a system, its settings and its plan make groups."""
    axes = {"system": ["static", HD_MOE], "plan": plans, LINK: [5, 20]}
    sections = {"axes": axes, "iterations": 3, "layers": [3]}
    made, done = space(**sections), sweep(**sections)
    assert (len(done.rows), done.groups) == (4 * len(plans), 2 * len(plans))
    for point, row in zip(done.points, done.rows, strict=True):
        name = point.values["system"] if isinstance(point.values["system"], str) else "hd_moe"
        assert row["strategy"] == f"{name} on {point.values['plan']}"
        time = simulated(made, point, 3)
        assert row["total_s"] == pytest.approx(time.total.mean(), rel=2e-5)
        assert row["dispatch_s"] == pytest.approx(time.stages["dispatch"].mean(), rel=2e-5)
        assert row["p95_s"] == pytest.approx(np.quantile(time.total, 0.95, axis=0).mean(), rel=2e-5)
    assert len(winners(done.points, done.rows)) == 2  # one for each machine
    assert sweep(**sections).computed == 0


@pytest.mark.slow
def test_settings_of_a_system_are_axes(sweep):
    """Pre-broadcast of no expert that fits is the plan as it is; what a stage of another name takes is told as none."""
    done = sweep(
        axes={"system.experts": [1, 2], "system.broadcast": ["hidden", "charged"]},
        set={"system": HD_MOE, "plan": "ep_balanced"},
        layers=[3],
    )
    assert len({row["total_s"] for row in done.rows}) >= 3
    assert all(math.isfinite(row["total_s"]) for row in done.rows)


def test_a_plan_of_a_file_is_the_plan_and_another_file_of_that_name_another_point(sweep, tmp_path):
    def written(nodes):
        share = np.eye(4, dtype=np.float32)[np.array(nodes)][None]
        write_plan(tmp_path / "own.npz", Placement(share, (2, 2), "sharded", (3,)))

    axes = {"plan": ["own.npz", "ep_balanced"]}
    written([0, 1, 2, 3])
    first = sweep(axes=axes, layers=[3])
    assert [row["strategy"] for row in first.rows] == ["static on own", "static on ep_balanced"]
    written([0, 0, 1, 1])
    again = sweep(axes=axes, layers=[3])
    assert again.computed == 1
    assert again.rows[0]["total_s"] > first.rows[0]["total_s"]


def test_what_does_not_suit_says_why_and_the_rest_is_rolled_out(sweep):
    done = sweep(axes={"system": ["static", "expert_streaming", "camoe"]}, layers=[3])
    static, streaming, camoe = done.rows
    assert math.isfinite(static["total_s"])
    assert streaming["total_s"] is camoe["total_s"] is None
    assert "loads experts from memory" in streaming["note"]
    assert "no logits" in camoe["note"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"axes": {"system": ["static"], "strategy": ["tp"]}}, "no strategy beside a system"),
        ({"axes": {"plan": ["tp"], "system.plan": ["tp"]}}, "one of plan and system.plan"),
        ({"axes": {"plan": ["tp"]}, "metrics": ["total", "tuned"]}, "no metric that takes a search"),
        ({"axes": {"system": ["statik"]}}, "statik"),
        ({"axes": {"system.experts": [1]}}, "experts"),
        ({"axes": {"plan": ["none.npz"]}}, "no such plan file"),
    ],
)
def test_what_does_not_go_with_systems_is_one_clear_error(sweep, sections, message):
    with pytest.raises((SweepError, ConfigError), match=message):
        sweep(**sections)


def test_systems_have_no_elasticities(space):
    made = space(axes={"system": ["static"], LATENCY: [1, 2]})
    with pytest.raises(SweepError, match="rolled out, not differentiated"):
        elasticities(made, made.points(), lambda *_: None)


def test_a_stage_that_a_system_does_not_have_is_no_time_of_none():
    """It fetches for 1 and 2 s in two steps of one layer, and dispatches nothing."""
    fetch = np.array([[1.0], [2.0]])
    told = _by_layer(LayerTime({"fetch": fetch}, {}, fetch), nodes=2)
    assert told.total.tolist() == told.stages["fetch"].tolist() == [[1.0, 2.0]]
    assert np.isnan(told.dispatch).all()


@pytest.mark.parametrize("name", ["energy", "energy_per_token"])
def test_an_energy_that_systems_do_not_tell_is_one_clear_error(sweep, name):
    """Also where the machine states one."""
    stated = {"hardware.link.energy_pJ_per_B": 4}
    with pytest.raises(SweepError, match=f"the metric {name} is wanted, but systems do not tell it"):
        sweep(axes={"system": ["static"]}, set=stated, metrics=["total", name])
