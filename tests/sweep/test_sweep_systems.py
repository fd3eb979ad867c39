"""Sweeps over systems, their settings and plans: times as by `jaxmoe simulate`, and what does not go with them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from sweep_keys import LINK

from jaxmoe.config import ConfigError
from jaxmoe.engine import measured_time
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.metrics import Outcome
from jaxmoe.experiment.simulation import iterations_of, simulate
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import given_plans
from jaxmoe.hardware import Die, Machine, Mesh
from jaxmoe.placement import Placement, write_plan
from jaxmoe.registry import METRICS
from jaxmoe.sweep import SweepError
from jaxmoe.sweep.analysis import elasticities, winners

LATENCY = "hardware.link.latency_ns"
HD_MOE = {"name": "hd_moe", "experts": 1}


def simulated(space, point, iterations):
    """Times by `jaxmoe simulate` at a point, s [step, layer]."""
    inputs = inputs_of(space.scenario(point.values), layers=space.study.layers)
    (plan,) = given_plans([inputs.scenario.system.plan], inputs, compared=())
    told = simulate(inputs, plan, iterations_of(inputs, iterations), 1, StageTimer(), lambda *_: None)
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
    fetch = jnp.asarray([[1.0], [2.0]])
    times = measured_time({"fetch": fetch}, {"fetch": {"link": full((2, 1, 3), 1.0)}}).by_layer()
    assert times.total.tolist() == times.stages["fetch"].tolist() == [[1.0, 2.0]]
    assert times.busy["fetch"]["link"].shape == (1, 3)
    machine = Machine(Mesh.uniform(1.0, 0.0, shape=(1, 2)), Die(full(2, 1.0)))
    outcome = Outcome(times, machine, jnp.asarray(1.0))
    assert np.isnan(METRICS["dispatch"](outcome))
    assert np.isnan(METRICS["communication_share"](outcome))
    assert float(METRICS["total"](outcome)) == 1.5


def test_systems_tell_the_energy_that_the_machine_states(sweep):
    """A plan left alone takes what the same plan takes as a strategy."""
    stated = {"hardware.link.energy_pJ_per_B": 4, "hardware.die.energy_pJ_per_FLOP": 1}
    (system,) = sweep(axes={"system": ["static"]}, set=stated, metrics=["total", "energy"]).rows
    assert system["energy_J"] > 0
    assert system["energy_per_token_J"] > 0
