"""Collectives as schedules: rings worked by hand, and routes that retrace each other."""

import numpy as np
import pytest

from jaxmoe.des import GraphBuilder, Send, add_sends, ring_sends, simulate
from jaxmoe.des.schedules import gather_sends, scatter_sends


def ring_graph(nodes: int, chunk_bytes: float | None = None) -> GraphBuilder:
    """A ring on its own wires: link i leads from node i to the next."""
    return GraphBuilder(nodes, nodes, chunk_bytes)


def ring_paths(nodes: int) -> list[list[tuple[int, ...]]]:
    """Whoever a node sends to, it sends over its own wire."""
    return [[(source,)] * nodes for source in range(nodes)]


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
@pytest.mark.parametrize("chunk_bytes", [None, 4.0])
def test_a_ring_takes_its_steps_one_after_the_other(nodes, chunk_bytes):
    graph = ring_graph(nodes, chunk_bytes)
    add_sends(graph, ring_sends(range(nodes), 6.0), ring_paths(nodes), [()] * nodes)
    result = simulate(graph.build(), np.full(nodes, 2.0), np.full(nodes, 0.5))
    # R - 1 steps of size / bandwidth + latency. Over one hop it does not matter how the message is cut.
    assert result.makespan == (nodes - 1) * (6.0 / 2.0 + 0.5)
    np.testing.assert_array_equal(result.link_busy, (nodes - 1) * 3.0)


def test_a_ring_waits_for_a_late_node():
    graph = ring_graph(3)
    ready = [(graph.compute(node, seconds),) for node, seconds in enumerate((0.0, 100.0, 0.0))]
    received = add_sends(graph, ring_sends(range(3), 6.0), ring_paths(3), ready)
    result = simulate(graph.build(), np.full(3, 2.0), np.full(3, 0.5))
    # Node 1 has node 0's part at 3.5 but adds its own at 100. Its first send is at node 2 at 103.5, its second
    # waits for the first and is there at 106.5. Node 2 sends on at 103.5, and node 0 has that at 107. Node 1
    # hears from node 0 at 3.5, and again at 7 of what node 2 sent at 0.
    arrivals = [result.finish[tasks].tolist() for tasks in received]
    assert arrivals == [[3.5, 107.0], [3.5, 7.0], [103.5, 106.5]]


def test_a_ring_of_one_has_nothing_to_send():
    assert ring_sends([7], 6.0) == []


def test_ring_sends_count_from_where_they_are_appended():
    first = ring_sends([0, 1], 1.0)
    both = first + ring_sends([2, 3, 4], 1.0, first=len(first))
    # 2 sends of the first ring, then 3 of step 0. In step 1 node 2 sends on what came from node 4, and so on.
    assert [send.after for send in both[5:]] == [(4,), (2,), (3,)]
    assert [both[send.after[0]].destination for send in both[5:]] == [2, 3, 4]


def test_gathering_goes_token_by_token_then_node_by_node():
    visited = np.array([[True, True, True], [False, True, False], [True, False, True]])
    sends = gather_sends(visited, np.array([1, 1, 0]), 8.0)
    assert sends == [Send(0, 1, 8.0), Send(2, 1, 8.0), Send(2, 0, 8.0)]
    assert scatter_sends(sends) == [Send(1, 0, 8.0), Send(1, 2, 8.0), Send(0, 2, 8.0)]
