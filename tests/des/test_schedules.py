"""Collectives as schedules: rings, trees and their forwarding worked by hand, and routes that retrace each other."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.arrays import full
from oracles.schedules import (
    all_to_all_sends,
    entwined_ring_sends,
    entwined_rings,
    forwarded_sends,
    multicast_tree,
    ring_sends,
    tree_sends,
)

from jaxmoe.des import GraphBuilder, Send, add_sends, fabric_of, replay_traffic, simulate
from jaxmoe.des.fabric import FabricPaths, rows_of
from jaxmoe.des.tasks import ring_all_reduce_sends
from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import hop_counts, num_links

seeds = st.integers(0, 2**32 - 1)


def ring_graph(nodes: int, chunk_bytes: float | None = None) -> GraphBuilder:
    """A ring on its own wires: link i leads from node i to the next."""
    return GraphBuilder(nodes, nodes, chunk_bytes)


def ring_paths(nodes: int) -> FabricPaths:
    """Whoever a node sends to, it sends over its own wire."""
    return FabricPaths(nodes, rows_of([(source,) for source in range(nodes) for _ in range(nodes)]))


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


def uneven_mesh(shape: tuple[int, int], seed: int) -> Mesh:
    rng, links = np.random.default_rng(seed), num_links(shape)
    numbers = (jnp.asarray(rng.uniform(1, 4, links)), jnp.asarray(rng.uniform(0, 2, links)))
    return Mesh(*numbers, shape=shape)


def run_on(mesh: Mesh, sends: list[Send], chunk_bytes: float | None = None):
    """The run of a schedule on a mesh, all nodes ready at time 0, and the tasks that deliver to every node."""
    fabric = fabric_of(mesh, chunk_bytes)
    graph = GraphBuilder(fabric.num_links, 0, chunk_bytes)
    received = add_sends(graph, sends, fabric.paths, [()] * fabric.num_nodes)
    return simulate(graph.build(), fabric.rate, fabric.latency), received


def contributors(sends: list[Send], members: int) -> list[list[set[int]]]:
    """Whose data comes to every node in every send: the sender's own and what it passes on."""
    carried: list[set[int]] = []
    received: list[list[set[int]]] = [[] for _ in range(members)]
    for source, destination, _, after in sends:
        carried.append({source}.union(*(carried[index] for index in after)))
        received[destination].append(carried[-1])
    return received


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(nodes):
    graph = ring_graph(nodes)
    add_sends(graph, ring_all_reduce_sends(range(nodes), 6.0 * nodes), ring_paths(nodes), [()] * nodes)
    result = simulate(graph.build(), np.full(nodes, 2.0), np.full(nodes, 0.5))
    assert result.makespan == 2 * (nodes - 1) * (6.0 / 2.0 + 0.5)
    np.testing.assert_array_equal(result.link_busy, 2 * (nodes - 1) * 3.0)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_all_reduce_brings_every_part_summed_over_all_to_every_node(bidirectional):
    sends = ring_all_reduce_sends([3, 0, 2, 1], 8.0, bidirectional)
    ways = 2 if bidirectional else 1
    assert sum(send.size for send in sends) == 2 * 3 * 8.0
    # A node adds itself to what three others have summed at the end of the reduce-scatter. Then come sums of all.
    for seen in contributors(sends, 4):
        assert sorted(map(len, seen)) == sorted(ways * [1, 2, 3, 4, 4, 4])


def test_a_bidirectional_ring_sends_halves_both_ways_and_a_ring_of_two_one_way():
    sends = ring_all_reduce_sends([4, 5, 6], 12.0, bidirectional=True, first=10)
    assert {(send.source, send.destination) for send in sends[:12]} == {(4, 5), (5, 6), (6, 4)}
    assert {(send.source, send.destination) for send in sends[12:]} == {(5, 4), (6, 5), (4, 6)}
    assert {send.size for send in sends} == {2.0}
    assert all(sends[index - 10].destination == send.source for send in sends for index in send.after)
    assert ring_all_reduce_sends([4, 5], 12.0, bidirectional=True) == ring_all_reduce_sends([4, 5], 12.0)


def test_everyone_sends_to_the_nodes_after_it_first():
    traffic = np.arange(9.0).reshape(3, 3)
    sends = all_to_all_sends(traffic)
    assert sends[:4] == [Send(0, 1, 1.0), Send(0, 2, 2.0), Send(1, 2, 5.0), Send(1, 0, 3.0)]
    assert len(sends) == 6


def test_all_to_all_is_the_replay_of_its_traffic():
    mesh, traffic = uneven_mesh((2, 3), 0), np.random.default_rng(0).uniform(1, 9, (6, 6))
    result, _ = run_on(mesh, all_to_all_sends(traffic), 0.5)
    replay = replay_traffic(fabric_of(mesh, 0.5), traffic)
    assert result.makespan == replay.completion_s
    np.testing.assert_array_equal(result.link_busy, replay.link_busy)


def test_groups_have_the_same_place_in_every_domain():
    assert entwined_rings((4, 4), (2, 2)) == [[2, 10, 8, 0], [3, 11, 9, 1], [6, 14, 12, 4], [7, 15, 13, 5]]


