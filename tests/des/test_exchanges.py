"""Exchanges as transfers: messages counted one by one, stages worked by hand, and what a network refuses."""

from dataclasses import replace

import numpy as np
import pytest
from oracles.arrays import full
from oracles.own_topologies import Dragonfly

from jaxmoe.des import LayerDescription, fabric_of, replay_layer
from jaxmoe.des.exchanges import ring_groups, stage_transfers
from jaxmoe.hardware import AbstractTopology, Mesh, clusters, fully_connected, ring, switch, torus, wafers
from jaxmoe.hardware.networks import num_links
from jaxmoe.placement.exchange import HOMES, ROUTES, ExchangeError, Gather, ReduceScatter, Rings, exchange_of

from .test_layer import make_batch

LINE = Mesh(full(4, 2.0), full(4, 0.25), shape=(1, 3))
MESH = Mesh(full(num_links((4, 4)), 2.0), full(num_links((4, 4)), 0.25), shape=(4, 4))
SIZE = 12.0

NETWORKS = {
    "mesh": MESH,
    "wafers": wafers((2, 2), (1, 2), 2.0, 0.1, 1.0, 0.3),
    "torus": torus((4, 4), 2.0, 0.1),
    "ring": ring(8, 2.0, 0.1),
    "switch": switch(8, 2.0, 0.1),
    "clusters": clusters(2, 4, 2.0, 0.1, 1.0, 0.3, spines=2),
    "fully_connected": fully_connected(8, 2.0, 0.1),
    "dragonfly": Dragonfly.uniform(2.0, 0.1, groups=4, routers=2, terminals=1),
}


def describe(exchange, topology: AbstractTopology, chunk_bytes: float | None = 4.0) -> LayerDescription:
    flops = np.full(topology.num_nodes, 4.0)
    return LayerDescription(fabric_of(topology, chunk_bytes), flops, SIZE, SIZE, 9.0, 6.0, "sharded", exchange)


def sent(exchange, topology: AbstractTopology, visited, home=None, mirrored=False):
    """For every part of a stage its messages as (source, destination, size)."""
    home = np.zeros(len(visited), int) if home is None else home
    fabric = fabric_of(topology, 4.0)
    parts = stage_transfers(exchange, fabric, np.array(visited), home, SIZE, mirrored)
    return [list(zip(part.sender.tolist(), part.receiver.tolist(), part.size.tolist(), strict=True)) for part in parts]


def test_gathering_goes_token_by_token_then_node_by_node_and_back_in_the_same_order():
    visited, home = [[True, True, True], [False, True, False], [True, False, True]], np.array([1, 1, 0])
    assert sent(Gather(), LINE, visited, home) == [[(0, 1, SIZE), (2, 1, SIZE), (2, 0, SIZE)]]
    assert sent(Gather(), LINE, visited, home, mirrored=True) == [[(1, 0, SIZE), (1, 2, SIZE), (0, 2, SIZE)]]


def test_a_reduce_scatter_sends_parts_to_all_others_first_to_the_next():
    visited = [[True, True, True], [False, True, False], [True, False, True], [False, False, False]]
    first = [(0, 1, 4.0), (0, 2, 4.0), (1, 2, 4.0), (1, 0, 4.0), (2, 0, 4.0), (2, 1, 4.0)]
    second = [(0, 2, 6.0), (2, 0, 6.0)]
    assert sent(ReduceScatter(), LINE, visited) == [first + second]
    back = [(destination, source, size) for source, destination, size in first + second]
    assert sent(ReduceScatter(), LINE, visited, mirrored=True) == [back]


def test_a_reduce_scatter_by_hand():
    # Two tokens of 12 B between the ends of the line, in parts of 6 B: 4 B and 2 B, two hops each way.
    share, batch = np.array([[0.5, 0, 0.5]]), make_batch([[0], [0]], [0, 0], [[0.0], [0.0]])
    seen = replay_layer(describe(ReduceScatter(), LINE), share, batch)
    # The first hop serves 2, 1, 2 and 1 s without a pause. The third chunk comes to the second hop at 5.25 and keeps
    # it until 7.25, and the last, there since 6.25, follows it.
    assert seen.stages["combine"] == seen.stages["dispatch"] == 7.25 + 1 + 0.25
    assert seen.link_busy["combine"].tolist() == [6, 6, 6, 6]


def plain_between(groups: np.ndarray, visited: np.ndarray) -> dict[tuple[int, int], float]:
    """Bytes from node to node, token by token."""
    amount: dict[tuple[int, int], float] = {}
    for row in visited:
        seen = [group for group, nodes in enumerate(groups) if row[nodes].any()]
        for one in seen:
            for other in seen:
                for source, destination in zip(groups[one], groups[other], strict=True):
                    if one != other:
                        pair = int(source), int(destination)
                        amount[pair] = amount.get(pair, 0) + SIZE / len(seen) / len(groups[0])
    return amount


@pytest.mark.parametrize("name", ["rings_2x2", "rings_1x4", "rings_4", "rings_8_both_ways", "rings_4x4", "rings_16"])
def test_groups_send_each_other_the_parts_of_common_tokens(name):
    visited = np.random.default_rng(0).random((9, 16)) < 0.15
    exchange = exchange_of(name)
    groups = ring_groups(exchange, fabric_of(MESH, None)).members
    parts = sent(exchange, MESH, visited)
    between = {(source, destination): size for source, destination, size in parts[-1]}
    assert between == pytest.approx(plain_between(groups, visited))
    assert len(parts) == 1 + (groups.shape[1] > 1)
    # First to the next group, then to the one after that.
    group_of = {int(node): group for group, nodes in enumerate(groups) for node in nodes}
    turns = [(group_of[d] - group_of[s]) % len(groups) for s, d, _ in parts[-1] if s == 0]
    assert turns == sorted(turns)
    mirror = sent(exchange, MESH, visited, mirrored=True)
    assert mirror[0] == [(destination, source, size) for source, destination, size in parts[-1]]
    assert sorted(mirror[-1]) == sorted((d, s, size) for s, d, size in parts[0])


