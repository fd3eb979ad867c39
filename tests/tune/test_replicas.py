"""Replicated plans tune: on real loads they are at least as balanced as replicas by load, and gradients are true."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from small_problem import EXPERTS, NODES, small_model, small_trace

from jaxmoe.hardware import node_memory
from jaxmoe.latency import LayerTime, evaluate
from jaxmoe.placement.strategies import replicated_by_load
from jaxmoe.traces import read_trace
from jaxmoe.tune import PlacementProblem, TunerSettings, descent, referee, tune
from jaxmoe.tune.descent import TransportPlan
from jaxmoe.tune.referee import Referee
from jaxmoe.tune.settings import StopSwitch
from jaxmoe.tune.tuner import _Run

SHAPE, SLOTS, TOKENS = (2, 4), 10, 256
LAYER = 26  # of the hottest expert: 0.8 of what a node has


def real_problem(shared: Path, memory_bandwidth: float | None = None) -> PlacementProblem:
    """A layer of a real trace on eight equal nodes of ten slots, where compute is what counts."""
    machine = cases.random_machine(np.random.default_rng(0), SHAPE)
    machine.flops[:], machine.link_bandwidth[:], machine.link_latency[:] = 1e12, 2e11, 1e-9
    model = cases.layer_model(machine, mode="replicated")
    capacity = jnp.full(8, SLOTS * cases.COSTS.expert_bytes)
    bandwidth = None if memory_bandwidth is None else jnp.full(8, memory_bandwidth)
    machine = dataclasses.replace(model.machine, memory=node_memory(bandwidth, capacity))
    trace = read_trace(shared / "traces" / "deepseek-v2-lite" / "summary.npz").select_layers([LAYER])
    return PlacementProblem(dataclasses.replace(model, machine=machine), trace, TOKENS, exchanges=())


def max_over_mean(times: LayerTime) -> float:
    """Of compute: the slowest node of every batch over the mean node."""
    return float(times.compute.mean() / times.node_time.mean())


@pytest.mark.parametrize(
    "memory_bandwidth", [None, pytest.param(3e12, marks=pytest.mark.slow)], ids=["compute", "memory"]
)
def test_tuned_replicas_of_real_loads_are_as_balanced_as_those_by_load(shared, monkeypatch, memory_bandwidth):
    monkeypatch.setattr(referee, "SELECTION_BATCHES", (32, 32))
    problem = real_problem(shared, memory_bandwidth)
    settings = TunerSettings(restarts=2, steps=150, batches_per_step=4, refine_steps=300, refine_batches=8, seed=1)
    result = tune(problem, settings)
    held = result.share[0] > 0
    assert (held.sum(axis=0) <= SLOTS).all()
    assert held.any(axis=1).all()
    np.testing.assert_allclose(result.share.sum(axis=2), 1, rtol=1e-6)
    assert (result.bound <= result.cost).all()
    greedy = replicated_by_load(problem.frequency, np.full(8, SLOTS))
    unseen = problem.draw(64, seed=4321)
    ours, theirs = (
        evaluate(problem.model, jnp.asarray(share, jnp.float32), unseen) for share in (result.share, greedy)
    )
    assert float(ours.total.mean()) <= float(theirs.total.mean()) * (1 + 1e-3)
    assert max_over_mean(ours) <= max_over_mean(theirs) * (1 + 1e-3)
    # The search itself, and not the strategy it falls back to, is as fast.
    assert result.stages["searched"] <= result.stages["rounded"] * (1 + 1e-6)


def test_a_thin_relaxed_share_is_no_replica(shared):
    """With memory for everything and no expert that needs a second node, most stay on one or two."""
    problem = real_problem(shared)
    model = dataclasses.replace(problem.model, machine=dataclasses.replace(problem.model.machine, memory=()))
    problem = dataclasses.replace(problem, model=model)
    settings = TunerSettings(restarts=2, steps=50, batches_per_step=2, refine_steps=0, seed=1)
    made = _Run(Referee(problem, 1, StopSwitch()), settings)
    relaxed, _, _ = made.descend(problem.model.exchange)
    hosts = (made.round(relaxed) > 0).sum(axis=-1)
    assert problem.frequency.max() * 8 < 1
    assert hosts.mean() <= 2


@pytest.mark.parametrize("rule", ["lowest_host", "least_loaded", "reduce_scatter"])
def test_the_gradient_of_relaxed_replicas_is_that_of_finite_differences(rule):
    rng = np.random.default_rng(0)
    model = dataclasses.replace(small_model(room=3.0, rule=rule), mode="replicated")
    problem = PlacementProblem(model, small_trace(), 24, exchanges=())
    with jax.enable_x64(True):
        as_double = lambda leaf: jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
        land = jax.tree.map(as_double, descent.landscape(problem, 0.2, 0.05))
        batches = jax.tree.map(lambda leaf: as_double(leaf)[0], problem.draw(2, 0))
        now = descent.Annealed(*(jnp.asarray(value) for value in (0.5, 0.3, 0.05)))
        plan = TransportPlan(*(jnp.asarray(rng.normal(size=size)) for size in ((EXPERTS, NODES), NODES)))

        @jax.jit
        def objective(logits):
            moved = TransportPlan(logits, plan.budget)
            return descent.relaxed_objective(moved, land, land.frequency[0], batches, now)

        gradient = np.asarray(jax.grad(objective)(plan.logits))
        assert np.abs(gradient).max() > 1e-3
        assert (np.abs(gradient) > 0).all()
        step = 1e-5
        for expert in range(EXPERTS):
            for node in range(NODES):
                change = step * jnp.zeros((EXPERTS, NODES)).at[expert, node].set(1)
                slope = (objective(plan.logits + change) - objective(plan.logits - change)) / (2 * step)
                assert float(slope) == pytest.approx(gradient[expert, node], rel=1e-4, abs=1e-7)
