"""The bound of allocations by hand and below all plans; the descent against it and Algorithm 1."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.engine import FetchCosts, FetchLayer
from jaxmoe.methods import AllocationCosts, AllocationTask, GreedyAllocation, deal
from jaxmoe.methods.wafer_gpu.descended_allocation import (
    AssignmentProgram,
    GradientAllocation,
    allocation_seconds,
    whole,
)

BYTES = 3 * 4096 * 1536.0
COSTS = FetchCosts(BYTES, 2 * BYTES)
MACHINE = build_machine(load_hardware("configs/hardware/dojo_5x5.yaml"))
LAYER = FetchLayer(MACHINE, COSTS)
PRICES = AllocationCosts.of(MACHINE, COSTS)
dealt_round = jax.jit(deal, static_argnums=1)
seconds_of = eqx.filter_jit(allocation_seconds)
FIRST = 110e-9 + 300e-9  # latency of a local read


def task_of(counts, home):
    home = np.asarray(home)
    return AllocationTask(np.asarray(counts), home, (home[:, None] == np.arange(25)).astype(float))


def bound_of(task):
    return AssignmentProgram(LAYER).solve(task)[1]


@eqx.filter_jit
def tuned(task, seed=0):
    return GradientAllocation(LAYER, jax.random.key(seed))(task)


def test_memory_bounds_few_requests():
    """Two experts of one home are read from its HBM, whoever computes them."""
    bound = bound_of(task_of([1, 1, 0], [12, 12, 12]))
    assert bound == pytest.approx(2 * BYTES / 2e12 + FIRST, rel=1e-5)


def test_work_is_spread_where_it_bounds():
    """All dies compute; what they read in parts is far less."""
    bound = bound_of(task_of([10**6], [12]))
    assert bound == pytest.approx(10**6 * 2 * BYTES / 25 / 1e15 + FIRST, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_beats_the_bound_and_the_descent_is_no_worse_than_algorithm_1(seed):
    """Line 5, on average over these."""
    rng = np.random.default_rng(seed)
    task = task_of(np.floor(rng.gamma(1.0, 200, 128)).astype(int), rng.permutation(np.arange(128) % 25))
    hops = jnp.asarray(MACHINE.topology.hop_counts())
    given = jax.device_put(task)
    greedy = np.asarray(eqx.filter_jit(GreedyAllocation(hops, PRICES))(given))
    dealt = np.asarray(dealt_round(given.counts, 25))
    plan = tuned(given)
    bound = bound_of(task)
    np.testing.assert_array_equal(plan.sum(axis=1), task.counts)
    seconds, *others = (seconds_of(LAYER, each, given) for each in (plan, greedy, dealt))
    assert bound * (1 - 1e-5) <= seconds <= min(others)


def test_whole_requests_keep_their_number_and_drop_small_parts():
    relaxed = np.array([[9.7, 0.2, 0.1], [3.4, 3.3, 3.3], [0.0, 0.0, 0.0]])
    plan = jax.jit(whole)(jnp.asarray(relaxed), jnp.asarray([10, 10, 0]), 0.05)
    np.testing.assert_array_equal(plan, [[10, 0, 0], [4, 3, 3], [0, 0, 0]])


def test_the_same_seed_finds_the_same_plan():
    task = jax.device_put(task_of([900, 20, 400], [0, 0, 3]))
    first, again = (tuned(task, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert jax.config.jax_enable_x64 is False