def test_rings_inside_groups_and_then_between_them_by_hand():
    # On a 1x4 line two groups of two. Token 0 visits both, token 1 the first alone.
    line = Mesh(full(6, 2.0), full(6, 0.25), shape=(1, 4))
    share = np.array([[0.5, 0, 0, 0.5], [1, 0, 0, 0]])
    batch = make_batch([[0], [1]], [0, 0], [[0.0], [0.0]])
    # Rings: 2 and 1 vectors of 12 B in halves: 12 B and 6 B in one step of 6 s and 3 s. Between: 12 B / 2 / 2 = 3 B
    # from each node to its like, two hops of 1.5 s; 1>2 is in the middle of both 0>2 and 1>3 and takes them in turn:
    # 1>3 at 0..1.5, then 0>2 at 1.75..3.25.
    seen = replay_layer(describe(exchange_of("rings_1x2"), line), share, batch)
    assert seen.stages["combine"] == 6.25 + 3.5
    assert seen.link_busy["combine"].tolist() == [6 + 1.5, 3.0, 3 + 1.5, 6 + 1.5, 3.0, 3 + 1.5]
    assert seen.stages["dispatch"] == 3.5 + 6.25
    alone = replay_layer(describe(exchange_of("rings_1x2_alone"), line), share, batch)
    assert alone.stages["combine"] == 6.25
    # The barrier between them holds back even nodes that could send at once.
    ready = replay_layer(replace(describe(exchange_of("rings_1x2"), line), flops=np.full(4, 1e9)), share, batch)
    assert ready.free_running_s == pytest.approx(2 * (6.25 + 3.5))


def test_rings_are_of_neighbours_in_rectangles_and_of_successors_elsewhere():
    mesh, other = fabric_of(MESH, None), fabric_of(NETWORKS["torus"], None)
    quarters = ring_groups(Rings((2, 2)), mesh)
    assert quarters.members[1].tolist() == [2, 3, 6, 7]
    assert sorted(quarters.rings[1].tolist()) == [2, 3, 6, 7]
    assert all(
        abs(mesh.hops[a, b]) == 1 for a, b in zip(quarters.rings[1], np.roll(quarters.rings[1], -1), strict=True)
    )
    assert ring_groups(Rings((2,)), mesh).rings.tolist() == [list(range(8)), list(range(8, 16))]
    whole = ring_groups(Rings(), mesh).rings[0]
    assert (mesh.hops[whole, np.roll(whole, -1)] == 1).all()
    assert ring_groups(Rings(), other).rings.tolist() == [list(range(16))]
    assert ring_groups(Rings((4,)), other).rings[3].tolist() == [12, 13, 14, 15]


CHOSEN = (
    "least_congested",
    "least_congested_visited_unicast_by_3",
    "least_congested_token_home_by_2",
    "priced",
    "priced_visited",
    "priced_token_home",
)


def names_for(topology: AbstractTopology) -> list[str]:
    is_mesh = topology.grid is not None
    gathers = [Gather(home, route).name for home in HOMES for route in (ROUTES if is_mesh else ROUTES[:2])]
    return [
        *gathers,
        *CHOSEN,
        "reduce_scatter",
        "ring",
        "ring_both_ways",
        "rings_4_both_ways",
        *["rings_2x2"] * is_mesh,
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_exchange_runs_on_every_network(name):
    topology = NETWORKS[name]
    rng, nodes = np.random.default_rng(1), topology.num_nodes
    share = rng.random((6, nodes)) * (rng.random((6, nodes)) < 0.3)
    share[np.arange(6), rng.integers(nodes, size=6)] += 0.1
    experts = np.stack([rng.choice(6, 2, replace=False) for _ in range(10)])
    batch = make_batch(experts, rng.integers(2, size=10), rng.random((10, 2)))
    for exchange in names_for(topology):
        seen = replay_layer(describe(exchange_of(exchange), topology), share / share.sum(axis=1, keepdims=True), batch)
        assert seen.total_s == pytest.approx(sum(seen.stages.values()))
        for stage in ("dispatch", "combine"):
            assert seen.stages[stage] >= seen.link_busy[stage].max() > 0
        assert seen.free_running_s >= seen.stages["compute"]


@pytest.mark.parametrize(
    ("exchange", "network", "message"),
    [
        (Gather("fewest_hops", "cross_tree"), "torus", "fewest_hops_cross_tree needs a mesh.*use fewest_hops_tree"),
        (Gather("lowest_host", "split_tree"), "switch", "use lowest_host_tree"),
        (Rings((3, 2)), "mesh", "rings_3x2 .* 4x4 mesh .* 1, 2 or 4 along x and 1, 2 or 4 along y"),
        (Rings((2, 2), both_ways=True), "torus", "no mesh; use rings_4_both_ways"),
        (Rings((3,)), "ring", "3 equal groups of 8 nodes.* 1, 2, 4 or 8 groups"),
        (Rings((2, 2, 1)), "mesh", "rings_2x2x1"),
    ],
)
def test_an_exchange_that_does_not_suit_the_network_is_refused(exchange, network, message):
    with pytest.raises(ExchangeError, match=message):
        describe(exchange, NETWORKS[network])
