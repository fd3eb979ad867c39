"""Networks of any form: the paths they get, what is refused, and numbers that can be swept."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.topologies import both_ways, detours, graph_of, random_graph

from jaxmoe.hardware import Graph, TopologyError, build_graph, ring
from jaxmoe.network import Congestion
from jaxmoe.relax import HardMax


def stops(graph: Graph, source: int, destination: int) -> list[int]:
    ends = graph.link_ends.tolist()
    return [source, *(ends[link][1] for link in graph.paths()[source][destination])]


def shortest_ways(graph: Graph, source: int, destination: int) -> list[list[int]]:
    """All ways of the fewest links, grown vertex by vertex."""
    links, ways = {tuple(pair) for pair in graph.link_ends.tolist()}, [[source]]
    while not any(way[-1] == destination for way in ways):
        ways = [[*way, b] for way in ways for a, b in links if a == way[-1]]
    return [way for way in ways if way[-1] == destination]


@given(st.integers(0, 2**32 - 1))
def test_paths_are_shortest_and_over_the_lowest_numbered_vertices(seed):
    graph = random_graph(np.random.default_rng(seed))
    for source, destination in itertools.permutations(range(graph.num_nodes), 2):
        assert stops(graph, source, destination) == min(shortest_ways(graph, source, destination))


def test_links_keep_their_order_and_numbers():
    ends = [(1, 0), (2, 1), (0, 1), (1, 2)]
    graph = build_graph(3, ends, [1.0, 2.0, 3.0, 4.0], [0.5, 0.25, 0.0, 1.0], np.arange(6.0).reshape(3, 2))
    assert graph.link_ends.tolist() == [list(pair) for pair in ends]
    assert graph.reverse_links.tolist() == [2, 3, 0, 1]
    assert graph.link_bandwidth.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert graph.link_latency.tolist() == [0.5, 0.25, 0.0, 1.0]
    assert graph.positions().tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert graph.paths() == [[(), (2,), (2, 3)], [(0,), (), (3,)], [(1, 0), (1,), ()]]


def test_given_routes_are_taken_and_the_rest_are_shortest():
    graph = detours()
    assert stops(graph, 0, 1) == [0, 3, 2, 1]
    assert stops(graph, 1, 0) == [1, 0]
    assert stops(graph, 0, 2) == [0, 1, 2]
    np.testing.assert_array_equal(graph.hop_counts()[0], [0, 3, 2, 1, 3, 3])


LINE = both_ways((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ends": both_ways((0, 1), (2, 3)), "vertices": 4}, "no links lead from node 0 to node 2.*connected"),
        ({"routes": {(0, 2): [0, 2]}}, "path from 0 to 2 uses a link from 0 to 2, but there is none"),
        ({"routes": {(0, 2): [1, 2]}}, r"path from 0 to 2 is \[1, 2\]; write all its vertices"),
        ({"routes": {(0, 2): [0, 1]}}, r"path from 0 to 2 is \[0, 1\]; write all its vertices"),
        ({"routes": {(0, 2): []}}, r"path from 0 to 2 is \[\]; write all its vertices"),
        ({"routes": {(0, 2): [0, 1, 0, 1, 2]}}, r"path from 0 to 2, \[0, 1, 0, 1, 2\], passes a vertex twice"),
        ({"routes": {(0, 0): [0, 1, 0]}}, "path from 0 to 0, .* passes a vertex twice"),
        ({"routes": {(0, 3): [0, 3]}}, "path from 0 to 3, but nodes are 0..2"),
        ({"ends": [*LINE[:3]]}, "link from 1 to 2 but none back; add a link from 2 to 1"),
        ({"ends": [*LINE, (1, 0)]}, "two links from 1 to 0; merge them"),
        ({"ends": [*LINE, (1, 1)]}, "link 4 runs from 1 to 1; name two of the vertices 0..2"),
        ({"ends": [*LINE, (1, 3)]}, "link 4 runs from 1 to 3; name two of the vertices 0..2"),
        ({"ends": [*LINE, (-1, 0)]}, "link 4 runs from -1 to 0"),
        ({"bandwidth": [1.0, 0.0, 1.0, 1.0]}, "link from 1 to 2 has bandwidth 0 B/s, expected a finite one above zero"),
        ({"bandwidth": [1.0, -2.0, 1.0, 1.0]}, "link from 1 to 2 has bandwidth -2 B/s"),
        ({"bandwidth": [1.0, np.nan, 1.0, 1.0]}, "link from 1 to 2 has bandwidth nan B/s"),
        ({"bandwidth": [1.0, np.inf, 1.0, 1.0]}, "link from 1 to 2 has bandwidth inf B/s"),
        ({"latency": [0.0, 0.0, -1.0, 0.0]}, "link from 1 to 0 has latency -1 s, expected a finite one, zero or more"),
        ({"latency": [0.0, 0.0, np.nan, 0.0]}, "link from 1 to 0 has latency nan s"),
        ({"bandwidth": [1.0, 1.0, 1.0]}, "4 links have 3 bandwidths and 4 latencies"),
        ({"latency": [0.0]}, "4 links have 4 bandwidths and 1 latencies"),
        ({"vertices": 2}, "3 nodes and 2 positions are given"),
        ({"nodes": 0}, "0 nodes and 3 positions are given"),
    ],
)
def test_a_network_that_cannot_be_is_refused(changes, message):
    ends = changes.get("ends", LINE)
    bandwidth, latency = changes.get("bandwidth", np.ones(len(ends))), changes.get("latency", np.zeros(len(ends)))
    positions = np.zeros((changes.get("vertices", 3), 2))
    with pytest.raises(TopologyError, match=message):
        build_graph(changes.get("nodes", 3), ends, bandwidth, latency, positions, changes.get("routes"))


def total(graph: Graph, bandwidth) -> jax.Array:
    """Time of one vector from every node to every other when the links have `bandwidth`."""
    changed = eqx.tree_at(lambda g: g.link_bandwidth, graph, bandwidth)
    traffic = jnp.ones((graph.num_nodes, graph.num_nodes))
    return Congestion(jnp.asarray(0.0))(changed, traffic).total(HardMax())


def test_many_bandwidths_at_once_equal_one_by_one():
    graph = detours()
    bandwidths = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (5, graph.num_links)), jnp.float32)
    together = jax.jit(jax.vmap(total, in_axes=(None, 0)))(graph, bandwidths)
    one = jax.jit(total)
    np.testing.assert_allclose(together, [one(graph, row) for row in bandwidths], rtol=1e-6)
    assert len(np.unique(together)) == 5


def test_other_numbers_and_other_paths_of_the_same_size_do_not_recompile():
    traced = []

    @eqx.filter_jit
    def time(graph):
        traced.append(graph)
        return total(graph, graph.link_bandwidth)

    clockwise, counter = ({(0, 2): [0, middle, 2]} for middle in (1, 3))
    square = both_ways((0, 1), (1, 2), (2, 3), (0, 3))
    times = [float(time(graph_of(4, square, routes, rate))) for routes in (clockwise, counter) for rate in (1.0, 2.0)]
    assert times[1] < times[0]
    assert len(traced) == 1
    time(ring(5, 1.0, 0.0))
    assert len(traced) == 2
