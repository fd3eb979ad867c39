"""Replayed traffic on cases worked by hand."""

import dataclasses
import inspect

import numpy as np
import pytest
from oracles.arrays import full
from oracles.topologies import mesh

from jaxmoe.des import Fabric, TrafficReplay, fabric_of, replay_traffic
from jaxmoe.hardware import ring, switch


def messages(nodes: int, *sent: tuple[int, int, float]) -> np.ndarray:
    """Bytes [source, destination]."""
    traffic = np.zeros((nodes, nodes))
    for source, destination, size in sent:
        traffic[source, destination] = size
    return traffic


def star(chunk_bytes: float | None = None, cut_through: bool = False) -> Fabric:
    """Three nodes at a switch, 1 B/s and no latency: links 0..2 up from each node, links 3..5 down to it."""
    return fabric_of(switch(3, 1.0, 0.0), chunk_bytes, cut_through)


FROM_1 = messages(3, (1, 0, 4.0), (1, 2, 2.0))


def test_staggered_messages_go_round_the_nodes():
    replay = replay_traffic(star(), FROM_1)
    # To 2: up 0..2, down 2..4. To 0: up 2..6, down 6..10.
    np.testing.assert_array_equal(replay.received_s, [10.0, 0.0, 4.0])
    assert replay.completion_s == 10.0
    np.testing.assert_array_equal(replay.link_busy, [0.0, 6.0, 0.0, 4.0, 0.0, 2.0])


def test_messages_by_destination_go_in_the_order_of_the_nodes():
    replay = replay_traffic(star(), FROM_1, order="by_destination")
    # To 0: up 0..4, down 4..8. To 2: up 4..6, down 6..8.
    np.testing.assert_array_equal(replay.received_s, [8.0, 0.0, 8.0])
    np.testing.assert_array_equal(replay.link_busy, [0.0, 6.0, 0.0, 4.0, 0.0, 2.0])


def test_cut_through_takes_the_second_hop_at_once():
    replay = replay_traffic(star(cut_through=True), FROM_1)
    np.testing.assert_array_equal(replay.received_s, [6.0, 0.0, 2.0])


def test_a_node_has_received_when_its_last_message_is_there():
    replay = replay_traffic(star(), messages(3, (0, 1, 2.0), (2, 1, 3.0), (1, 0, 1.0)))
    # Up 0..2 from 0 and 0..3 from 2; down to 1 in 2..4 and 4..7. To 0: up 0..1, down 1..2.
    np.testing.assert_array_equal(replay.received_s, [2.0, 7.0, 0.0])
    assert replay.completion_s == 7.0


def test_chunks_of_two_sources_take_turns():
    replay = replay_traffic(star(chunk_bytes=2.0), messages(3, (0, 1, 4.0), (2, 1, 3.0)))
    # Down to 1: 0's first chunk 2..4, 2's first 4..6, then 2's second, of 1 B, there at 3, 6..7, and 0's 7..9.
    np.testing.assert_array_equal(replay.received_s, [0.0, 9.0, 0.0])
    np.testing.assert_array_equal(replay.run.finish, [9.0, 7.0])


def test_ports_and_end_points_take_their_time():
    ports = {"injection_bandwidth": full(3, 2.0), "ejection_bandwidth": full(3, 0.5)}
    topology = dataclasses.replace(mesh((1, 3), 1.0, 0.25), endpoint_latency=8.0, **ports)
    replay = replay_traffic(fabric_of(topology, None), messages(3, (0, 1, 2.0), (0, 2, 2.0)))
    # Injected 0..1 and 1..2. To 1: link 1..3, and at its port from 3.25 for 4 s; to 2: link 3..5, then
    # 5.25..7.25, and at its port from 7.5 for 4 s. Both take 8 s more.
    np.testing.assert_array_equal(replay.received_s, [0.0, 15.25, 19.5])
    np.testing.assert_array_equal(replay.link_busy, [4.0, 2.0, 0.0, 0.0])
    np.testing.assert_array_equal(replay.run.link_busy[4:], [2.0, 0.0, 0.0, 0.0, 4.0, 4.0])


def test_a_lossy_router_slows_links_and_ports_alike():
    topology = dataclasses.replace(switch(3, 1.0, 0.0), injection_bandwidth=full(3, 1.0), efficiency=0.5)
    assert replay_traffic(fabric_of(topology, None), messages(3, (0, 1, 2.0))).completion_s == 3 * 2 / 0.5


