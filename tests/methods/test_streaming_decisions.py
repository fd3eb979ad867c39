"""Decisions for streaming experts: rings, trajectories, groups; and requests that wait, worked by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.arrays import floats, full

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.methods.expert_streaming.buffering import Buffering
from jaxmoe.methods.expert_streaming.trajectories import (
    groups_in_order,
    groups_with_first,
    loading_dies,
    moved_tokens,
    prefetched_slices,
    redistributed,
    ring_of,
    tokens_on_dies,
    trajectories,
)
from jaxmoe.traces import Batch

# Compiled whole, not operation by operation.
ordered = jax.jit(groups_in_order, static_argnums=1)
ordered_first = jax.jit(groups_with_first, static_argnums=2)
loading = jax.jit(loading_dies, static_argnums=1)
on_dies = jax.jit(tokens_on_dies, static_argnums=(1, 2))
evened, moved = jax.jit(redistributed), jax.jit(moved_tokens)
prefetched = jax.jit(prefetched_slices, static_argnames="paired")
trajectories_round = jax.jit(lambda tokens: trajectories(tokens, np.arange(tokens.shape[1])))


@partial(jax.jit, static_argnums=(1, 4), static_argnames="together")
def buffered(experts, num_experts, least, slack, spare=0, together=True):
    return Buffering(jnp.asarray(least), jnp.asarray(slack), spare, together).passes(experts, num_experts)


def mesh(shape: tuple[int, int]) -> Mesh:
    links = num_links(shape)
    return Mesh(full(links, 1.0), full(links, 0.0), shape=shape)


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (4, 4), (3, 4)])
def test_rings_close_between_neighbours_where_a_side_is_even(shape):
    ring = ring_of(mesh(shape))
    assert sorted(ring.tolist()) == list(range(shape[0] * shape[1]))
    hops = np.asarray(mesh(shape).hop_counts())
    assert (hops[ring, np.roll(ring, -1)] == 1).all()


def test_rings_of_odd_meshes_pass_every_die_once():
    assert sorted(ring_of(mesh((3, 3))).tolist()) == list(range(9))


def test_trajectories_skip_dies_without_tokens():
    tokens = floats([[1.0, 0, 2, 1], [1, 0, 2, 1], [0, 0, 3, 0]])
    needed, following = trajectories_round(tokens)
    np.testing.assert_array_equal(needed, [[1, 0, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0]])
    after = np.asarray(following).argmax(axis=-1)
    assert after[0].tolist() == [2, 2, 3, 0]
    assert after[1].tolist() == after[0].tolist()  # one ring on four dies (VI-A)
    assert after[2].tolist() == [2, 2, 2, 2]


def test_larger_arrays_have_rings_both_ways():
    tokens = floats([[1.0, 0, 2, 1, 0, 0], [1, 0, 2, 1, 0, 0]])
    after = np.asarray(trajectories_round(tokens).following).argmax(axis=-1)
    assert after[0].tolist() == [2, 2, 3, 0, 0, 0]
    assert after[1].tolist() == [3, 0, 0, 2, 3, 3]


def test_hot_and_cold_go_together():
    tokens = floats([[1.0], [9], [0], [5], [3], [4]])
    # By tokens: 1, 3, 5, 4, 0; expert 2 has none.
    assert ordered(tokens, True).tolist() == [[1, 0], [3, 4], [5, -1]]
    assert np.asarray(ordered(tokens, False))[:5, 0].tolist() == [0, 1, 3, 4, 5]


@given(seed=st.integers(0, 1000))
def test_every_expert_with_tokens_is_in_one_group(seed):
    tokens = np.random.default_rng(seed).poisson(0.5, (9, 4)).astype(np.float32)
    active = np.flatnonzero(tokens.any(axis=1)).tolist()
    for paired in (True, False):
        members = np.ravel(ordered(jnp.asarray(tokens), paired)).tolist()
        assert sorted(each for each in members if each in active) == active


def test_tokens_on_dies_and_even_ones():
    batch = Batch(
        experts=jnp.array([[0, 1], [0, 2], [0, 1], [1, 2]]),
        token_draw=full(4, 0.0),
        draw=full((4, 2), 0.0),
        weight=floats([1.0, 1, 1, 0]),
    )
    tokens = on_dies(batch, 3, 2)  # tokens 0 and 1 on die 0; the last one counts nothing
    np.testing.assert_array_equal(tokens, [[2, 1], [1, 1], [1, 0]])
    np.testing.assert_array_equal(evened(tokens), [[2, 1], [1, 1], [1, 0]])
    np.testing.assert_array_equal(evened(floats([[5.0, 0, 0]])), [[2, 2, 1]])
    np.testing.assert_array_equal(evened(floats([[0.0, 0, 1], [0, 3, 1]])), [[0, 0, 1], [1, 2, 1]])


def test_tokens_of_too_many_go_to_dies_of_too_few():
    before = floats([[5.0, 0, 0], [0, 0, 1]])
    # Die 0 sends two and one of expert 0; the lone token of expert 1 stays.
    np.testing.assert_allclose(moved(before, evened(before)), [[0, 2, 1], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(moved(before, before), 0)


def test_dies_prefetch_in_the_order_that_is_forecast():
    # Pairs of what is forecast: 0 with 3, then 2; expert 1 is not expected. Two micro-slices of each on every die.
    forecast, room = floats([5.0, 0, 3, 1]), floats([5.0, 2, 0])
    found = prefetched(forecast, room, jnp.asarray(2.0), paired=True)
    np.testing.assert_array_equal(found, [[2, 2, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0]])
    alone = prefetched(forecast, room, jnp.asarray(2.0), paired=False)
    np.testing.assert_array_equal(alone, [[2, 2, 0], [0, 0, 0], [2, 0, 0], [1, 0, 0]])


def test_experts_that_are_there_come_first():
    tokens = floats([[1.0], [9], [0], [5], [3], [4]])
    first = jnp.array([True, False, True, False, True, False])
    assert ordered_first(tokens, first, True).tolist() == [[4, 0], [-1, -1], [-1, -1], [1, 5], [3, -1], [-1, -1]]
    alone = np.ravel(ordered_first(tokens, first, False))
    assert alone[alone >= 0].tolist() == [0, 4, 1, 3, 5]


def test_dies_that_load():
    needed = floats([[1.0, 0, 1, 0]])
    np.testing.assert_allclose(loading(needed, True), 0.25)
    np.testing.assert_allclose(loading(needed, False), [[0.5, 0, 0.5, 0]])


# Algorithm 2. Choices [layer, step, request, 1], two layers.


def served(choices: list[list[list[int]]], least: float, slack: float, spare: int = 0) -> tuple[np.ndarray, np.ndarray]:
    experts = jnp.asarray(np.array(choices, np.int32)[..., None])
    found = buffered(experts, 4, jnp.asarray(least), jnp.asarray(slack), spare)
    return np.asarray(found.served).astype(int), np.asarray(found.finished)


def test_a_request_waits_when_it_has_earned_it_and_its_expert_is_cold():
    # Slack of a half: after two forward passes a request may wait once. Request 2 is alone with expert 1 in layer 1.
    same = [[[0, 0, 0]] * 4, [[0, 0, 1]] * 4]
    who, finished = served(same, least=2.0, slack=0.5)
    assert who[0].tolist() == [[1, 1, 1], [1, 1, 1]]  # nothing earned yet
    assert who[1].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert who[2].tolist() == [[1, 1, 1], [1, 1, 0]]  # waits at layer 1
    assert who[3].tolist() == [[1, 1, 0], [1, 1, 1]]  # goes on from there, its time spent
    assert finished.tolist() == [3, 3, 2, 3]


def test_without_slack_or_cold_experts_nobody_waits():
    same = [[[0, 0, 0]] * 4, [[0, 0, 1]] * 4]
    assert (served(same, least=2.0, slack=0.0)[0] == 1).all()
    assert (served(same, least=1.0, slack=0.5)[0] == 1).all()


def test_tokens_that_wait_meet_newcomers():
    # In iteration 2 request 0 waits at layer 1, and so is one of two for expert 1 when request 1 comes there.
    layer_0 = [[0, 0]] * 5
    layer_1 = [[0, 0], [0, 0], [1, 0], [0, 1], [0, 0]]
    who, _ = served([layer_0, layer_1], least=2.0, slack=0.5)
    assert who[2, 1].tolist() == [0, 0]  # each is alone with its expert, and both have earned it
    assert who[3, 1].tolist() == [1, 1]


def test_a_spare_request_takes_the_place_of_one_that_waits():
    # Two places, three requests in turns; in layer 1 place 1 is alone with expert 1, but in the last iteration.
    layer_1 = [[0, 1]] * 6 + [[1, 1]]
    who, finished = served([[[0, 0]] * 7, layer_1], least=2.0, slack=1.0, spare=1)
    assert who[0].tolist() == [[1, 1, 0], [1, 1, 0]]
    assert who[1].tolist() == [[1, 0, 1], [0, 0, 1]]  # 2 has waited longest and is in place 0; 0 has earned its wait
    # 0 goes on with expert 1, where it meets 2 in place 1; 1 in place 0 is alone with expert 0 and waits.
    assert who[2].tolist() == [[0, 1, 1], [1, 0, 1]]
    # Two passes begin in every iteration, and in the last nobody has to wait.
    assert finished.tolist() == [2, 1, 2, 2, 2, 2, 3]


def test_requests_that_did_not_come_together_do_not_wait_together():
    # Everybody is alone with an expert in every iteration, and has earned a wait after two passes.
    experts = jnp.asarray(np.broadcast_to(np.arange(4, dtype=np.int32)[:, None], (1, 4, 4, 1)))
    numbers = (4, jnp.asarray(2.0), jnp.asarray(0.5), 4)
    together = buffered(experts, *numbers, together=True)
    apart = buffered(experts, *numbers, together=False)
    assert together.finished.tolist() == [4, 4, 4, 4]  # nobody has had two passes before the last iteration
    # Of the four that began first 1 and 3 had had one; when they go on, 5 and 7 are with the same experts.
    assert apart.finished.tolist() == [4, 4, 2, 6]


def test_passes_keep_their_gating_while_they_wait():
    experts = jnp.array([[[[0], [0]], [[2], [2]], [[3], [3]]], [[[0], [1]], [[2], [1]], [[3], [3]]]])
    found = buffered(experts, 4, jnp.asarray(2.0), jnp.asarray(1.0), 1)
    went_on = np.asarray(found.began)[np.asarray(found.served)]
    steps = np.broadcast_to(np.arange(3)[:, None, None], found.served.shape)[np.asarray(found.served)]
    assert (went_on <= steps).all()
    assert (went_on < steps).any()