@pytest.mark.parametrize(("shape", "domain"), [((4, 4), (2, 2)), ((6, 4), (3, 1)), ((8, 8), (2, 4))])
def test_steps_of_a_group_go_from_domain_to_domain(shape, domain):
    rings = np.array(entwined_rings(shape, domain))
    assert sorted(rings.ravel()) == list(range(shape[0] * shape[1]))
    assert set(hop_counts(shape)[rings, np.roll(rings, -1, axis=1)].ravel()) <= set(domain)


def test_nodes_on_the_way_forward_what_they_received():
    # From (0, 0) to (2, 0) over (1, 0), and then back to (0, 0) from there, on a mesh of 3x2.
    sends = forwarded_sends((3, 2), [Send(0, 4, 8.0), Send(4, 0, 8.0, (0,)), Send(1, 3, 2.0)])
    assert sends == [
        Send(0, 2, 8.0),
        Send(2, 4, 8.0, (0,)),
        Send(4, 2, 8.0, (1,)),
        Send(2, 0, 8.0, (2,)),
        Send(1, 3, 2.0),
    ]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_entwined_rings_never_wait_for_a_link(bidirectional):
    # 6 steps of two hops; every link is free whenever a message comes to it, so nothing takes longer than alone.
    links = num_links((4, 4))
    mesh = Mesh(full(links, 2.0), full(links, 0.5), shape=(4, 4))
    sends = entwined_ring_sends((4, 4), (2, 2), 32.0, bidirectional)
    part = 8.0 / (1 + bidirectional)
    result, _ = run_on(mesh, sends)
    assert result.makespan == 6 * 2 * (part / 2.0 + 0.5)
    np.testing.assert_allclose(result.finish - result.start, part / 2.0 + 0.5)
    # 16 nodes send 6 parts of a quarter of their buffer over two hops.
    assert result.link_busy.sum() * 2.0 == 16 * 6 * 8.0 * 2


def test_a_multicast_goes_down_the_tree_of_its_paths():
    assert multicast_tree((2, 3), 0, [5, 2]) == [(0, 3), (3, 4), (4, 5), (0, 1), (1, 2)]
    assert multicast_tree((2, 3), 0, [5, 2], "yx") == [(0, 1), (1, 2), (2, 5)]
    assert multicast_tree((2, 3), 4, [4]) == []


def test_a_node_forwards_every_chunk_when_it_has_it():
    tree = [(0, 1), (1, 2), (1, 3)]
    assert tree_sends(tree, 5.0, 2.0, first=7) == [
        Send(0, 1, 2.0), Send(1, 2, 2.0, (7,)), Send(1, 3, 2.0, (7,)),
        Send(0, 1, 2.0), Send(1, 2, 2.0, (10,)), Send(1, 3, 2.0, (10,)),
        Send(0, 1, 1.0), Send(1, 2, 1.0, (13,)), Send(1, 3, 1.0, (13,)),
    ]  # fmt: skip
    assert tree_sends(tree, 5.0) == [Send(0, 1, 5.0), Send(1, 2, 5.0, (0,)), Send(1, 3, 5.0, (0,))]


def test_stop_and_wait_awaits_the_chunk_before():
    sends = tree_sends([(0, 1), (1, 2)], 4.0, 2.0, stop_and_wait=True)
    assert [send.after for send in sends] == [(), (0,), (0,), (2, 1)]


@pytest.mark.parametrize(
    ("stop_and_wait", "expected"), [(False, 3 * (1 + 0.5) + 3 * 1), (True, (3 + 4 - 1) * (1 + 0.5))]
)
def test_a_chunked_broadcast_down_a_line(stop_and_wait, expected):
    # 8 bytes in 4 chunks of 1 s over three hops of 0.5 s. Latencies count once a hop, or once a chunk as well.
    mesh = Mesh(full(6, 2.0), full(6, 0.5), shape=(1, 4))
    result, _ = run_on(mesh, tree_sends(multicast_tree((1, 4), 0, range(4)), 8.0, 2.0, stop_and_wait))
    assert result.makespan == expected


@given(seeds)
def test_a_multicast_is_never_slower_than_its_messages_one_by_one(seed):
    rng = np.random.default_rng(seed)
    mesh, source, chunk = uneven_mesh((3, 4), seed), int(rng.integers(12)), rng.choice([1.0, 3.0, 8.0])
    to = [int(node) for node in np.flatnonzero(rng.random(12) < 0.6) if node != source]
    together, received = run_on(mesh, tree_sends(multicast_tree((3, 4), source, to), 8.0, chunk))
    alone, singly = run_on(mesh, [Send(source, node, 8.0) for node in to], chunk)
    assert together.makespan <= alone.makespan * (1 + 1e-12)
    for node in to:
        assert together.finish[received[node]].max() <= alone.finish[singly[node]].max() * (1 + 1e-12)
    # Every node of the tree but its root receives the message once, whatever lies behind it.
    rate = np.asarray(mesh.link_bandwidth)
    assert (together.link_busy * rate).sum() == pytest.approx(8.0 * len(multicast_tree((3, 4), source, to)))
    assert (together.link_busy <= alone.link_busy + 1e-9).all()
