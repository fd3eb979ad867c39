"""Algorithm 1 of moentwine: by hand, and against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.methods.moentwine.shadow_slots import fill_shadow_slots, kept_in_place

FILL = jax.jit(fill_shadow_slots, static_argnums=4)
LINE = np.abs(np.arange(4)[:, None] - np.arange(4)).astype(np.float32)  # hops of four devices in a row


def fill(loads, native, resident, choice, distance=LINE):
    given = (np.asarray(loads, np.float32), np.asarray(native), np.asarray(resident), distance)
    return np.asarray(FILL(*map(jnp.asarray, given), choice)).tolist()


EMPTY = [[-1]] * 4


def test_the_nearest_cool_device_gets_the_hottest_expert():
    # 12 becomes 6 and 6; device 1 would have 2 + 6 = 8. Then 8 on device 1: its hottest is expert 0 again, which can be
    # cooled to 4 on the third device, and so on while a slot is left.
    assert fill([12, 2, 1, 0], [[0], [1], [2], [3]], EMPTY, "nearest") == [[-1], [0], [0], [0]]


def test_the_coldest_device_gets_it_without_a_look_at_hops():
    # Only one slot is of use: afterwards devices 0 and 3 have 6 each, and no other is hotter than what they would get.
    assert fill([12, 7, 7, 0], [[0], [1], [2], [3]], EMPTY, "coldest") == [[-1], [-1], [-1], [0]]
    # Nearest: device 1 would be 13, above 12, and so would device 2.
    assert fill([12, 7, 7, 0], [[0], [1], [2], [3]], EMPTY, "nearest") == [[-1], [-1], [-1], [0]]


def test_a_resident_copy_comes_before_a_nearer_device():
    loads, native = [12, 1, 1, 5.5], [[0], [1], [2], [3]]
    assert fill(loads, native, EMPTY, "nearest")[1] == [0]
    # Device 3 would be 5.5 + 6 = 11.5, still below 12, and has the weights.
    assert fill(loads, native, [[-1], [-1], [-1], [0]], "nearest")[3] == [0]


def test_no_slots_and_no_load_change_nothing():
    assert fill([0, 0, 0, 0], [[0], [1], [2], [3]], EMPTY, "nearest") == EMPTY
    assert fill([9, 1, 1, 1], [[0], [1], [2], [3]], np.zeros((4, 0), int), "nearest") == [[]] * 4


def test_resident_experts_keep_their_slots():
    wanted, resident = jnp.array([[5, 7, -1], [1, -1, -1]]), jnp.array([[-1, 9, 5], [4, 1, 2]])
    np.testing.assert_array_equal(kept_in_place(wanted, resident), [[7, -1, 5], [-1, 1, -1]])


def by_loops(loads, native, resident, distance, choice):
    """Algorithm 1, read as in the docstring, device by device."""
    nodes, slots = resident.shape
    holds = [list(row[row >= 0]) for row in native]
    shadow: list[list[int]] = [[] for _ in range(nodes)]
    copies = np.ones(len(loads))
    while True:
        heat = [sum(loads[e] / copies[e] for e in holds[d] + shadow[d]) for d in range(nodes)]
        hot = int(np.argmax(heat))
        source = max(holds[hot] + shadow[hot], key=lambda e: loads[e] / copies[e])
        cold = [
            d
            for d in range(nodes)
            if heat[d] + loads[source] / (copies[source] + 1) < heat[hot] * (1 - 1e-6)
            and len(shadow[d]) < slots
            and source not in holds[d] + shadow[d]
        ]
        if not cold:
            return shadow
        if choice == "coldest":
            chosen = min(cold, key=lambda d: heat[d])
        else:
            chosen = min(cold, key=lambda d: (-1 if source in resident[d] else distance[hot, d], heat[d]))
        shadow[chosen].append(source)
        copies[source] += 1


@pytest.mark.parametrize("choice", ["nearest", "coldest"])
@given(seed=st.integers(0, 10**6))
def test_same_as_plain_loops(seed, choice):
    rng = np.random.default_rng(seed)
    x, y = np.indices((2, 3)).reshape(2, -1)
    distance = (abs(x[:, None] - x) + abs(y[:, None] - y)).astype(np.float32)
    loads = np.round(rng.gamma(0.7, 100, 12)) + rng.random(12) * 0.5
    native = rng.permutation(12).reshape(6, 2)
    resident = np.stack([rng.permutation(12)[:2] for _ in range(6)])
    found = fill(loads, native, resident, choice, distance)
    expected = by_loops(loads.astype(np.float32), native, resident, distance, choice)
    assert [sorted(e for e in row if e >= 0) for row in found] == [sorted(row) for row in expected]
    copies = 1 + np.bincount([e for row in found for e in row if e >= 0], minlength=12)

    def hottest(shadow):
        return max(sum(loads[e] / copies[e] for e in [*native[d], *shadow[d]] if e >= 0) for d in range(6))

    assert hottest(found) <= loads[native].sum(axis=1).max() * (1 + 1e-6)
