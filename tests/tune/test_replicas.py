"""Copies of experts by load: the known optimum, never worse than EPLB, no copy twice on a rank, groups kept whole."""

import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.placement import PlanError
from jaxmoe.placement.slots import copies_of_slots, loads_of_slots, max_over_mean
from jaxmoe.tune.replica_moves import parts, relieved
from jaxmoe.tune.replica_windows import _forecasts, steady_slots, windows_to_come
from jaxmoe.tune.replicas import _busiest_pair, balanced_slots, paired_copies

TRAP = np.array([[600, 560, 120, 120, 20, 10, 10, 10.0]])  # EPLB ends at 232, the optimum is 196 2/3


def balance(slots: np.ndarray, loads: np.ndarray, ranks: int) -> np.ndarray:
    return max_over_mean(loads_of_slots(slots, loads, ranks))


def test_the_greedy_trap():
    assert loads_of_slots(eplb(TRAP, 16, 8), TRAP, 8).max() == pytest.approx(232)
    for repeats in (False, True):
        found = balanced_slots(TRAP, 16, 8, repeats=repeats)
        assert loads_of_slots(found, TRAP, 8).max() == pytest.approx(590 / 3)


def test_two_experts_by_hand():
    # 90 and 30 in four slots on two ranks: three copies of 30 and one of 30 are even.
    slots = balanced_slots(np.array([[90.0, 30.0]]), 4, 2, repeats=True)
    assert sorted(slots[0].tolist()) == [0, 0, 0, 1]
    # Each once on a rank at most: both on both.
    assert balanced_slots(np.array([[90.0, 30.0]]), 4, 2)[0].reshape(2, 2).sum(axis=1).tolist() == [1, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6), st.booleans(), st.booleans())
