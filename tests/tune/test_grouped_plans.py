"""Descents and local moves over groups of nodes."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_problem import EXPERTS, LAYERS, NODES, SETTINGS, small_problem

from jaxmoe.tune import descent, local_search, tune
from jaxmoe.tune.descent import GroupedPlan, TransportPlan, typical_part
from jaxmoe.tune.local_search import Places, search_of
from jaxmoe.tune.problem import BRIM

HALVES = jnp.asarray([0, 0, 1, 1])
SINGLE = jnp.arange(NODES)


def assert_by_pace(share: np.ndarray, pace: np.ndarray) -> None:
    """The nodes of each half hold in proportion to their pace."""
    for one, other in ((0, 1), (2, 3)):
        np.testing.assert_allclose(share[..., one] * pace[other], share[..., other] * pace[one], rtol=1e-4)


def numbers(temperature: float = 0.5, spread: float = 0.2) -> tuple[jax.Array, ...]:
    return jnp.asarray(temperature, jnp.float32), jnp.asarray(spread, jnp.float32)


@given(st.integers(0, 2**32 - 1))
def test_nodes_of_a_group_hold_the_same_and_groups_their_even_part(seed):
    rng = np.random.default_rng(seed)
    frequency = jnp.asarray(rng.dirichlet(np.ones(EXPERTS)) + 1e-3, jnp.float32)
    frequency /= frequency.sum()
    logits = jnp.asarray(rng.normal(0, 0.5, (EXPERTS, NODES)), jnp.float32)
    plan = GroupedPlan(logits, jnp.zeros(NODES), HALVES)
    share = np.asarray(plan.share(frequency, jnp.full(NODES, 1 / NODES), *numbers()))
    np.testing.assert_array_equal(share[:, 0], share[:, 1])
    np.testing.assert_array_equal(share[:, 2], share[:, 3])
    np.testing.assert_allclose(share.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(frequency) @ share, 1 / NODES, rtol=0.02)


def test_nodes_of_a_group_hold_by_their_pace():
    frequency = jnp.asarray([0.5, 0.3, 0.2])
    plan = GroupedPlan(jnp.zeros((3, NODES)), jnp.zeros(NODES), HALVES)
    share = np.asarray(plan.share(frequency, jnp.asarray([0.3, 0.1, 0.4, 0.2]), *numbers(1.0)))
    np.testing.assert_allclose(share[:, 0], 3 * share[:, 1], rtol=1e-5)
    np.testing.assert_allclose(share[:, 2], 2 * share[:, 3], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(frequency) @ share, [0.3, 0.1, 0.4, 0.2], rtol=1e-2)


def test_single_nodes_as_groups_are_the_plan_without_groups():
    rng = np.random.default_rng(0)
    frequency = jnp.asarray(rng.dirichlet(np.ones(EXPERTS)), jnp.float32)
    part = jnp.asarray([0.4, 0.3, 0.2, 0.1])
    plan = TransportPlan(
        jnp.asarray(rng.normal(size=(EXPERTS, NODES)), jnp.float32), jnp.asarray(rng.normal(size=NODES))
    )
    grouped = GroupedPlan(plan.logits, plan.budget, SINGLE)
    given = frequency, part, *numbers()
    np.testing.assert_allclose(grouped.share(*given), plan.share(*given), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(grouped.typical_part(frequency, NODES), plan.typical_part(frequency, NODES))


def test_an_expert_that_fills_a_group_of_two_fills_half_of_each_node():
    frequency = jnp.asarray([0.5, 0.25, 0.25])
    plan = GroupedPlan(jnp.zeros((3, NODES)), jnp.zeros(NODES), HALVES)
    np.testing.assert_allclose(plan.typical_part(frequency, NODES), [0.5, 0.5, 0.5])
    np.testing.assert_allclose(typical_part(frequency, NODES), [0.5, 1, 1])


def test_starts_over_different_groups_descend_together():
    problem = small_problem()
    land = descent.landscape(problem, 0.2, 0.05)
    group = np.broadcast_to(np.stack([SINGLE, HALVES]), (LAYERS, 2, NODES))
    lean = np.zeros((LAYERS, 2, EXPERTS, NODES))
    state = descent.start_in_groups(problem, group, lean, seed=0)
    batches = descent.segment_batches(problem, 2, seed=0)
    batches = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), batches)
    steady = {"temperature": (0.3, 0.3), "width": (0.3, 0.3), "max_temperature": (0.05, 0.05)}
    moved, seconds = descent.descend(land, state, batches, descent.schedule(0, 50, steady))
    assert (np.asarray(seconds)[-1] < 0.99 * np.asarray(seconds)[0]).all()
    np.testing.assert_array_equal(moved.plans.group, group)
    shares = np.asarray(descent.relaxed_shares(land, moved.plans, jnp.float32(0.3)))
    assert_by_pace(shares[:, 1], problem.pace)
    assert (shares[:, 0, :, 0] != shares[:, 0, :, 1]).any()


def test_a_start_leans_to_the_plan_that_it_is_given():
    problem, group = small_problem(), np.broadcast_to(HALVES, (LAYERS, 1, NODES))
    lean = np.zeros((LAYERS, 1, EXPERTS, NODES))
    lean[:, :, ::2, :2], lean[:, :, 1::2, 2:] = 0.5, 0.5
    land = descent.landscape(problem, 0.2, 0.05)
    state = descent.start_in_groups(problem, group, lean, seed=0)
    shares = np.asarray(descent.relaxed_shares(land, state.plans, jnp.float32(0.3)))
    assert ((shares * (lean > 0)).sum(axis=-1) > 0.7).mean() > 0.9


def test_moves_between_groups_keep_experts_by_pace_inside_and_groups_within_their_room():
    problem = small_problem(room=EXPERTS / NODES + 0.5)
    dealt = np.zeros((LAYERS, 1, EXPERTS, NODES), np.float32)
    dealt[:, :, ::2, :2], dealt[:, :, 1::2, 2:] = 0.5, 0.5
    group = jnp.broadcast_to(HALVES, (LAYERS, 1, NODES))
    hot = jnp.full(local_search.SEGMENT, 1.0, jnp.float32)
    shares, costs = local_search.improve(
        search_of(problem), jnp.asarray(dealt), problem.draw(4, 0), hot, jr.key(0), group=group
    )
    shares = np.asarray(shares)
    assert not np.array_equal(shares, dealt)
    assert_by_pace(shares, problem.pace)
    assert (shares.sum(axis=2) <= problem.room * BRIM).all()
    seconds = local_search.seconds_of_all(search_of(problem), jnp.asarray(shares[:, 0]), problem.draw(4, 0))
    np.testing.assert_allclose(np.asarray(seconds).mean(axis=1), costs[:, 0], rtol=1e-5)


def test_places_are_full_when_a_node_is_and_have_the_mean_distance_of_their_nodes():
    search = search_of(small_problem(room=np.array([1.0, 2.0, 4.0, 8.0])))
    search = search._replace(pace=jnp.asarray([0.4, 0.1, 0.25, 0.25]))
    places = Places.of(search, HALVES)
    np.testing.assert_allclose(places.spread[:2], [[0.8, 0.2, 0, 0], [0, 0, 0.5, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(places.room, [1 / 0.8, 4 / 0.5, 0, 0])
    places = Places.of(search._replace(pace=jnp.full(NODES, 1 / NODES)), HALVES)
    np.testing.assert_allclose(places.room, [2, 8, 0, 0])
    hops = np.asarray(search.hops)
    assert float(places.hops[0, 1]) == pytest.approx(hops[:2, 2:].mean())


@pytest.mark.parametrize("left_out", [{"restarts": 0}, {"refine_steps": 0}, {"descent_cuts": 0}])
def test_every_part_of_tuning_can_be_left_out(left_out):
    problem = small_problem()
    result = tune(problem, dataclasses.replace(SETTINGS, steps=25, **left_out))
    assert result.share.shape == (LAYERS, EXPERTS, NODES)
    np.testing.assert_allclose(result.share.sum(axis=2), 1, rtol=1e-5)
    assert ("relaxed" in result.stages) == (left_out != {"restarts": 0})
