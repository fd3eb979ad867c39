"""Vectors that routers add up and copy: trees worked by hand, and what their links carry, counted token by token."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.paths import xy_path, yx_path

from jaxmoe.des import LayerDescription, fabric_of, replay_layer
from jaxmoe.des.exchanges import stage_transfers
from jaxmoe.des.layer import _stage
from jaxmoe.hardware import AbstractTopology, Mesh, build_graph, clusters, ring, torus, wafers
from jaxmoe.hardware.networks import num_links
from jaxmoe.placement.exchange import ExchangeError, Gather

# Links of the 2x2 mesh: 0: 0>2   1: 1>3   2: 2>0   3: 3>1   4: 0>1   5: 2>3   6: 1>0   7: 3>2
VISITED, HOME = np.array([[True, True, False, True]]), np.array([0])


def small_layer(exchange: Gather, topology: AbstractTopology | None = None, **numbers) -> LayerDescription:
    """A vector is two chunks of 4 B, each 2 s on a link and 0.25 s to the next node."""
    mesh = Mesh(full(8, 2.0), full(8, 0.25), shape=(2, 2), **numbers) if topology is None else topology
    nodes = mesh.num_nodes
    return LayerDescription(fabric_of(mesh, 4.0), np.full(nodes, 4.0), 8.0, 8.0, 100.0, 6.0, "sharded", exchange)


def stage(layer: LayerDescription, visited=VISITED, home=HOME, mirrored=False):
    """One stage alone."""
    return _stage(layer, stage_transfers(layer.exchange, layer.fabric, visited, home, 8.0, mirrored))


def busy(**seconds: float) -> list[float]:
    """Busy seconds of the eight links from those that are busy, as link6=8."""
    return [seconds.get(f"link{link}", 0.0) for link in range(8)]


def test_a_router_adds_up_chunk_by_chunk():
    # 3>1 in 0..2 and 2..4. 1>0 takes a chunk when node 1 has that of 3: 2.25..4.25 and 4.25..6.25.
    run = stage(small_layer(Gather("lowest_host", "tree")))
    assert run.makespan == 6.5
    assert run.link_busy.tolist() == busy(link3=4, link6=4)


def test_a_router_copies_chunk_by_chunk():
    # The mirror: 0>1 in 0..2 and 2..4, then 1>3 in 2.25..4.25 and 4.25..6.25.
    run = stage(small_layer(Gather("lowest_host", "tree")), mirrored=True)
    assert run.makespan == 6.5
    assert run.link_busy.tolist() == busy(link4=4, link1=4)


def test_a_vector_passes_a_port_of_its_node_and_the_sum_one_of_the_home():
    # A chunk takes 1 s to get in and 4 s, and then another 7 s, to get out.
    ports = {"injection_bandwidth": full(4, 4.0), "ejection_bandwidth": full(4, 1.0)}
    layer = small_layer(Gather("lowest_host", "tree"), endpoint_latency=7.0, **ports)
    # In at 1 and 2 s. 3>1: 1..3, 3..5. 1>0: 3.25..5.25, 5.25..7.25. Out at 0: 5.5..9.5, 9.5..13.5.
    combine = stage(layer)
    assert combine.makespan == 13.5 + 7
    assert combine.link_busy[8:].tolist() == [0, 2, 0, 2, 8, 0, 0, 0]
    # In once at 0, for both. 0>1: 1..3, 3..5. 1>3: 3.25..5.25, 5.25..7.25. Out at 3: 5.5..9.5, 9.5..13.5.
    dispatch = stage(layer, mirrored=True)
    assert dispatch.makespan == 13.5 + 7
    assert dispatch.link_busy[8:].tolist() == [2, 0, 0, 0, 0, 8, 0, 8]


def test_the_other_order_of_directions_and_half_along_each():
    far = np.array([[True, False, False, True]])
    cross = stage(small_layer(Gather("lowest_host", "cross_tree")), far)
    assert cross.makespan == 6.5
    assert cross.link_busy.tolist() == busy(link7=4, link2=4)
    # A half is one chunk, and both halves go at once.
    split = stage(small_layer(Gather("lowest_host", "split_tree")), far)
    assert split.makespan == 2 * 2.25
    assert split.link_busy.tolist() == busy(link3=2, link6=2, link7=2, link2=2)
    # Node 1 is next to the home on either tree: its link takes both halves.
    assert stage(small_layer(Gather("lowest_host", "split_tree"))).link_busy[6] == 4
    # On a mesh that goes along y first, the cross tree is that along x first.
    mesh = Mesh(full(8, 2.0), full(8, 0.25), shape=(2, 2), routing="yx")
    other = stage(small_layer(Gather("lowest_host", "cross_tree"), mesh), far)
    assert other.link_busy.tolist() == busy(link3=4, link6=4)


def test_a_home_that_is_not_visited_gets_all_vectors():
    run = stage(small_layer(Gather("token_home", "tree")), np.array([[False, True, False, True]]))
    assert run.link_busy.tolist() == busy(link3=4, link6=4)


def test_chunks_of_tokens_share_a_link_in_the_order_of_tokens():
    # Node 1 alone sends, for two tokens: four chunks one after the other.
    visited = np.array([[True, True, False, False]] * 2)
    run = stage(small_layer(Gather("lowest_host", "tree")), visited, np.array([0, 0]))
    assert run.makespan == 8.25
    assert run.link_busy.tolist() == busy(link6=8)


def test_trees_without_vectors_take_no_time():
    alone = np.array([[False, False, True, False]])
    assert stage(small_layer(Gather("lowest_host", "split_tree")), alone, np.array([2])).makespan == 0
    single = small_layer(Gather("lowest_host", "tree"), Mesh(full(0, 1.0), full(0, 1.0), shape=(1, 1)))
    assert stage(single, np.array([[True]])).makespan == 0


@pytest.mark.parametrize("cut_through", [False, True])
def test_tree_hops_hold_a_chunk_whole_even_where_messages_cut_through(cut_through):
    layer = small_layer(Gather("lowest_host", "tree"))
    assert stage(replace(layer, fabric=replace(layer.fabric, cut_through=cut_through))).makespan == 6.5


MESH = Mesh(jnp.linspace(1, 2, num_links((3, 4))), full(num_links((3, 4)), 0.1), shape=(3, 4))
NETWORKS = {
    "mesh": MESH,
    "wafers": wafers((2, 2), (1, 2), 2.0, 0.1, 1.0, 0.3),
    "torus": torus((3, 4), 2.0, 0.1),
    "ring": ring(7, 2.0, 0.1),
    "clusters": clusters(3, 3, 2.0, 0.1, 1.0, 0.3, spines=2),
}


def random_visits(nodes: int, seed: int, tokens: int = 12):
    rng = np.random.default_rng(seed)
    visited = rng.random((tokens, nodes)) < 0.4
    return visited, rng.integers(nodes, size=tokens)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", range(2))
def test_a_link_carries_a_token_once(name, seed):
    topology = NETWORKS[name]
    layer = small_layer(Gather("token_home", "tree"), topology)
    visited, home = random_visits(topology.num_nodes, seed)
    paths, expected = topology.paths(), np.zeros(topology.num_links)
    for token, to in enumerate(home):
        for link in {link for node in np.flatnonzero(visited[token]) for link in paths[node][to]}:
            expected[link] += 8.0
    combine, dispatch = stage(layer, visited, home), stage(layer, visited, home, mirrored=True)
    np.testing.assert_allclose(combine.link_busy * layer.fabric.rate, expected)
    np.testing.assert_allclose((dispatch.link_busy * layer.fabric.rate)[topology.reverse_links], expected)


@pytest.mark.parametrize("seed", range(2))
def test_halves_go_along_both_trees(seed):
    visited, home = random_visits(12, seed)
    expected = np.zeros(num_links((3, 4)))
    for token, to in enumerate(home):
        for path in (xy_path, yx_path):
            nodes = np.flatnonzero(visited[token]).tolist()
            for link in {link for node in nodes for link in path((3, 4), node, int(to))}:
                expected[link] += 4.0
    layer = small_layer(Gather("token_home", "split_tree"), MESH)
    np.testing.assert_allclose(stage(layer, visited, home).link_busy * layer.fabric.rate, expected)


@pytest.mark.parametrize("route", ["unicast", "tree", "cross_tree", "split_tree"])
def test_dispatch_of_the_reversed_machine_loads_it_as_combine_does(route):
    rng = np.random.default_rng(3)
    ports = {name: jnp.asarray(rng.uniform(1, 2, 12)) for name in ("injection_bandwidth", "ejection_bandwidth")}
    mesh = Mesh(MESH.link_bandwidth, MESH.link_latency, shape=(3, 4), **ports)
    visited, home = random_visits(12, 5)
    combine = stage(small_layer(Gather("token_home", route), mesh), visited, home)
    dispatch = stage(small_layer(Gather("token_home", route), mesh.reversed()), visited, home, mirrored=True)
    turned = [*np.asarray(mesh.reverse_links), *(34 + 12 + np.arange(12)), *(34 + np.arange(12))]
    np.testing.assert_allclose(dispatch.link_busy[turned], combine.link_busy)


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_is_no_slower_than_its_unicasts(seed):
    visited, home = random_visits(12, seed, tokens=1)
    tree, alone = (
        stage(small_layer(Gather("token_home", route), MESH), visited, home) for route in ("tree", "unicast")
    )
    assert tree.makespan <= alone.makespan * (1 + 1e-12)


def test_a_node_adds_its_own_when_it_has_computed():
    # One token, at home 0, of an expert on nodes 1 and 3 and one on 0. Node 1 computes for 6 s, the others for less.
    from .test_layer import make_batch

    share = np.array([[0, 0.5, 0, 0.5], [1, 0, 0, 0]])
    layer = replace(small_layer(Gather("lowest_host", "tree")), flops=np.array([6.0, 0.5, 1.0, 3.0]))
    seen = replay_layer(layer, share, make_batch([[0, 1]], [1], [[0.0, 0.0]]))
    # Node 1 has its input at 4.25, and sends two chunks after 6 s; that of node 3 came long before.
    assert seen.free_running_s == 4.25 + 6 + 4 + 0.25
    assert seen.total_s == 6.5 + 6 + 6.5


def test_paths_in_a_circle_make_no_tree():
    ends = [(a, b) for a in range(4) for b in range(4) if a != b]
    routes = {(0, 3): [0, 1, 2, 3], (2, 3): [2, 0, 1, 3], (1, 3): [1, 2, 0, 3]}
    topology = build_graph(4, ends, np.ones(12), np.zeros(12), np.zeros((4, 2)), routes)
    layer = small_layer(Gather("token_home", "tree"), topology)
    with pytest.raises(ExchangeError, match=r"circle.*unicast"):
        stage(layer, np.array([[True, True, True, False]]), np.array([3]))
