"""Round-robin dealing and Algorithm 1 against plain loops, choice by choice."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.arrays import floats, full
from oracles.wafer import algorithm_1, dealt

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.engine import FetchCosts
from jaxmoe.hardware.networks import hop_counts
from jaxmoe.methods import AllocationCosts, AllocationTask, AtHome, Dealt, GreedyAllocation, deal, widest

DRAM, HOP, REQUEST = 22_020_096_000, 29_560_128_000, 88_080_384  # fs: DeepSeek-V3 on dojo_5x5
DEAL = jax.jit(deal, static_argnums=(1, 2))
CASES = 12  # of each kind: over 100 in all
READINGS = [("overlapped", "homes", "ascending"), ("serial", "idle", "number"), ("overlapped", "idle", "number")]


def costs_of(hops, dram=DRAM, hop=HOP, request=REQUEST):
    """Dies and links that are alike."""
    dies = len(hops)
    return AllocationCosts(full(dies, float(dram)), floats(np.asarray(hops) * float(hop)), full(dies, float(request)))


def held_at(home, dies: int = 25) -> jax.Array:
    """Every expert at its home alone."""
    return jnp.asarray(np.asarray(home)[:, None] == np.arange(dies))


@eqx.filter_jit
def allocated(rule, *given):
    """What a rule decides, compiled once for all rules of these settings and shapes."""
    return rule(AllocationTask(*given))


def on(shape, **settings):
    hops = hop_counts(shape)
    return partial(allocated, GreedyAllocation(jnp.asarray(hops), costs_of(hops), **settings))


def case(rng, experts, shape):
    """Counts, homes and holders: homes dealt at random, and a few copies."""
    dies = shape[0] * shape[1]
    counts = np.floor(rng.gamma(1.0, rng.choice([15, 120, 600]), experts)).astype(int)
    home = rng.permutation(np.arange(experts) % dies)
    holders = (home[:, None] == np.arange(dies)) | (rng.random((experts, dies)) < rng.choice([0, 0.05]))
    return counts, home, holders


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (1, 1)])
@pytest.mark.parametrize(("block", "spare", "reading"), [(50, 4, 0), (50, 0, 1), (7, 1, 2)])
def test_every_choice_is_that_of_the_plain_loop(shape, block, spare, reading):
    dies, told = shape[0] * shape[1], dict(zip(("cost", "begin", "order"), READINGS[reading], strict=True))
    rng = np.random.default_rng(block + dies)
    with jax.enable_x64(True):
        wide = on(shape, block=block, spare=spare, **told)
        narrow = on(shape, block=block, spare=spare, neighbours=widest(hop_counts(shape)), **told)
        for _ in range(CASES):
            counts, home, holders = case(rng, 64, shape)
            plan = wide(jnp.asarray(counts), jnp.asarray(home), jnp.asarray(holders))
            numbers = (DRAM, HOP, REQUEST, block, spare, READINGS[reading])
            np.testing.assert_array_equal(plan, algorithm_1(counts, holders, home, hop_counts(shape), *numbers))
            alone = (jnp.asarray(counts), jnp.asarray(home), jnp.asarray(home[:, None] == np.arange(dies)))
            np.testing.assert_array_equal(narrow(*alone), wide(*alone))
    assert plan.shape == (64, dies)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.sampled_from([1, 5, 8]), st.sampled_from([7, 50]))
@settings(max_examples=60, deadline=None)
def test_dealing_is_block_after_block(counts, dies, block):
    padded = counts + [0] * (20 - len(counts))
    np.testing.assert_array_equal(DEAL(jnp.asarray(padded), dies, block), dealt(padded, dies, block))


def test_costs_add_up_in_double_precision_whatever_that_of_the_machine():
    machine = build_machine(load_hardware("configs/hardware/dojo_5x5.yaml"))
    with jax.enable_x64(True):
        costs = AllocationCosts.of(machine, FetchCosts(44040192.0, 88080384.0))
        assert {leaf.dtype for leaf in jax.tree.leaves(costs)} == {np.dtype("float64")}
        # On this machine an expert of FP8 takes as long to read as 250 requests to compute.
        assert costs.dram[0] == 250 * costs.request[0]
        assert costs.way[0, 3] == 3 * costs.way[0, 1] == 3 * round(float(costs.way[0, 1]))


def test_an_idle_machine_computes_at_home():
    home = jnp.asarray([12, 3])
    plan = np.asarray(on((5, 5))(jnp.asarray([40, 50]), home, held_at(home)))
    assert (plan[0, 12], plan[1, 3], plan.sum()) == (40, 50, 90)


def test_a_popular_expert_overflows_to_neighbours_alone():
    home = jnp.asarray([12])
    plan = np.asarray(on((5, 5), cost="serial")(jnp.asarray([5000]), home, held_at(home)))
    used = np.flatnonzero(plan[0])
    assert set(used) == {7, 11, 12, 13, 17}
    assert plan.sum() == 5000
    # The home has no hop to pay: it takes as many blocks more as a hop costs.
    assert plan[0, 12] - plan[0, 11] == pytest.approx(HOP / REQUEST, abs=50)


def test_allocation_maps_over_layers_and_costs_without_change():
    rng = np.random.default_rng(3)
    cases = [case(rng, 32, (5, 5)) for _ in range(4)]
    allocate = on((5, 5))
    one = [allocate(jnp.asarray(c), jnp.asarray(o), jnp.asarray(h)) for c, o, h in cases]
    counts, home, holders = (jnp.asarray(np.stack([each[part] for each in cases])) for part in range(3))
    many = jax.vmap(allocate)(counts, home, holders)
    np.testing.assert_array_equal(many, np.stack(one))


def test_few_requests_are_computed_at_home_and_many_overflow():
    """V-D: what memory bounds stays at home; of what compute bounds, only the most popular experts leave."""
    rng = np.random.default_rng(0)
    home = jnp.asarray(rng.permutation(np.arange(128) % 25))
    given_ = home, held_at(home)
    allocate, at_home = on((5, 5)), partial(allocated, AtHome())
    few = rng.poisson(100, 128)
    many = np.where(np.arange(128) == 7, 8000, few)
    few, many = jnp.asarray(few), jnp.asarray(many)
    np.testing.assert_array_equal(allocate(few, *given_), at_home(few, *given_))
    away = (np.asarray(allocate(many, *given_)) != np.asarray(at_home(many, *given_))).any(axis=1)
    assert away[7]
    assert away.sum() < 128 / 4


def test_what_the_llc_has_draws_requests():
    """Of two experts of one home, both of much compute, the one that its LLC has stays."""
    home = jnp.asarray([12, 12])
    hits = floats((np.arange(50) == 37).reshape(2, 25))  # of the second, at its home
    counts = jnp.asarray([260, 260])
    plan = np.asarray(on((5, 5), cost="serial")(counts, home, held_at(home), hits))
    assert plan[1, 12] == 260


def test_unlike_dies_cost_what_they_are():
    """A home of a slow die with fast neighbours gives them its work."""
    hops = hop_counts((1, 3))
    costs = costs_of(hops, dram=10, hop=1, request=1)
    slow = eqx.tree_at(lambda c: c.request, costs, floats([1.0, 100.0, 1.0]))
    given_ = jnp.asarray([100]), jnp.asarray([1]), jnp.asarray([[False, True, False]])
    for told, at in ((costs, [50, 50, 0]), (slow, [50, 0, 50])):
        rule = GreedyAllocation(jnp.asarray(hops), told, cost="serial", block=50)
        np.testing.assert_array_equal(np.asarray(allocated(rule, *given_))[0], at)


def test_a_base_of_whole_experts_deals_them_in_turn():
    """The study's sentence: equal numbers of experts for each die, wherever their weights are."""
    counts = jnp.asarray([3, 700, 1, 60, 5, 9, 2])
    plan = np.asarray(allocated(Dealt(split=1), counts, counts, full((7, 5), 0.0)))
    np.testing.assert_array_equal(np.argwhere(plan), [[expert, expert % 5] for expert in range(7)])
    np.testing.assert_array_equal(plan.sum(axis=1), counts)


def test_a_split_base_divides_every_expert_over_as_many_dies():
    counts = jnp.asarray([90, 4, 0, 1])
    plan = np.asarray(allocated(Dealt(split=3), counts, counts, full((4, 5), 0.0)))
    # 4 requests in parts of 2; the next expert goes on where the one before ended.
    np.testing.assert_array_equal(plan, [[30, 30, 30, 0, 0], [0, 0, 0, 2, 2], [0] * 5, [1, 0, 0, 0, 0]])
