"""Bandwidth between the halves of a network, by hand and against every halving there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.own_topologies import Dragonfly
from oracles.topologies import both_ways, graph_of, mesh

from jaxmoe.hardware import (
    AbstractTopology,
    bisection_bandwidth,
    build_graph,
    clusters,
    fully_connected,
    ring,
    switch,
    torus,
    wafers,
)

B, LATENCY = 2.0, 0.0


def two_levels(count: int, size: int, uplink: float, spines: int = 1) -> AbstractTopology:
    return clusters(count, size, B, LATENCY, uplink, LATENCY, spines)


def bordered(wafer: tuple[int, int], grid: tuple[int, int], border: float) -> AbstractTopology:
    return wafers(wafer, grid, B, LATENCY, border, LATENCY)


def every_halving(topology: AbstractTopology) -> float:
    """The least bandwidth from any half of the nodes to the others, switches on every side in turn."""
    nodes, ends = topology.num_nodes, topology.link_ends
    bandwidth, vertices = np.asarray(topology.link_bandwidth, float), len(topology.positions())
    least = np.inf
    for size in {nodes // 2, nodes - nodes // 2}:
        for chosen in itertools.combinations(range(nodes), size):
            for sides in itertools.product([False, True], repeat=vertices - nodes):
                near = np.concatenate([np.isin(np.arange(nodes), chosen), np.array(sides, bool)])
                least = min(least, bandwidth[near[ends[:, 0]] & ~near[ends[:, 1]]].sum())
    return float(least)


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (mesh((4, 4), B), 4 * B),
        (mesh((2, 6), B), 2 * B),
        (mesh((6, 3), B), 3 * B),
        (mesh((1, 5), B), B),
        (mesh((5, 5), B), 6 * B),  # two rows and two nodes of the third: their ends, and one step between the rows
        (mesh((1, 1), B), 0.0),
        (torus((4, 4), B, LATENCY), 8 * B),
        (torus((6, 3), B, LATENCY), 6 * B),
        (torus((2, 2), B, LATENCY), 2 * B),  # rings of two have one link
        (ring(6, B, LATENCY), 2 * B),
        (ring(7, B, LATENCY), 2 * B),
        (ring(2, B, LATENCY), B),
        (switch(6, B, LATENCY), 3 * B),
        (switch(7, B, LATENCY), 3 * B),
        (fully_connected(6, B, LATENCY), 9 * B),
        (fully_connected(7, B, LATENCY), 12 * B),
        (two_levels(4, 8, uplink=3.0), 2 * 3.0),
        (two_levels(4, 8, uplink=3.0, spines=4), 2 * 4 * 3.0),
        (two_levels(4, 8, uplink=30.0), 16 * B),  # as one switch
        (two_levels(3, 4, uplink=3.0), 3.0 + 2 * B),  # one cluster, and half of another
        (bordered((4, 4), (2, 2), border=0.5), 8 * 0.5),
        (bordered((4, 4), (1, 2), border=3.0), 4 * 3.0),
        (bordered((4, 4), (1, 3), border=0.5), 4 * B),  # through the wafer in the middle
    ],
)
def test_the_networks_of_the_papers_by_hand(topology, expected):
    assert bisection_bandwidth(topology) == expected


@pytest.mark.parametrize(
    "topology",
    [
        *(mesh(shape, B) for shape in [(3, 3), (3, 2), (2, 5), (3, 4), (1, 4)]),
        *(torus(shape, B, LATENCY) for shape in [(3, 3), (2, 5), (3, 4), (1, 5)]),
        *(two_levels(3, 2, uplink, spines) for uplink in (0.5, 3.0) for spines in (1, 2)),
        *(bordered((2, 2), grid, border) for grid in [(1, 2), (2, 1), (1, 3)] for border in (0.1, 1.5)),
        *(bordered(wafer, (2, 2), border) for wafer in [(1, 2), (3, 1)] for border in (0.1, 1.5)),
        ring(9, B, LATENCY),
        switch(8, B, LATENCY),
        Dragonfly.uniform(B, LATENCY, groups=3, routers=2, terminals=1),
    ],
)
def test_no_halving_is_narrower(topology):
    assert bisection_bandwidth(topology) == pytest.approx(every_halving(topology), rel=1e-6)


bandwidths = st.floats(1e-3, 1e12)


@given(bandwidths, bandwidths)
def test_switches_stand_on_the_better_side_however_far_apart_bandwidths_lie(down, up):
    topology = clusters(2, 3, down, LATENCY, up, LATENCY, spines=2)
    assert bisection_bandwidth(topology) == pytest.approx(min(3 * down, 2 * up), rel=1e-6)


@pytest.mark.parametrize("bandwidth", [[5.0, 4.0, 3.0, 2.0], [4.0, 5.0, 2.0, 3.0]])
def test_the_weaker_direction_counts(bandwidth):
    ends = both_ways((0, 2), (2, 1))
    topology = build_graph(2, ends, bandwidth, np.zeros(4), np.zeros((3, 2)))
    # Over the switch one way it is the lesser of 5 and 4, and the other way the lesser of 3 and 2.
    assert bisection_bandwidth(topology) == 2.0


def test_wide_links_do_not_blur_the_narrow_ones():
    ends = both_ways((0, 2), (2, 3), (3, 4), (4, 5), (5, 1))
    topology = build_graph(2, ends, [3.0, 1e15, 2.0, 1e15, 3.0] * 2, np.zeros(10), np.zeros((6, 2)))
    assert bisection_bandwidth(topology) == 2.0


def test_a_ring_numbered_out_of_order_is_cut_in_two_places():
    order = [0, 5, 2, 7, 4, 1, 6, 3]  # round the ring
    ends = both_ways(*zip(order, order[1:] + order[:1], strict=True))
    assert bisection_bandwidth(graph_of(8, ends, bandwidth=B)) == 2 * B
