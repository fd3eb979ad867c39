"""EPLB by hand, against plain loops, on NumPy and JAX alike, and against recorded answers; slots and shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.placement.eplb import eplb, packed, replicated
from jaxmoe.placement.placement import PlanError
from jaxmoe.placement.slots import (
    EMPTY,
    loads_of_slots,
    max_over_mean,
    new_copies,
    share_of_slots,
    slots_of_share,
)


def test_copies_go_to_the_heaviest_each():
    # 90 / 2 is still above 40, then 45 and 45 and 40: the third copy of expert 0 comes before the second of expert 2.
    np.testing.assert_array_equal(replicated(np.array([90.0, 10, 40]), 5), [0, 1, 2, 0, 0])


def test_heaviest_first_to_the_lightest_pack_with_a_place():
    # 9 to pack 0, 8 and 1 to pack 1, and what is left, 2, to pack 0, though pack 1 carries as much.
    np.testing.assert_array_equal(packed(np.array([9.0, 8, 2, 1]), 2), [0, 3, 1, 2])


def test_whole_groups_stay_on_a_node():
    slots = eplb(np.array([[8.0, 8, 1, 1, 2, 2, 7, 7]]), slots=12, devices=4, groups=4, nodes=2)
    of_node = [set((half // 2).tolist()) for half in slots.reshape(2, 6)]
    assert of_node == [{0, 1}, {3, 2}]  # the heaviest group with the lightest


@given(st.integers(0, 10**6), st.sampled_from([(8, 12, 4), (6, 6, 3), (5, 8, 8), (4, 16, 2)]))
def test_same_as_plain_loops_and_on_jax(seed, sizes):
    experts, slots, devices = sizes
    loads = np.random.default_rng(seed).permutation(1000)[: 2 * experts].reshape(2, experts).astype(np.float32)
    found = eplb(loads, slots, devices)
    for row, answer in zip(loads, found, strict=True):
        copies = [1] * experts
        for _ in range(slots - experts):
            copies[max(range(experts), key=lambda e: row[e] / copies[e])] += 1
        each = sorted((row[e] / copies[e] for e in range(experts) for _ in range(copies[e])), reverse=True)
        packs: list[list[float]] = [[] for _ in range(devices)]
        for load in each:
            min((p for p in packs if len(p) < slots // devices), key=sum).append(load)
        assert sorted(np.bincount(answer, minlength=experts)) == sorted(copies)
        np.testing.assert_allclose(
            sorted(loads_of_slots(answer[None], row[None], devices)[0]), sorted(map(sum, packs)), rtol=1e-5
        )
    compiled = jax.jit(eplb, static_argnums=(1, 2))(jnp.asarray(loads), slots, devices)
    np.testing.assert_array_equal(compiled, found)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((8, 3, 1, 1), "devices is 3, expected a divisor of the 8 slots"),
        ((4, 2, 1, 1), "slots is 4, expected at least one for each of the 6 experts"),
        ((8, 2, 4, 1), "groups is 4, expected a divisor of the 6 experts"),
        ((12, 4, 3, 3), "nodes is 3, expected a divisor of the 4 devices"),
    ],
)
def test_numbers_that_do_not_divide(numbers, text):
    with pytest.raises(PlanError, match=text):
        eplb(np.ones((1, 6)), *numbers)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_recorded_answers_are_reproduced(shared, every):
    """Recorded configurations of the published code, their balance within 2e-4."""
    files = sorted((shared / "reference" / "eplb").glob("eplb_*.npz"))
    assert files
    for path in files[::every]:
        with np.load(path) as recorded:
            loads = recorded["weight"].astype(float)
            for (slots, groups, nodes, devices), expected in zip(
                recorded["configs"].tolist(), recorded["max_over_mean"], strict=True
            ):
                found = eplb(loads, slots, devices, groups, nodes)
                balance = max_over_mean(loads_of_slots(found, loads, devices))
                np.testing.assert_allclose(balance, expected, atol=2e-4, err_msg=f"{path.name} {slots} {devices}")


# Slots and shares.


def test_shares_of_slots_and_back():
    slots = np.array([[0, 1, 1, EMPTY, 1, 2]])
    share = share_of_slots(slots, experts=3, nodes=3)
    np.testing.assert_allclose(share[0], [[1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]], rtol=1e-6)
    np.testing.assert_array_equal(slots_of_share(share, 2), [[0, 1, 1, EMPTY, 1, 2]])
    np.testing.assert_allclose(loads_of_slots(slots, np.array([[6.0, 9, 5]]), 3), [[9, 3, 8]])


def test_two_copies_on_a_node_serve_two_parts_of_three():
    share = share_of_slots(np.array([[0, 0, 1, 0]]), experts=2, nodes=2)
    np.testing.assert_allclose(share[0], [[2 / 3, 1 / 3], [0, 1]], rtol=1e-6)


def test_new_copies_are_those_that_were_not_held():
    moved = new_copies(np.array([[0, 1, 2, 0]]), np.array([[1, 0, 1, 2]]), experts=3, nodes=2)
    np.testing.assert_array_equal(np.argwhere(moved), [[0, 1, 1]])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: share_of_slots(np.array([[0, 1, 2]]), 3, 2), "3 slots for 2 nodes"),
        (lambda: share_of_slots(np.array([[0, 3]]), 3, 2), "holds expert 3, expected 0 to 2"),
        (lambda: share_of_slots(np.array([[0, 0]]), 2, 2), "no slot of layer 0 holds expert 1"),
        (lambda: slots_of_share(np.ones((1, 3, 1)), 2), "hosts 3 experts in layer 0, but has 2 slots"),
    ],
)
def test_wrong_slots(call, text):
    with pytest.raises(PlanError, match=text):
        call()
