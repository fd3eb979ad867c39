"""Token buckets of links, on cases worked by hand."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.des import fabric_of, replay_traffic
from jaxmoe.hardware import fully_connected

RATE, DELAY, BURST = 1e6, 2e-3, 3000.0


def one_message(size: float, chunk: float | None, burst: float | None = BURST) -> float:
    network = fully_connected(2, RATE, DELAY)
    if burst is not None:
        network = replace(network, link_burst=jnp.full(network.num_links, burst, jnp.float32))
    return replay_traffic(fabric_of(network, chunk), np.array([[0.0, size], [0.0, 0.0]])).completion_s


@pytest.mark.parametrize("chunk", [None, 1000.0, 700.0])
@pytest.mark.parametrize(
    ("size", "expected"),
    [(1000.0, DELAY), (3000.0, DELAY), (4000.0, DELAY + 1e-3), (13000.0, DELAY + 10e-3)],
)
def test_what_is_in_the_bucket_passes_at_once(size, expected, chunk):
    assert one_message(size, chunk) == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.floats(1.0, 1e5), st.sampled_from([None, 512.0]))
def test_a_bucket_without_room_changes_nothing_bit_for_bit(size, chunk):
    assert one_message(size, chunk, 0.0) == one_message(size, chunk, None)


def test_two_messages_share_one_bucket():
    # Nodes 0 and 1 send 2,000 B each over the one link from the switch to node 2: 3,000 of them at once.
    from jaxmoe.hardware import switch

    network = switch(3, RATE, 0.0)
    bursts = np.where(network.link_ends[:, 1] == 2, BURST, 1e9)  # links up to the switch never limit
    fabric = fabric_of(replace(network, link_burst=jnp.asarray(bursts, jnp.float32)), None)
    traffic = np.array([[0.0, 0.0, 2000.0], [0.0, 0.0, 2000.0], [0.0, 0.0, 0.0]])
    assert replay_traffic(fabric, traffic).completion_s == pytest.approx(1e-3, rel=1e-6)


def test_reversed_links_take_their_bursts_along():
    network = fully_connected(3, RATE, DELAY)
    bursts = jnp.arange(1.0, 1 + network.num_links)
    back = replace(network, link_burst=bursts).reversed()
    np.testing.assert_array_equal(back.link_burst, np.asarray(bursts)[np.asarray(network.reverse_links)])
