"""The networks of the papers: their links, their paths, and their numbers."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.paths import xy_path
from oracles.topologies import NETWORKS, mesh, with_random_numbers

from jaxmoe.hardware import AbstractTopology, clusters, fully_connected, ring, switch, torus, wafers

every_network = pytest.mark.parametrize("topology", NETWORKS.values(), ids=NETWORKS.keys())
LINK = (1.0, 0.0)  # B/s, s


def stops(topology: AbstractTopology, source: int, destination: int) -> list[int]:
    """Vertices on the path, both ends included."""
    ends, path = topology.link_ends.tolist(), topology.paths()[source][destination]
    return [source, *(ends[link][1] for link in path)]


def distances(topology: AbstractTopology) -> np.ndarray:
    """Fewest links between any two nodes, by Floyd and Warshall."""
    vertices = len(topology.positions())
    hops = np.where(np.eye(vertices, dtype=bool), 0.0, np.inf)
    hops[tuple(topology.link_ends.T)] = 1
    for middle in range(vertices):
        hops = np.minimum(hops, hops[:, [middle]] + hops[[middle]])
    return hops[: topology.num_nodes, : topology.num_nodes]


@every_network
def test_paths_are_unbroken_walks_over_links(topology):
    ends, paths, hops = topology.link_ends.tolist(), topology.paths(), np.asarray(topology.hop_counts())
    for source, destination in itertools.product(range(topology.num_nodes), repeat=2):
        path, vertices = paths[source][destination], stops(topology, source, destination)
        assert [ends[link][0] for link in path] == vertices[:-1]
        assert vertices[-1] == destination
        assert len(path) == hops[source, destination]
        assert (len(path) == 0) == (source == destination)


@every_network
def test_reverse_links_swaps_the_ends_and_undoes_itself(topology):
    back, ends = np.asarray(topology.reverse_links), topology.link_ends
    assert ends.shape == (topology.num_links, 2)
    np.testing.assert_array_equal(ends[back], ends[:, ::-1])
    np.testing.assert_array_equal(back[back], np.arange(topology.num_links))


@every_network
@pytest.mark.parametrize("ports", [False, True])
def test_a_reversed_network_carries_the_numbers_of_the_opposite_links_and_ports(topology, ports):
    there = with_random_numbers(topology, np.random.default_rng(0), ports)
    back = there.reversed()
    ends = there.link_ends.tolist()
    for link, (start, stop) in enumerate(ends):
        opposite = ends.index([stop, start])
        assert back.link_bandwidth[link] == there.link_bandwidth[opposite]
        assert back.link_latency[link] == there.link_latency[opposite]
    if ports:
        np.testing.assert_array_equal(back.injection_bandwidth, there.ejection_bandwidth)
        np.testing.assert_array_equal(back.ejection_bandwidth, there.injection_bandwidth)
    assert (back.endpoint_latency, back.efficiency) == (there.endpoint_latency, there.efficiency)
    assert back.paths() == there.paths()


@every_network
def test_every_vertex_has_a_place_of_its_own(topology):
    positions = topology.positions()
    assert len(np.unique(positions.round(6), axis=0)) == len(positions) == topology.link_ends.max() + 1


@pytest.mark.parametrize("topology", [network for name, network in NETWORKS.items() if name != "detours"])
def test_paths_are_as_short_as_can_be(topology):
    np.testing.assert_array_equal(topology.hop_counts(), distances(topology))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_ring_goes_the_shorter_way_and_upwards_of_equals(size):
    topology = ring(size, *LINK)
    assert topology.num_links == (2 if size == 2 else 2 * size)
    for source, distance in itertools.product(range(size), range(size)):
        step = 1 if distance <= size / 2 else -1
        expected = [(source + step * hop) % size for hop in range(min(distance, size - distance) + 1)]
        assert stops(topology, source, (source + distance) % size) == expected


def test_a_torus_goes_along_x_first_the_shorter_way_and_upwards_of_equals():
    topology = torus((3, 4), *LINK)
    assert stops(topology, 0, 2 * 4 + 3) == [0, 8, 11]  # down round the edge, then left round it
    assert stops(topology, 1, 4 + 3) == [1, 5, 6, 7]  # of two ways along y the one upwards
    assert stops(topology, 4 + 3, 4 + 1) == [7, 4, 5]
    assert topology.num_links == 4 * 12


@pytest.mark.parametrize(("shape", "links"), [((2, 4), 2 * (4 + 8)), ((1, 5), 10), ((2, 2), 8)])
def test_a_torus_of_one_or_two_rows_has_no_link_twice(shape, links):
    assert torus(shape, *LINK).num_links == links


def test_between_nodes_at_a_switch_lie_two_links():
    topology = switch(5, *LINK)
    assert stops(topology, 3, 1) == [3, 5, 1]
    assert topology.num_links == 10


def test_all_nodes_can_be_neighbours():
    topology = fully_connected(4, *LINK)
    np.testing.assert_array_equal(topology.hop_counts(), 1 - np.eye(4))
    assert topology.num_links == 12


@pytest.mark.parametrize("spines", [1, 2, 3])
def test_paths_between_clusters_are_spread_over_the_spines(spines):
    count, size = 3, 2
    topology = clusters(count, size, *LINK, *LINK, spines=spines)
    assert topology.num_links == 2 * (count * size + count * spines)
    for source, destination in itertools.permutations(range(count * size), 2):
        leaf, other = 6 + source // size, 6 + destination // size
        above = [] if leaf == other else [9 + (source + destination) % spines, other]
        assert stops(topology, source, destination) == [source, leaf, *above, destination]


def test_uplinks_have_numbers_of_their_own():
    topology = clusters(2, 3, 5.0, 0.5, 7.0, 0.25, spines=2)
    is_uplink = (topology.link_ends >= 6).all(axis=1)
    assert is_uplink.sum() == 8
    np.testing.assert_array_equal(topology.link_bandwidth, np.where(is_uplink, 7.0, 5.0))
    np.testing.assert_array_equal(topology.link_latency, np.where(is_uplink, 0.25, 0.5))


def test_a_lone_cluster_has_no_spine():
    topology = clusters(1, 3, *LINK, *LINK)
    assert topology.num_links == 6
    assert len(topology.positions()) == 4


def test_links_between_wafers_have_numbers_of_their_own():
    topology = wafers((2, 3), (2, 2), 8.0, 0.5, 9.0, 0.25)
    assert topology.shape == (4, 6)
    for link, ends in enumerate(topology.link_ends):
        x, y = np.unravel_index(ends, (4, 6))
        across = sorted(x) == [1, 2] or sorted(y) == [2, 3]
        assert topology.link_bandwidth[link] == (9.0 if across else 8.0)
        assert topology.link_latency[link] == (0.25 if across else 0.5)


@given(st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_a_yx_mesh_goes_along_y_first(shape):
    turned = mesh(shape, routing="yx")
    paths = turned.paths()
    for source, destination in itertools.product(range(turned.num_nodes), repeat=2):
        along_x = [link < 2 * (shape[0] - 1) * shape[1] for link in paths[source][destination]]
        assert along_x == sorted(along_x)
        back = [int(turned.reverse_links[link]) for link in paths[source][destination][::-1]]
        assert back == xy_path(shape, destination, source)


@pytest.mark.parametrize("topology", [ring(1, *LINK), torus((1, 1), *LINK), fully_connected(1, *LINK), mesh((1, 1))])
def test_a_lone_node_needs_no_links(topology):
    assert topology.num_links == 0
    assert topology.link_ends.shape == (0, 2)
    assert topology.paths() == [[()]]
    assert jnp.asarray(topology.hop_counts()).tolist() == [[0]]
