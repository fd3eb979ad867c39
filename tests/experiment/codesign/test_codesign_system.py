"""Machines for a system whose layers can be timed alone, and variables that are whole numbers in the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from oracles.arrays import full

from jaxmoe.config import ConfigError
from jaxmoe.config.hardware_space import read_space
from jaxmoe.experiment.codesign.designs import system_times
from jaxmoe.experiment.codesign.problem import hardware_problem
from jaxmoe.experiment.codesign.search import tune_hardware
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.simulation import IterationBatches, setting_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.methods import UnsuitableSystemError, system_of

DDR, LINK = "hardware.memory.ddr.bandwidth_GB_per_s", "hardware.link.bandwidth_GB_per_s"
SRAM, DIE = "hardware.memory.sram.capacity_GB", "hardware.die.compute_TFLOPs_per_s"
CHIPLETS = {
    "hardware": {
        "mesh_shape": [2, 2],
        "die": {"compute_TFLOPs_per_s": 1.0},
        "link": {"bandwidth_GB_per_s": 50.0, "latency_ns": 4},
        "memory": [
            {"name": "sram", "bandwidth_GB_per_s": 1000.0, "capacity_GB": 0.0003},
            {"name": "ddr", "bandwidth_GB_per_s": 5.0},
        ],
    },
    "model": {
        "hidden_size": 256,
        "expert_size": 256,
        "num_experts": 6,
        "top_k": 2,
        "moe_layer_ids": {"first": 0, "count": 1},
    },
    "workload": {"batch_tokens": 16, "trace": {"kind": "synthetic", "tokens": 128}},
    "costs": {"bytes_per_element": 1, "weight_bytes_per_element": 1, "exchange": "token_home"},
    "tuning": {"exchanges": ["token_home"]},
    "evaluation": {"batches": 2},
    "system": {"name": "expert_streaming", "strategy": "fse_paired", "micro_slices": 4, "attention": False},
}
SPACE = {
    "variables": {
        DDR: {"from": 1, "to": 50, "scale": "log"},
        LINK: {"from": 10, "to": 200, "scale": "log"},
        DIE: {"from": 0.1, "to": 10, "scale": "log"},
        SRAM: {"from": 0.0003, "to": 0.003, "scale": "log"},
        "modules": {"from": 1, "to": 5},
    },
    "whole": ["modules"],
    "constraints": [f"{DDR} + 6 * {DIE} + 2000 * {SRAM} + 4 * modules <= 30", f"{LINK} <= 40 * modules"],
    "placement": "system",
    "starts": 2,
    "steps": 25,
}


@pytest.fixture
def streaming(tmp_path):
    """A problem of the chiplets, with other sections of the space and values of the scenario."""

    def make(fixed=None, **sections):
        (tmp_path / "chiplets.yaml").write_text(yaml.safe_dump(CHIPLETS))
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE | sections, sort_keys=False))
        return hardware_problem(read_space(tmp_path / "space.yaml"), tmp_path / "chiplets.yaml", fixed or {}, [0])

    return make


def own(problem):
    (group,) = problem.groups
    return group, tuple(tuple(each._replace(share=each.share[0]) for each in parts) for parts in group.arguments)


@pytest.mark.slow
def test_slopes_of_a_system_are_finite_differences(streaming):
    problem = streaming()
    group, given = own(problem)
    at = np.array([0.3, 0.35, 0.4, 0.6, 0.5], np.float32)
    both = jax.jit(jax.value_and_grad(lambda at: problem.objective(group.static, given, at, None)))
    slope = np.asarray(both(at)[1])
    step = 2e-3
    for index, way in enumerate(step * np.eye(len(at), dtype=np.float32)):
        ahead, behind = (float(both(at + sign * way)[0]) for sign in (1, -1))
        np.testing.assert_allclose(slope[index], (ahead - behind) / (2 * step), rtol=0.03, atol=2e-3)
    assert slope[0] < -0.5  # DDR limits
    assert slope[4] == 0  # modules are in constraints alone


@pytest.mark.slow
def test_the_best_machine_of_a_system_has_whole_numbers_and_beats_a_grid(streaming):
    problem = streaming()
    with StageTimer() as clock:
        result = tune_hardware(problem, lambda *_: None, clock)
    numbers = result.best.numbers
    assert numbers["modules"] in (1, 2, 3, 4, 5)
    assert all(met.excess <= 1e-3 for met in result.best.constraints)
    axes = [np.linspace(0, 1, 6)] * 4 + [np.linspace(0, 1, 5)]
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes)], axis=1)
    legal = grid[problem.excess_and_slope(grid)[0].max(axis=1) <= 0]
    group, given = own(problem)
    timed = jax.jit(lambda points: jax.lax.map(lambda at: problem.objective(group.static, given, at, None), points))
    assert result.best.metric <= problem.metric(float(timed(jnp.asarray(legal, jnp.float32)).min())) * (1 + 1e-4)
    # What is told is what the system takes, over iterations that are the evaluation batches.
    inputs = inputs_of(result.best.scenarios[0], layers="0")
    section = inputs.scenario.system
    system = system_of(section.name, **section.model_dump(exclude={"name", "plan"}))
    runs = system.runs(setting_of(inputs, result.best.strategy, inputs.trace))
    iterations = IterationBatches(inputs.evaluation_batches, False, inputs.trace, foresight=True)
    rolled = runs["expert_streaming"].rollout(iterations.batches)
    np.testing.assert_allclose(result.best.metric, rolled.time.total.mean(), rtol=1e-5)
    np.testing.assert_allclose(system_times(inputs, result.best.strategy).total.T, rolled.time.total, rtol=1e-5)


def test_whole_numbers_are_the_best_ones_worked_out_by_hand(problem):
    """A link of 2 GB/s for every module: of each number the rest goes to dies, and the time is a / die + b / link."""
    bounds = {DIE: {"from": 0.01, "to": 10, "scale": "log"}, LINK: {"from": 0.1, "to": 100, "scale": "log"}}
    made = problem(
        variables=bounds | {"modules": {"from": 1, "to": 6}},
        whole=["modules"],
        constraints=[f"3 * {DIE} + 0.4 * modules <= 2.5", f"{LINK} <= 2 * modules"],
        placement=["ep_balanced"],
        starts=4,
        steps=25,
    )
    with StageTimer() as clock:
        best = tune_hardware(made, lambda *_: None, clock).best
    unit = made.scenario_at({DIE: 1.0, LINK: 1.0})
    from jaxmoe.experiment.evaluation import score

    inputs = inputs_of(unit, layers="3")
    times = score(inputs, made.strategies[0], inputs.evaluation_batches)
    a, b = float(times.compute.mean()), float(times.communication.mean())
    by_hand = {count: a * 3 / (2.5 - 0.4 * count) + b / (2 * count) for count in range(1, 7)}
    assert best.numbers["modules"] == min(by_hand, key=by_hand.__getitem__)
    assert best.metric == pytest.approx(min(by_hand.values()), rel=1e-3)


def test_systems_that_go_from_step_to_step_are_told(streaming):
    for system, told in (
        ({"name": "expert_streaming", "strategy": "fse_buffered"}, "fse_buffered, which goes on from step to step"),
        ({"name": "static"}, "a layer alone has no time"),
    ):
        problem = streaming({"system": system})
        group, given = own(problem)
        with pytest.raises(UnsuitableSystemError, match=told):
            problem.objective(group.static, given, full(5, 0.5), None)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"whole": ["module"]}, "a key of variables"),
        ({"variables": SPACE["variables"] | {"modules": {"from": 1.2, "to": 1.8}}}, "a whole number between"),
        ({"objective": "compute"}, "total or p95 beside placement: system"),
    ],
)
def test_wrong_whole_numbers_and_objectives_name_their_key(streaming, sections, told):
    with pytest.raises(ConfigError, match=told):
        streaming(**sections)