@pytest.mark.parametrize("order", ["staggered", "by_destination", "shuffled"])
@pytest.mark.parametrize("traffic", [np.zeros((3, 3)), 5 * np.eye(3)], ids=["empty", "diagonal"])
def test_a_node_sends_itself_for_free(order, traffic):
    replay = replay_traffic(star(2.0), traffic, order)
    assert replay.completion_s == 0.0
    np.testing.assert_array_equal(replay.received_s, np.zeros(3))
    np.testing.assert_array_equal(replay.link_busy, np.zeros(6))


def all_to_all(seed: int, order: str = "shuffled", chunk_bytes: float | None = 2.0) -> TrafficReplay:
    traffic = np.random.default_rng(0).integers(1, 12, (3, 3)).astype(float)
    return replay_traffic(star(chunk_bytes), traffic, order, seed=seed, record=True)


def test_a_shuffle_is_the_same_again_and_another_with_another_seed():
    first, again, other = all_to_all(1), all_to_all(1), all_to_all(2)
    np.testing.assert_array_equal(first.run.finish, again.run.finish)
    np.testing.assert_array_equal(first.received_s, again.received_s)
    assert first.run.finish.tolist() != other.run.finish.tolist()


@pytest.mark.parametrize("chunk_bytes", [None, 2.0, 100.0])
def test_a_shuffle_sends_every_chunk_and_no_byte_more(chunk_bytes):
    in_order, shuffled = all_to_all(1, "staggered", chunk_bytes), all_to_all(1, "shuffled", chunk_bytes)
    np.testing.assert_allclose(shuffled.link_busy, in_order.link_busy, rtol=1e-12)
    assert len(shuffled.run.services.task) == len(in_order.run.services.task)


def test_shuffled_chunks_of_a_source_mix():
    traffic = messages(3, (1, 0, 200.0), (1, 2, 200.0))
    in_order, shuffled = (replay_traffic(star(1.0), traffic, order, seed=3) for order in ("staggered", "shuffled"))
    # In order, node 2 has everything after half of the time; of 400 chunks in random order some of its last are late.
    np.testing.assert_array_equal(in_order.received_s, [401.0, 0.0, 201.0])
    assert shuffled.received_s.max() == 401.0
    assert shuffled.received_s.min(where=[True, False, True], initial=np.inf) > 380


def test_chunks_in_turns_go_round_the_destinations():
    # Two chunks each: to 2 up 0..2 and 4..6, so there at 8; to 0 up 2..4 and 6..8. One after the other, 2 has all at 6.
    traffic = messages(3, (1, 0, 4.0), (1, 2, 4.0))
    np.testing.assert_array_equal(replay_traffic(star(2.0), traffic, "in_turns").received_s, [10.0, 0.0, 8.0])
    np.testing.assert_array_equal(replay_traffic(star(2.0), traffic).received_s, [10.0, 0.0, 6.0])


def test_services_are_recorded_where_wanted():
    assert all_to_all(0).run.services is not None
    assert replay_traffic(star(), FROM_1).run.services is None


def test_an_unknown_order_is_refused():
    unchecked = inspect.unwrap(replay_traffic)  # as it is without a run-time type checker
    with pytest.raises(ValueError, match="order is 'random', expected one of staggered, by_destination, shuffled"):
        unchecked(star(), FROM_1, order="random")


@pytest.mark.parametrize("traffic", [np.ones((3, 3)), -np.eye(4)[::-1], np.full((4, 4), np.nan)])
def test_traffic_that_is_not_of_the_network_is_refused(traffic):
    with pytest.raises(ValueError, match=r"traffic must be finite bytes, none negative, of the shape \(4, 4\)"):
        replay_traffic(fabric_of(ring(4, 1.0, 0.0), 8.0), traffic)


def test_a_chunk_of_no_bytes_is_the_whole_message_in_any_order():
    nothing, whole = (fabric_of(ring(4, 1.0, 0.0), chunk) for chunk in (0.0, None))
    for order in ("staggered", "by_destination", "shuffled"):
        times = [replay_traffic(fabric, np.ones((4, 4)), order).completion_s for fabric in (nothing, whole)]
        assert times[0] == times[1]