def test_all_experts_have_slots_and_none_is_worse_than_eplb(seed, experts, ranks, repeats, fast):
    rng = np.random.default_rng(seed)
    per_rank = -(-experts // ranks) + int(rng.integers(3))
    loads = rng.integers(0, 50, (3, experts)) ** 2.0
    slots = balanced_slots(loads, ranks * per_rank, ranks, repeats=repeats, fast=fast)
    copies = copies_of_slots(slots, experts, ranks)
    assert (copies.sum(axis=2) > 0).all()
    if not repeats and per_rank <= experts:
        assert copies.max() == 1
    if repeats:
        published = eplb(loads, ranks * per_rank, ranks)
        assert (balance(slots, loads, ranks) <= balance(published, loads, ranks) * (1 + 1e-9)).all()


def test_groups_stay_on_one_node():
    rng = np.random.default_rng(1)
    loads = rng.random((4, 16)) ** 3
    slots = balanced_slots(loads, 24, 8, groups=4, nodes=2)
    nodes = slots.reshape(4, 2, 12) // 4  # the group of every slot, by node
    for layer in nodes:
        assert not {*layer[0].tolist()} & {*layer[1].tolist()}
    assert (balance(slots, loads, 8) <= balance(eplb(loads, 24, 8, 4, 2), loads, 8) * (1 + 1e-9)).mean() > 0.5


@pytest.mark.parametrize("fast", [True, False])
def test_the_busiest_rank_of_a_layer_is_that_of_its_nodes_placed_alone(fast):
    # Nodes that have less to do end sooner, but none is busier for that.
    loads = np.random.default_rng(5).random((4, 16)) ** 3
    slots = balanced_slots(loads, 24, 8, groups=2, nodes=2, fast=fast)
    alone = [
        loads_of_slots(balanced_slots(part, 12, 4, fast=fast), part, 4).max(axis=1) for part in np.hsplit(loads, 2)
    ]
    np.testing.assert_allclose(loads_of_slots(slots, loads, 8).max(axis=1), np.maximum(*alone), rtol=1e-4)


def test_groups_count_for_nothing_on_one_node():
    loads = np.random.default_rng(6).random((2, 16))
    together = balanced_slots(loads, 24, 8, groups=4, nodes=1, fast=True)
    np.testing.assert_array_equal(together, balanced_slots(loads, 24, 8, fast=True))


def test_the_same_seed_gives_the_same_slots_and_layers_do_not_depend_on_each_other():
    loads = np.random.default_rng(2).random((5, 24)) ** 4
    slots = balanced_slots(loads, 32, 8, seed=3)
    np.testing.assert_array_equal(slots, balanced_slots(loads, 32, 8, seed=3))
    few = balanced_slots(loads[:2], 32, 8, seed=3)
    assert (balance(few, loads[:2], 8) <= balance(slots, loads, 8)[:2] * (1 + 1e-9)).all()  # it looks longer at few


def busy_of(held: np.ndarray, load: np.ndarray) -> np.ndarray:
    return loads_of_slots(held.reshape(1, -1).astype(int), load[None], len(held))[0]


def touched_top(held: np.ndarray, slots: list[tuple[int, int]], experts: list[int], load: np.ndarray) -> float:
    """The most that a rank has to do with experts in these slots, of the ranks that this changes; from scratch."""
    after = held.copy()
    for at, expert in zip(slots, experts, strict=True):
        after[at] = expert
    before, now = busy_of(held, load), busy_of(after, load)
    return now[~np.isclose(before, now, rtol=1e-12)].max()


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_all_moves_is_made(seed):
    """Of exchanges with the busiest rank, and further copies of its experts in place of others."""
    rng = np.random.default_rng(seed)
    load, copies = rng.gamma(0.7, 1, 9), rng.permutation([4, 2, 2, 2, 2, 1, 1, 1, 1])
    held = np.ascontiguousarray(np.repeat(np.arange(9), copies).reshape(4, 4).T, np.uint16)  # copies on different ranks
    count = copies_of_slots(held.reshape(1, -1).astype(int), 9, 4)[0].astype(np.int16)
    where = np.stack([np.resize(np.nonzero(row)[0], 6) for row in count]).astype(np.uint16)
    busy = busy_of(held, load)
    before, hot, tops = held.copy(), busy.argmax(), []
    for place, expert in enumerate(held[hot]):
        for rank, slot in np.ndindex(4, 4):
            old = held[rank, slot]
            if count[expert, rank]:
                continue
            if not count[old, hot] and load[old] / copies[old] < load[expert] / copies[expert]:
                tops.append(touched_top(held, [(hot, place), (rank, slot)], [old, expert], load))
            if copies[old] > 1 and copies[expert] < 4:
                tops.append(touched_top(held, [(rank, slot)], [expert], load))
    assert min(tops) < busy.max()
    assert relieved(load, copies, parts(load, copies), held, busy, count, where, False)
    changed = [*map(tuple, np.argwhere(before != held))]
    assert touched_top(before, changed, [held[at] for at in changed], load) == pytest.approx(min(tops))
    np.testing.assert_allclose(busy, busy_of(held, load))


def test_windows_count_each_by_itself():
    # Experts 0 and 1 take turns, 2 and 3 as well: on the sum all are alike, in every window one of each pair is busy.
    windows = np.array([[[9.0, 1, 9, 1]], [[1, 9, 1, 9]]])
    steady = steady_slots(windows, 4, 2)
    assert {frozenset(rank) for rank in steady.reshape(2, 2).tolist()} in (
        {frozenset({0, 1}), frozenset({2, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )
    for window in windows:
        assert balance(steady, window, 2) == 1


def test_windows_are_served_better_than_by_their_sum():
    rng = np.random.default_rng(0)
    windows = rng.gamma(0.5, 1, (8, 2, 24)) * rng.gamma(1, 1, (1, 2, 24))
    steady, summed = steady_slots(windows, 32, 8), balanced_slots(windows.sum(axis=0), 32, 8)
    copies = copies_of_slots(steady, 24, 8)
    assert copies.max() == 1
    assert (copies.sum(axis=2) > 0).all()
    of_each = [np.mean([balance(slots, window, 8) for window in windows]) for slots in (steady, summed)]
    assert of_each[0] < 0.97 * of_each[1]
    np.testing.assert_array_equal(steady, steady_slots(windows, 32, 8))


def drifting_windows(seed: int, kept: float) -> np.ndarray:
    """Shares whose logarithm forgets some of itself from window to window, [window, layer, expert]."""
    rng = np.random.default_rng(seed)
    log = rng.normal(size=(16, 3, 64))
    for window in range(1, 16):
        log[window] = kept * log[window - 1] + (1 - kept**2) ** 0.5 * log[window]
    return np.exp(0.5 * log)


def test_windows_that_vary_are_taken_as_they_are_and_drifting_ones_are_forecast():
    still = drifting_windows(0, 0.0)
    np.testing.assert_array_equal(windows_to_come(still), still)
    np.testing.assert_array_equal(windows_to_come(still[:3]), still[:3])
    drifting = drifting_windows(0, 0.9)
    forecast = windows_to_come(drifting[:8])
    assert forecast.shape == (3 + 14, 3, 64)
    np.testing.assert_allclose(forecast.sum(axis=2), 1)
    later = drifting[8:11] / drifting[8:11].sum(axis=2, keepdims=True)
    known = drifting[:8] / drifting[:8].sum(axis=2, keepdims=True)
    missed = [np.abs(later - each.mean(axis=0)).mean() for each in (forecast, known)]
    assert missed[0] < 0.9 * missed[1]


def test_a_forecast_by_hand():
    # Of two windows the first counts 0.3 and the second 1.
    told = _forecasts(np.array([[[0.2, 0.8]], [[1 / 3, 2 / 3]]]), 0.3)
    np.testing.assert_allclose(told[1, 0], [(0.3 * 0.2 + 1 / 3) / 1.3, (0.3 * 0.8 + 2 / 3) / 1.3])


def busiest_pair(load: np.ndarray, copies: np.ndarray, repeats: bool = True) -> float:
    return _busiest_pair(load / copies, copies, np.argsort(-load / copies), repeats)[0]


@pytest.mark.parametrize("seed", range(3))
def test_the_heaviest_copy_beside_the_lightest_is_the_best_pairing(seed):
    load, copies = np.random.default_rng(seed).gamma(0.7, 1, 4), np.array([3, 1, 1, 1])
    each = np.repeat(load / copies, copies)
    best = min(max(each[[*order[:3]]] + each[[*order[3:]]]) for order in permutations(range(6)))
    assert busiest_pair(load, copies) == pytest.approx(best)


def test_an_expert_beside_itself_changes_places_with_the_next_heavier_one():
    # 50, 20, 20 and 10: without repeats 20 goes beside 50 and 10, not beside 20.
    load, copies = np.array([50.0, 40, 10]), np.array([1, 2, 1])
    assert busiest_pair(load, copies) == 60
    assert busiest_pair(load, copies, repeats=False) == 70


def test_numbers_of_copies_for_two_slots_a_rank():
    # 60, 30 and 30 in four slots: with two copies of the first all four slots have 30.
    assert paired_copies(np.array([60.0, 30, 30]), np.array([1, 2, 1]), 2, 100, 3e-3, True).tolist() == [2, 1, 1]
    load, start = np.random.default_rng(0).gamma(0.5, 1, 40), np.full(40, 2)
    found = paired_copies(load, start, 30, 500, 3e-3, False)
    assert found.sum() == 80
    assert found.min() >= 1
    assert found.max() <= 30
    assert busiest_pair(load, found) < 0.8 * busiest_pair(load, start)


@pytest.mark.parametrize(
    ("slots", "ranks", "groups", "nodes", "expected"),
    [
        (8, 3, 1, 1, "8 slots do not divide by 3"),
        (4, 2, 1, 1, "4 slots cannot hold 6 experts"),
        (8, 4, 4, 4, "6 experts do not divide by 4"),
        (8, 2, 6, 3, "2 ranks do not divide by 3"),
    ],
)
def test_bad_numbers(slots, ranks, groups, nodes, expected):
    with pytest.raises(PlanError, match=expected):
        balanced_slots(np.ones((1, 6)), slots, ranks, groups, nodes)


@pytest.mark.slow
def test_recorded_loads_are_balanced_better_than_by_other_policies(shared):
    """Configurations of the published policies: never worse than EPLB, and better than FlashLB but for a few."""
    folder = shared / "reference" / "eplb"
    better = compared = 0
    for record in json.loads((folder / "index_policies.json").read_text()):
        slots, ranks = record["num_replicas"], record["num_gpus"]
        if record["policy"] != "flashlb" or "max_over_mean_mean" not in record or slots // ranks > 4:
            continue
        with np.load(folder / f"eplb_{record['case']}.npz") as file:
            loads = file["weight"].astype(float)
        compared += 1
        better += (
            balance(balanced_slots(loads, slots, ranks), loads, ranks).mean() <= record["max_over_mean_mean"] + 1e-6
        )
        # The same freedom as EPLB has: an expert may be twice on a rank.
        alike = balance(balanced_slots(loads, slots, ranks, repeats=True, fast=True), loads, ranks)
        assert (alike <= balance(eplb(loads, slots, ranks), loads, ranks) * (1 + 1e-9)).all(), record["case"]
    assert better >= 0.95 * compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "slots", "ranks", "most"),
    [
        # Fitted on the first half of the steps, judged on the others; what FlashLB reached.
        ("deepseek-v2-lite_summary", 96, 32, 1.4625),
        ("deepseek-v2-lite_summary", 64, 8, 1.1846),
        ("olmoe-1b-7b_alpaca_000-767", 96, 32, 1.4050),
        ("olmoe-1b-7b_alpaca_000-767", 72, 8, 1.1301),
    ],
)
def test_recorded_loads_that_change(shared, case, slots, ranks, most):
    with np.load(shared / "reference" / "eplb" / f"stages_{case}.npz") as file:
        windows = file["weight"].astype(float)
    half = len(windows) // 2
    steady = steady_slots(windows[:half], slots, ranks)
    assert np.mean([balance(steady, window, ranks).mean() for window in windows[half:]]) < most
