"""Round-robin dealing and Algorithm 1 against plain loops, choice by choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.wafer import algorithm_1, dealt

from jaxmoe.hardware.networks import hop_counts
from jaxmoe.policies import AllocationCosts, allocate, deal, widest

DRAM, HOP, REQUEST = 22_020_096_000, 29_560_128_000, 88_080_384  # fs: DeepSeek-V3 on dojo_5x5
DEAL = jax.jit(deal, static_argnums=(1, 2))
CASES = 12  # of each kind: over 100 in all
COSTS = AllocationCosts(float(DRAM), float(HOP), float(REQUEST))


def case(rng, experts, shape):
    """Counts, homes and holders: homes dealt at random, and a few copies."""
    dies = shape[0] * shape[1]
    counts = np.floor(rng.gamma(1.0, rng.choice([15, 120, 600]), experts)).astype(int)
    home = rng.permutation(np.arange(experts) % dies)
    holders = (home[:, None] == np.arange(dies)) | (rng.random((experts, dies)) < rng.choice([0, 0.05]))
    return counts, home, holders


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (1, 1)])
@pytest.mark.parametrize(("block", "spare"), [(50, 4), (50, 0), (7, 1)])
def test_every_choice_is_that_of_the_plain_loop(shape, block, spare):
    dies = shape[0] * shape[1]
    rng = np.random.default_rng(block + dies)
    with jax.enable_x64(True):
        costs = AllocationCosts(float(DRAM), float(HOP), float(REQUEST))
        for _ in range(CASES):
            counts, home, holders = case(rng, 64, shape)
            given_ = (jnp.asarray(counts), jnp.asarray(holders), jnp.asarray(home), jnp.asarray(hop_counts(shape)))
            plan = allocate(*given_, costs, block, spare)
            expected = algorithm_1(counts, holders, home, hop_counts(shape), DRAM, HOP, REQUEST, block, spare)
            np.testing.assert_array_equal(plan, expected)
            alone = jnp.asarray(home[:, None] == np.arange(dies))
            wide = allocate(given_[0], alone, *given_[2:], costs, block, spare)
            narrow = allocate(given_[0], alone, *given_[2:], costs, block, spare, neighbours=widest(hop_counts(shape)))
            np.testing.assert_array_equal(narrow, wide)
    assert plan.shape == (64, dies)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.sampled_from([1, 5, 8]), st.sampled_from([7, 50]))
@settings(max_examples=60, deadline=None)
def test_dealing_is_block_after_block(counts, dies, block):
    padded = counts + [0] * (20 - len(counts))
    np.testing.assert_array_equal(DEAL(jnp.asarray(padded), dies, block), dealt(padded, dies, block))


def test_an_idle_machine_computes_at_home():
    home = jnp.asarray([12, 3])
    holders = home[:, None] == jnp.arange(25)
    plan = allocate(jnp.asarray([40, 50]), holders, home, jnp.asarray(hop_counts((5, 5))), COSTS)
    assert (plan[0, 12], plan[1, 3], plan.sum()) == (40, 50, 90)


def test_a_popular_expert_overflows_to_neighbours_alone():
    home = jnp.asarray([12])
    plan = np.asarray(
        allocate(jnp.asarray([5000]), home[:, None] == jnp.arange(25), home, jnp.asarray(hop_counts((5, 5))), COSTS)
    )
    used = np.flatnonzero(plan[0])
    assert set(used) == {7, 11, 12, 13, 17}
    assert plan.sum() == 5000
    # The home has no hop to pay: it takes as many blocks more as a hop costs.
    assert plan[0, 12] - plan[0, 11] == pytest.approx(HOP / REQUEST, abs=50)


def test_allocation_maps_over_layers_and_costs_without_change():
    rng = np.random.default_rng(3)
    cases = [case(rng, 32, (5, 5)) for _ in range(4)]
    hops = jnp.asarray(hop_counts((5, 5)))
    one = [allocate(jnp.asarray(c), jnp.asarray(h), jnp.asarray(o), hops, COSTS) for c, o, h in cases]
    counts, home, holders = (jnp.stack([jnp.asarray(each[part]) for each in cases]) for part in range(3))
    many = jax.vmap(lambda c, h, o: allocate(c, h, o, hops, COSTS))(counts, holders, home)
    np.testing.assert_array_equal(many, jnp.stack(one))
