"""Mappings tuned by gradient: exact against the layouts' own time, derivatives, the optimum of 4x4, bad input."""

import itertools
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import InputError
from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import hop_counts, num_links
from jaxmoe.placement.token_layout import token_layout
from jaxmoe.relax import HardMax, SmoothMax

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "moentwine"))
import mapping_bound
from layouts import balanced_counts
from mapping_bound import _first_free, least_of_all_partitions
from mapping_problem import MappingProblem, exact_seconds
from mapping_search import anneal_mapping, tune_mapping

sys.path.pop(0)


def problem_of(shape=(4, 4), tp=4, top_k=8, congested=False, latency=0.0):
    links, nodes = num_links(shape), shape[0] * shape[1]
    mesh = Mesh(*jax.device_put((np.full(links, 1e12), np.full(links, latency))), shape=shape)
    counts = balanced_counts(256.0, nodes // tp, nodes, 1, 128, top_k).node
    return MappingProblem(mesh, counts, 256.0, 8192.0, congested=congested)


cost = eqx.filter_jit(lambda problem, order: problem.cost(problem.places_of(order), HardMax()))


@pytest.mark.parametrize("name", ["baseline", "er"])
@pytest.mark.parametrize("latency", [0.0, 2e-7])
def test_the_cost_of_a_mapping_is_the_time_of_its_layout(name, latency):
    problem, layout = problem_of(latency=latency), token_layout(name, (4, 4), 4)
    told = float(cost(problem, jnp.asarray(layout.ring.ravel())))
    assert told == pytest.approx(exact_seconds(problem, layout), rel=1e-5)
    assert exact_seconds(problem, problem.layout(layout.ring.ravel())) == pytest.approx(told, rel=1e-5)


@pytest.mark.parametrize("name", ["baseline", "er"])
def test_congestion_of_rings_without_conflict_is_exact(name):
    problem, layout = problem_of(congested=True), token_layout(name, (4, 4), 4)
    told = float(cost(problem, jnp.asarray(layout.ring.ravel())))
    assert told == pytest.approx(exact_seconds(problem, layout), rel=1e-5)


@pytest.mark.parametrize("congested", [False, True])
def test_links_that_differ_each_way_count_both_ways(congested):
    problem, layout = problem_of(congested=congested), token_layout("er", (4, 4), 4)
    rates = jnp.asarray(np.random.default_rng(2).uniform(0.5e12, 2e12, num_links((4, 4))), jnp.float32)
    problem = eqx.tree_at(lambda p: p.topology.link_bandwidth, problem, rates)
    told = float(cost(problem, jnp.asarray(layout.ring.ravel())))
    assert told == pytest.approx(exact_seconds(problem, layout), rel=1e-5)


@pytest.mark.parametrize("congested", [False, True])
def test_a_cold_plan_has_the_exact_cost(congested):
    problem, order = problem_of(congested=congested), jnp.asarray(np.random.default_rng(0).permutation(16))
    places = problem.places_of(order)
    time = eqx.filter_jit(lambda problem, reduction: problem.cost(places, reduction))
    exact = float(time(problem, HardMax()))
    near = [float(time(problem, SmoothMax(jnp.asarray(t)))) for t in (0.1, 0.01, 1e-4)]
    assert near[0] > near[1] > near[2] >= exact * (1 - 1e-6)
    assert near[2] == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("congested", [False, True])
def test_derivatives_of_a_relaxed_mapping(congested):
    problem = problem_of(congested=congested)
    rng = np.random.default_rng(1)
    places, way = (jnp.asarray(rng.uniform(0.5, 1.5, (16, 4, 4)) / 16, float) for _ in range(2))

    @jax.jit
    @jax.value_and_grad
    def value(step):
        return 1e6 * problem.cost(places + step * way, SmoothMax(jnp.asarray(0.3)))

    slope = float(value(0.0)[1])
    assert slope == pytest.approx((float(value(1e-2)[0]) - float(value(-1e-2)[0])) / 2e-2, rel=1e-2)


def kept(function):
    """The function, which is called once: its result is that of all calls."""
    results = []

    def call(*arguments):
        if not results:
            results.append(function(*arguments))
        return results[0]

    return call


@pytest.fixture(scope="module")
def combined():
    """All partitions of 4x4, how far devices fetch in each, and how many are alike: the same for every top-k."""
    return {name: kept(getattr(mapping_bound, name)) for name in ("_combine", "_distinct")}


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [2, 4, 6, 8])
def test_unseeded_starts_reach_the_optimum_of_4x4(top_k, combined, monkeypatch):
    for name, once in combined.items():
        monkeypatch.setattr(mapping_bound, name, once)
    # The bound holds for every partition, ring and way to fetch, so a mapping that reaches it is an optimum.
    problem = problem_of(top_k=top_k)
    found, bound = tune_mapping(problem), least_of_all_partitions(problem)
    assert (bound.partitions, bound.distinct) == (2_627_625, 330_266)
    assert found.seconds == pytest.approx(bound.seconds, rel=1e-5)
    assert found.seconds <= exact_seconds(problem, token_layout("er", (4, 4), 4)) * (1 + 1e-6)


@pytest.mark.slow
def test_a_search_is_no_slower_than_what_it_starts_from():
    problem, layouts = problem_of((4, 6), 4), [token_layout(name, (4, 6), 4) for name in ("baseline", "er")]
    found = tune_mapping(problem, restarts=2, steps=20, rounds=2, starts=layouts)
    assert found.seconds <= min(exact_seconds(problem, layout) for layout in layouts) * (1 + 1e-6)


def test_annealing_improves_on_its_starts():
    found = anneal_mapping(problem_of(), chains=4, swaps=300)
    assert (found.polished <= found.relaxed).all()
    assert found.seconds < found.relaxed.min()


def test_all_partitions_of_a_line_by_plain_loops():
    problem = problem_of((1, 6), 2)
    hops, best = hop_counts((1, 6)), np.inf
    for order in itertools.permutations(range(6)):
        groups = np.reshape(order, (3, 2))
        if (groups[:, 0] > groups[:, 1]).any() or (np.diff(groups[:, 0]) < 0).any():
            continue
        fetched = max(sum(hops[list(group), node].min() for group in groups) for node in range(6))
        longest = max(hops[a, b] for a, b in groups)
        count = float(problem.counts[0, 0])
        best = min(best, 8192e-12 * (2 * fetched * count + 2 * longest * 256 / 2))
    bound = least_of_all_partitions(problem)
    assert bound.partitions == 15
    assert bound.distinct == 11  # 7 of them are their own mirror image
    assert bound.seconds == pytest.approx(best, rel=1e-5)
    assert sorted(bound.ring.ravel().tolist()) == list(range(6))


def test_too_many_partitions_are_refused():
    with pytest.raises(InputError, match="use a smaller mesh"):
        least_of_all_partitions(problem_of((4, 6), 4))
    with pytest.raises(InputError, match="without congestion"):
        least_of_all_partitions(problem_of(congested=True))


def test_the_bound_needs_equal_links():
    problem = problem_of()
    slower = eqx.tree_at(lambda p: p.topology.link_bandwidth, problem, replace_fn=lambda rate: rate.at[3].multiply(0.5))
    with pytest.raises(InputError, match="needs equal links"):
        least_of_all_partitions(slower)


def test_the_first_free_device_is_the_lowest_bit_not_set():
    np.testing.assert_array_equal(_first_free(np.array([0, 1, 5, 7])), [0, 1, 1, 3])
