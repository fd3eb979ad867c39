"""moentwine as a system: what its runs take, against the simulator, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxmoe.config import ConfigError, load_scenario
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.simulation import batch_at, iterations_of, simulate
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import given_plans
from jaxmoe.methods import UnsuitableSystemError
from jaxmoe.methods.moentwine.balancing import BalancerError
from jaxmoe.placement.token_layout import TokenLayoutError

WAFER = {
    "kind": "mesh",
    "mesh_shape": [4, 4],
    "die": {"compute_TFLOPs_per_s": 0.05, "memory_bandwidth_GB_per_s": 50, "memory_capacity_GB": 1},
    "link": {"bandwidth_GB_per_s": 5, "latency_ns": 0},
    "router": {"chunk_B": 32},
}
CLUSTERS = {
    "kind": "clusters",
    "clusters": 2,
    "nodes_per_cluster": 4,
    "die": WAFER["die"],
    "link": {"bandwidth_GB_per_s": 5, "latency_ns": 0},
    "uplink": {"bandwidth_GB_per_s": 5, "latency_ns": 0},
    "router": {"chunk_B": 32},
}


def scenario(tmp_path: Path, hardware=WAFER, experts=16, capacity=None, skew=1.2, **system) -> Path:
    hardware = hardware if capacity is None else hardware | {"die": hardware["die"] | {"memory_capacity_GB": capacity}}
    attention = {"kind": "grouped_query", "heads": 8, "kv_heads": 2, "head_size": 16}
    content = {
        "hardware": hardware,
        "model": {
            "hidden_size": 128,
            "expert_size": 64,
            "num_experts": experts,
            "top_k": 2,
            "moe_layer_ids": {"first": 0, "count": 2},
            "attention": attention,
        },
        "workload": {
            "batch_tokens": 256,
            "context_tokens": 64,
            "trace": {"kind": "synthetic", "tokens": 4096, "skew": skew, "reuse": 0.0},
        },
        "costs": {"bytes_per_element": 2, "weight_bytes_per_element": 1},
        "strategies": {"hybrid_regions": 1},
        "system": {"name": "moentwine", "plan": "ep"} | system,
    }
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def simulated(path: Path, iterations=6, replays=1):
    inputs = inputs_of(load_scenario(path))
    steps = iterations_of(inputs, iterations)
    (plan,) = given_plans([inputs.scenario.system.plan], inputs, taken=(), compared=())
    with StageTimer() as clock:
        return simulate(inputs, plan, steps, replays, clock, lambda *_: None)


def test_entwined_rings_halve_the_all_to_all_and_double_the_all_reduce(tmp_path):
    found = simulated(scenario(tmp_path, skew=0.0, layout="er", balancer="none"))
    assert [*found.runs] == ["baseline", "moentwine"]
    times = [run.time for run in found.runs.values()]
    baseline, entwined = (time.stages for time in times)
    # Domains of 2x2 in place of ones that span the mesh: 4/3 hops for 8/3, and a ring's step takes two hops for one.
    assert entwined["all_reduce"].mean() == pytest.approx(2 * baseline["all_reduce"].mean(), rel=0.02)
    carried = [time.busy["dispatch"]["link"].sum() for time in times]
    assert carried[1] == pytest.approx(carried[0] / 2, rel=0.03)
    assert entwined["dispatch"].mean() < baseline["dispatch"].mean()
    np.testing.assert_allclose(entwined["attention"], baseline["attention"], rtol=1e-6)
    for name in found.runs:
        assert found.agreement(name)["max_abs_error_percent"] < 2


def test_a_balancer_evens_out_loads_and_its_weights_take_idle_links(tmp_path):
    found = simulated(scenario(tmp_path, layout="er", shadow_slots=2, rate=0.5), iterations=40)
    assert [*found.runs] == ["baseline", "er", "moentwine"]
    alone, balanced = (found.runs[name].time for name in ("er", "moentwine"))
    # A link carries about one expert an iteration beside what it has to do, so the first copies come late.
    slots = found.runs["moentwine"].rolled.kept["slots"]
    assert (slots[1] == slots[0]).all()
    assert (slots[-1] != slots[0]).any()
    assert balanced.stages["compute"][-10:].mean() < 0.5 * alone.stages["compute"][-10:].mean()
    assert (balanced.stages["migration"] == 0).all()
    # The timeline shows weights under way in the background, and regular work as if they were not.
    run = found.runs["moentwine"]
    recorded = run.system.record(run.rolled, lambda row, step: batch_at(found.iterations, row, step))
    assert recorded.facts["experts_moved"] > 0
    stage = np.array(recorded.stage)
    layers = sum(run.rolled.compared[recorded.facts["iteration"], row] for row in recorded.facts["rows"])
    assert recorded.run.finish[stage == "combine"].max() == pytest.approx(layers, rel=0.1)
    assert found.runs["moentwine"].rolled.figures["iterations_with_a_migration"] > 0
    assert found.agreement("moentwine")["max_abs_error_percent"] < 2


@pytest.mark.parametrize("balancer", ["greedy", pytest.param("gradient", marks=pytest.mark.slow)])
def test_an_invasive_migration_is_charged(balancer, tmp_path):
    found = simulated(scenario(tmp_path, balancer=balancer, migration="invasive", shadow_slots=2))
    run = found.runs["moentwine"].time
    stages = sum(seconds for name, seconds in run.stages.items())
    assert run.stages["migration"].sum() > 0
    np.testing.assert_allclose(run.total, stages, rtol=1e-5)


def test_a_timeline_has_two_layers_and_the_weights_that_move(tmp_path):
    found = simulated(scenario(tmp_path, balancer="greedy", migration="invasive", shadow_slots=2))
    run = found.runs["moentwine"]
    recorded = run.system.record(run.rolled, lambda row, step: batch_at(found.iterations, row, step))
    assert recorded.facts["experts_moved"] > 0
    assert recorded.facts["rows"] == [0, 1]
    assert recorded.run.services is not None
    assert set(recorded.stage) == {"migration", "attention", "all_reduce", "dispatch", "compute", "combine"}
    # Inference waits for the weights, then come both layers as they are replayed, but for larger chunks.
    weights = max(recorded.run.finish[np.array(recorded.stage) == "migration"])
    step = recorded.facts["iteration"]
    layers = sum(run.system.replay(run.rolled, batch_at(found.iterations, row, step), step, row) for row in (0, 1))
    assert recorded.run.makespan - weights == pytest.approx(layers, rel=0.05)


def test_slices_have_no_all_to_all_across_domains(tmp_path):
    found = simulated(scenario(tmp_path, layout="esp", balancer="none", closing=True))
    assert [*found.runs] == ["baseline_esp", "moentwine"]
    assert "closing" in found.stages
    assert found.agreement("moentwine")["max_abs_error_percent"] < 2


@pytest.mark.slow
def test_clusters_have_one_layout(tmp_path):
    found = simulated(scenario(tmp_path, hardware=CLUSTERS, tp=2, shadow_slots=1))
    assert [*found.runs] == ["successive", "moentwine"]
    assert found.agreement("successive")["max_abs_error_percent"] < 5


@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        (
            {"tp": 3},
            TokenLayoutError,
            "tp is 3, which does not divide the 16 devices of 4x4; use one of 1, 2, 4, 8, 16",
        ),
        ({"layout": "esp"}, ConfigError, "expected none, since layout esp slices experts.*Write balancer: none"),
        (
            {"capacity": 3e-4, "shadow_slots": 9},
            BalancerError,
            "10 slots, and room for 9 more that arrive meanwhile, on each of 16 nodes in 2 layers need",
        ),
        ({"experts": 8}, UnsuitableSystemError, "moves whole experts, but the plan divides some"),
        (
            {"hardware": WAFER | {"kind": "torus"}},
            ConfigError,
            "moentwine places tokens on mesh, wafers, switch, clusters",
        ),
    ],
)
def test_what_does_not_suit_is_refused(given, error, expected, tmp_path):
    with pytest.raises(error, match=expected):
        simulated(scenario(tmp_path, **given))
