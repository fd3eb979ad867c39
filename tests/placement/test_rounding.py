"""Rounding of shares, and their division over given hosts, against the best of a grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import cases

from jaxmoe.placement import PlanError
from jaxmoe.placement.rounding import fit_memory, fit_slots, is_even, keep_hosts, rebalance

seeds = st.integers(0, 2**32 - 1)
UNLIMITED = np.full(4, np.inf)


def test_small_parts_go_to_the_other_hosts_in_proportion():
    kept = keep_hosts(np.array([[0.6, 0.3, 0.1, 0.0], [0.6, 0.3, 0.1, 0.0]]), np.array([0.2, 0.05]))
    np.testing.assert_allclose(kept, [[2 / 3, 1 / 3, 0, 0], [0.6, 0.3, 0.1, 0.0]])


def test_a_part_of_the_least_size_is_kept():
    np.testing.assert_array_equal(keep_hosts(np.array([[0.75, 0.25]]), np.array([0.25])), [[0.75, 0.25]])


def test_the_largest_part_is_kept_however_small():
    kept = keep_hosts(np.array([[0.2, 0.3, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]), np.array([0.5, 0.5]))
    np.testing.assert_allclose(kept, [[0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25]])


def test_plans_are_rounded_each_for_itself():
    share = np.random.default_rng(0).dirichlet(np.full(4, 0.5), (2, 3, 5))
    least = np.random.default_rng(1).uniform(0, 0.5, (2, 3, 5))
    together = keep_hosts(share, least)
    for plan in np.ndindex(2, 3):
        np.testing.assert_array_equal(together[plan], keep_hosts(share[plan], least[plan]))


def slowest(share, counts, seconds):
    """Mean over batches of the slowest node's seconds."""
    return (seconds * (counts @ share)).max(axis=1).mean()


@given(seeds, st.booleans())
def test_rebalanced_shares_are_never_slower_and_use_no_other_host(seed, limited):
    rng = np.random.default_rng(seed)
    share = cases.random_share(rng, 6, 4, hosts=4)
    counts = rng.poisson(rng.uniform(1, 20, 6), (5, 6)) + 1.0
    seconds = rng.uniform(0.5, 2, 4) * 1e-6
    room = share.sum(axis=0) if limited else UNLIMITED
    balanced = rebalance(share > 0, counts, seconds, room)
    assert slowest(balanced, counts, seconds) <= slowest(share, counts, seconds) * (1 + 1e-6)
    assert not balanced[share == 0].any()
    assert (balanced >= 0).all()
    np.testing.assert_allclose(balanced.sum(axis=1), 1, rtol=1e-9)
    assert (balanced.sum(axis=0) <= room + 1e-5).all()


@pytest.mark.parametrize("limits", [[np.inf, np.inf, np.inf], [0.45, np.inf, np.inf], [0.8, 0.8, 0.9]])
@pytest.mark.parametrize("seed", range(3))
def test_rebalanced_shares_equal_the_best_of_a_fine_grid(seed, limits):
    # Expert 0 lives on nodes 0 and 1, expert 1 on nodes 1 and 2: two numbers to choose.
    rng = np.random.default_rng(seed)
    counts, seconds, room = rng.integers(1, 30, (4, 2)).astype(float), rng.uniform(0.5, 2, 3), np.array(limits)
    first, second = (part.ravel() for part in np.meshgrid(*[np.linspace(0, 1, 401)] * 2))
    held = np.stack([first, 1 - first + second, 1 - second])  # experts of each node
    work = counts[:, :1, None] * np.stack([first, 1 - first, 0 * first])
    work = work + counts[:, 1:, None] * np.stack([0 * second, second, 1 - second])
    times = (work * seconds[:, None]).max(axis=1).mean(axis=0)
    best = times[(held <= room[:, None] + 1e-9).all(axis=0)].min()
    share = rebalance(np.array([[1, 1, 0], [0, 1, 1]], bool), counts, seconds, room)
    assert (share.sum(axis=0) <= room + 1e-6).all()
    measured = slowest(share, counts, seconds)
    # Beside the optimum by a grid step, either share is slower by at most that part of its whole work.
    assert measured <= best * (1 + 1e-6)
    assert measured >= best - counts.sum(axis=1).mean() * seconds.max() / 400


def test_work_is_divided_by_speed_and_not_by_count():
    share = rebalance(np.ones((1, 2), bool), np.array([[6.0]]), np.array([1.0, 2.0]), np.full(2, np.inf))
    np.testing.assert_allclose(share, [[2 / 3, 1 / 3]], rtol=1e-6)


def test_hosts_without_room_for_their_experts_are_refused():
    support, counts = np.array([[1, 0], [1, 0]], bool), np.ones((3, 2))
    with pytest.raises(PlanError, match="no division of the experts over these hosts"):
        rebalance(support, counts, np.ones(2), np.array([1.5, 5.0]))
    np.testing.assert_array_equal(rebalance(support, counts, np.ones(2), np.array([2.0, 5.0])), support)


