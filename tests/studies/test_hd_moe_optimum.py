"""The proven optimum, against all sets of hosts of tiny machines, the model, and many plans."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases
from oracles.optimum import best_plan

from jaxmoe.engine import Layer, evaluate
from jaxmoe.hardware import node_memory
from jaxmoe.network import build_exchange
from jaxmoe.placement import PlanError
from jaxmoe.traces import merge_tokens, synthetic_trace
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.bounds import lower_bound

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "hd_moe"))
from optimum import TOLERANCE, optimum
from optimum_costs import layer_costs

sys.path.pop(0)

TOKENS, TOP_K = 24, 2


def machine_of(shape: tuple[int, int], seed: int, links: float = 1.0):
    """Nodes and links all differ; `links` scales bandwidths."""
    machine = cases.random_machine(np.random.default_rng(seed), shape)
    machine.link_bandwidth *= links
    return machine


def problem_of(model: Layer, experts: int, tokens: list | None = None, room: float | None = None, seed: int = 0):
    """A problem of one layer with given batches, drawn where there are none; `room` is in experts per node."""
    if room is not None:
        capacity = jnp.full(model.machine.topology.num_nodes, room * cases.COSTS.expert_bytes)
        model = dataclasses.replace(
            model, machine=dataclasses.replace(model.machine, memory=node_memory(None, capacity))
        )
    trace = synthetic_trace(100, [0], experts, TOP_K, skew=1.0, coactivation=0.0, reuse=0.0, seed=seed)
    problem = PlacementProblem(model, trace, TOKENS)
    if tokens is None:
        return dataclasses.replace(problem, batches=problem.draw(2, seed))
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *map(cases.batch, tokens))
    return dataclasses.replace(problem, batches=batches)


def evaluated(problem: PlacementProblem, shares: np.ndarray) -> np.ndarray:
    """Mean total time of every plan [plan, expert, node] by the model, s."""
    given = problem.batches
    repeated = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(shares), axis=0), given)
    return np.asarray(evaluate(problem.model, jnp.asarray(shares, jnp.float32), repeated).total.mean(axis=1), float)


@pytest.mark.parametrize(
    ("shape", "links", "batches", "rule", "room"),
    [
        pytest.param((2, 2), 1.0, 1, "lowest_host", None, marks=pytest.mark.slow),
        pytest.param((2, 2), 0.05, 1, "fewest_hops", None, marks=pytest.mark.slow),
        pytest.param((1, 3), 0.2, 2, "lowest_host", None, marks=pytest.mark.slow),
        ((1, 3), 0.2, 1, "lowest_host", 1.2),
        pytest.param((1, 3), 5.0, 2, "fewest_hops", 1.2, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_best_of_all_sets_of_hosts(shape, links, batches, rule, room):
    machine, rng = machine_of(shape, 1, links), np.random.default_rng(2)
    tokens = [cases.random_tokens(rng, 4, 3, TOP_K, missing=True) for _ in range(batches)]
    found = optimum(problem_of(cases.layer_model(machine, rule=rule), 3, tokens, room), 0)
    expected, _ = best_plan(machine, tokens, 3, cases.COSTS, rule, room)
    assert found.proven
    np.testing.assert_allclose(found.seconds, expected, rtol=1e-5)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**6), links=st.sampled_from([0.05, 0.3, 1.0, 10.0]))
def test_no_plan_is_faster_and_the_model_agrees(seed, links):
    problem = problem_of(cases.layer_model(machine_of((2, 2), seed, links)), 5, seed=seed)
    found = optimum(problem, 0)
    rng = np.random.default_rng(seed)
    plans = np.stack([found.share, *(cases.random_share(rng, 5, 4, hosts=1 + i % 4) for i in range(63))])
    times = evaluated(problem, plans)
    np.testing.assert_allclose(times[0], found.seconds, rtol=1e-5)
    assert times.min() >= found.bound * (1 - 1e-5)
    assert found.proven
    assert found.bound >= found.seconds * (1 - 2 * TOLERANCE)
    assert lower_bound(problem, problem.batches)[0] <= found.seconds * (1 + 1e-6)


def test_merged_batches_are_the_same_batches():
    problem = problem_of(cases.layer_model(machine_of((2, 2), 0)), 4)
    merged = merge_tokens(problem.batches, 4)
    assert merged.experts.ndim == merged.weight.ndim  # rows that the batches share
    together = optimum(dataclasses.replace(problem, batches=merged), 0)
    np.testing.assert_allclose(together.seconds, optimum(problem, 0).seconds, rtol=1e-9)


def test_a_whole_expert_per_node_where_tokens_choose_one_each_and_evenly():
    # Nothing travels, and work is even: no plan can do better than even work.
    machine = machine_of((2, 2), 0)
    machine.flops[:] = 1e12
    tokens = cases.random_tokens(np.random.default_rng(0), 4, 4, TOP_K)
    tokens.experts[:] = np.stack([np.arange(4), np.full(4, -1)], axis=1)
    tokens.weight[:] = 3.0
    found = optimum(problem_of(cases.layer_model(machine), 4, [tokens]), 0)
    np.testing.assert_allclose(found.seconds, 3 * cases.COSTS.flops_per_token_expert / 1e12, rtol=1e-6)
    np.testing.assert_array_equal(np.sort(found.share, axis=1), np.eye(4)[[3, 3, 3, 3]])


def test_memory_is_respected_and_costs_time():
    model = cases.layer_model(machine_of((2, 2), 3, 0.02))  # slow links: all on one node, if it has room
    free, tight = (optimum(problem_of(model, 5, room=room), 0) for room in (None, 1.5))
    assert free.share.sum(axis=0).max() > 1.6
    assert tight.share.sum(axis=0).max() <= 1.5 * (1 + 1e-5)
    assert tight.proven
    assert tight.seconds > 1.1 * free.seconds


def test_time_that_is_up_leaves_a_plan_and_a_bound():
    problem = problem_of(cases.layer_model(machine_of((2, 2), 0, 0.3)), 6)
    whole, cut = optimum(problem, 0), optimum(problem, 0, time_limit_s=0.0)
    assert not cut.proven
    assert cut.bound <= whole.seconds <= cut.seconds
    assert cut.bound >= lower_bound(problem, problem.batches)[0] * (1 - 1e-9)
    np.testing.assert_allclose(evaluated(problem, cut.share[None])[0], cut.seconds, rtol=1e-5)


def test_a_good_incumbent_is_kept_when_time_is_up():
    problem = problem_of(cases.layer_model(machine_of((2, 2), 0, 0.3)), 6)
    whole = optimum(problem, 0)
    again = optimum(problem, 0, incumbent=whole.share, time_limit_s=0.0)
    assert again.seconds <= whole.seconds
    assert optimum(problem, 0, time_limit_s=0.0).seconds > whole.seconds


def test_an_incumbent_that_does_not_fit_is_refused():
    problem = problem_of(cases.layer_model(machine_of((2, 2), 0)), 4, room=1.5)
    with pytest.raises(PlanError, match=r"incumbent.*room"):
        optimum(problem, 0, incumbent=np.eye(4)[[0, 0, 0, 1]])
    with pytest.raises(PlanError, match=r"incumbent.*shape"):
        optimum(problem, 0, incumbent=np.eye(4)[:3])


def drawn(problem: PlacementProblem) -> PlacementProblem:
    return dataclasses.replace(problem, batches=None)


def tailed(problem: PlacementProblem) -> PlacementProblem:
    return dataclasses.replace(problem, p95_weight=0.5)


def ringed(problem: PlacementProblem) -> PlacementProblem:
    ring = build_exchange("ring_both_ways", problem.model.machine.topology)
    return dataclasses.replace(problem, model=dataclasses.replace(problem.model, exchange=ring))


def replicated(problem: PlacementProblem) -> PlacementProblem:
    return dataclasses.replace(problem, model=dataclasses.replace(problem.model, mode="replicated"))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [(drawn, "batches="), (tailed, "p95_weight"), (ringed, "use lowest_host or fewest_hops"), (replicated, "sharded")],
)
def test_other_problems_are_refused_with_the_remedy(change, remedy):
    problem = problem_of(cases.layer_model(machine_of((2, 2), 0)), 4)
    with pytest.raises(PlanError, match=remedy):
        optimum(change(problem), 0)


@pytest.mark.parametrize("ports", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_tables_cost_any_plan_as_the_model_does(ports):
    rng = np.random.default_rng(4)
    machine = cases.random_machine(rng, (2, 3), ports=ports)
    problem = problem_of(cases.layer_model(machine), 5, [cases.random_tokens(rng, 20, 5, TOP_K) for _ in range(2)])
    costs = layer_costs(problem, 0)
    plans = np.stack([cases.random_share(rng, 5, 6, hosts=1 + i % 5) for i in range(20)])
    np.testing.assert_allclose([costs.seconds(plan) for plan in plans], evaluated(problem, plans), rtol=1e-5)


def test_links_that_are_alike_both_ways_have_one_stage():
    machine = machine_of((2, 2), 0)
    same_bytes = dataclasses.replace(cases.COSTS, dispatch_bytes=cases.COSTS.combine_bytes)
    different = layer_costs(problem_of(cases.layer_model(machine, costs=same_bytes), 4), 0)
    machine.link_bandwidth[:], machine.link_latency[:] = 2e9, 0
    alike = layer_costs(problem_of(cases.layer_model(machine, costs=same_bytes), 4), 0)
    unequal = layer_costs(problem_of(cases.layer_model(machine), 4), 0)
    assert different.pair_time.shape[2] == unequal.pair_time.shape[2] == 2
    assert alike.pair_time.shape[2] == 1