def test_hosts_that_are_full_to_the_last_bit_are_accepted():
    # Two experts' bytes in single precision may be a little less than twice one's.
    room = np.array([2 * (1 - 2.0**-24), np.inf])
    support = np.array([[1, 0], [1, 0], [0, 1]], bool)
    np.testing.assert_array_equal(rebalance(support, np.ones((3, 3)), np.ones(2), room), support)


@given(seeds, st.sampled_from([1.0, 1.05, 2.0]))
def test_a_plan_made_to_fit_fits(seed, slack):
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(4, 0.3), 7)
    room = rng.uniform(0.5, 1.5, 4)
    room *= slack * 7 / room.sum()
    kept = fit_memory(share, room)
    assert (kept >= 0).all()
    np.testing.assert_allclose(kept.sum(axis=1), 1, rtol=1e-9)
    assert (kept.sum(axis=0) <= room * (1 + 1e-5)).all()


def test_no_more_moves_than_has_to():
    # Node 0 is asked to hold 2.5 experts and has room for 2: half an expert has to go.
    share = np.array([[1.0, 0], [0.9, 0.1], [0.6, 0.4]])
    kept = fit_memory(share, np.array([2.0, np.inf]))
    assert kept[:, 0].sum() == pytest.approx(2.0, rel=2e-6)
    assert np.abs(kept - share).sum() / 2 == pytest.approx(0.5, rel=1e-5)


def test_a_plan_of_whole_experts_that_fits_is_kept():
    share = np.eye(4)[[0, 0, 2, 3, 1, 2]]
    for room in ([2, 1, 2, 1], [3, 2, 2, 4], [np.inf] * 4):
        np.testing.assert_array_equal(fit_memory(share, np.array(room, float)), share)


def test_a_plan_of_divided_experts_that_fits_is_kept():
    share = np.array([[0.6, 0.4], [0.3, 0.7]])
    np.testing.assert_allclose(fit_memory(share, np.array([2.0, 2.0])), share)


def test_more_experts_than_room_are_refused():
    with pytest.raises(PlanError, match="5 experts do not fit"):
        fit_memory(np.full((5, 4), 0.25), np.full(4, 1.2))


def test_the_largest_shares_get_the_slots_by_hand():
    # Expert 0 comes first and takes node 0, then expert 1 node 1; node 0 is then full, and 1 has a slot for expert 2.
    share = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    np.testing.assert_allclose(fit_slots(share, np.array([1.0, 2.9])), [[1, 0], [0, 1], [0, 1]])
    # With a slot more on node 0 expert 2 moves there, and expert 1 (0.2) has no place left on it.
    np.testing.assert_allclose(fit_slots(share, np.array([2.0, 1.0])), [[1, 0], [0, 1], [1, 0]])
    # Four slots: the largest part that had none is 0.3 of expert 2 on node 1.
    np.testing.assert_allclose(fit_slots(share, np.array([2.0, 2.0])), [[1, 0], [0, 1], [0.7, 0.3]])


def test_replicas_that_fit_are_kept():
    share = np.array([[0.5, 0.5, 0], [0, 0, 1], [0, 0.25, 0.75]])
    np.testing.assert_allclose(fit_slots(share, np.full(3, np.inf)), share)
    np.testing.assert_allclose(fit_slots(share, np.array([1.0, 2.0, 2.0])), share)


@given(seeds, st.sampled_from([0, 3, 20]))
def test_replicas_made_to_fit_fit_and_every_expert_has_a_host(seed, spare):
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(4, 0.3), 7)
    share[share < 0.05] = 0
    share /= share.sum(axis=1, keepdims=True)
    slots = 1 + rng.multinomial(3 + spare, np.full(4, 0.25))
    room = slots + rng.uniform(0, 0.9, 4)
    kept = fit_slots(share, room)
    assert ((kept > 0).sum(axis=0) <= slots).all()
    np.testing.assert_allclose(kept.sum(axis=1), 1, rtol=1e-9)
    # Whoever has more than one host had a share at each of them.
    several = (kept > 0).sum(axis=1) > 1
    assert (share[several] > 0)[kept[several] > 0].all()


def test_more_experts_than_slots_are_refused():
    with pytest.raises(PlanError, match="5 experts do not fit 4 slots; raise the memory capacity"):
        fit_slots(np.full((5, 4), 0.25), np.full(4, 1.9))


def test_work_is_even_where_dividing_it_anew_gains_nothing():
    counts, seconds = np.array([[4.0, 2.0], [0.0, 6.0]]), np.array([1.0, 2.0])
    ideal = np.array([[2 / 3, 1 / 3]] * 2)  # every batch: two thirds of the work on the node that is twice as fast
    assert is_even(ideal, counts, seconds)
    assert not is_even(np.eye(2), counts, seconds)
