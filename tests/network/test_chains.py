"""Rings whose steps wait for what they pass on alone: worked by hand, and as messages find it in the simulator."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full

from jaxmoe.des.event_loop import run_on
from jaxmoe.des.exchanges import stage_transfers
from jaxmoe.des.fabric import fabric_of
from jaxmoe.des.tasks import GraphBuilder, add_transfers, no_rows
from jaxmoe.hardware import Mesh, clusters, switch
from jaxmoe.hardware.graph import build_graph
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion, build_exchange
from jaxmoe.placement.exchange import exchange_of
from jaxmoe.relax import HardMax, SmoothMax


def told(topology, name, size, chunk_bytes=0.0, cut_through=True, mirrored=False, reduction=None):
    """Seconds of the rings of an exchange in which every node sends `size` B in a round, both ways together."""
    return _told(topology, build_exchange(name, topology), size, chunk_bytes, cut_through, mirrored, reduction)


@eqx.filter_jit
def _told(topology, exchange, size, chunk_bytes, cut_through, mirrored, reduction):
    times = Congestion(jnp.asarray(chunk_bytes), cut_through)
    flows = exchange._around(jnp.ones(topology.num_nodes))
    stage = (times.of_mirrored if mirrored else times.of_flows)(topology, flows, jnp.asarray(size, float))
    return stage.total(HardMax() if reduction is None else reduction)


def seen(topology, name, size, chunk_bytes=0.0, cut_through=True, mirrored=False):
    """The same in the simulator: one token for each node of a ring, so a vector's part is a node's."""
    fabric, exchange = fabric_of(topology, chunk_bytes, cut_through), exchange_of(name)
    visited = np.ones((topology.num_nodes // exchange.count, topology.num_nodes), bool)
    parts = stage_transfers(exchange, fabric, visited, np.zeros(len(visited), int), size, mirrored)
    graph = GraphBuilder(len(fabric.rate), 0, fabric.chunk_bytes)
    add_transfers(graph, parts[-1 if mirrored else 0], no_rows(topology.num_nodes))
    return run_on(fabric, graph.build()).makespan


def round_a_switch(latency, bandwidth=1e9):
    """Four nodes; a message has the latency of its ends alone."""
    return eqx.tree_at(lambda network: network.endpoint_latency, switch(4, bandwidth, 0.0), jnp.asarray(latency))


# Four nodes round a switch, 6000 B of every node in each of 3 rounds, links of 1 GB/s: 6 us of every link in a round.
# Both ways these are two messages of 3 us, cut through, so what a node sends up is at the other one as it leaves.
#
# Latency 1 us. The first message of a node leaves from 0 to 3 us, and that the other way from 3 to 6 us. What the first
# one brings is there at 4 us, and leaves when the link is free, from 6 to 9 us. No link is ever idle: 18 us, and the
# last message is there 1 us later. Nodes that waited for each other after each round would take 3 (6 + 1) = 21 us.
#
# Latency 5 us. The first message is there at 8 us, and leaves again from 8 to 11 us, then from 16 to 19 us; the other
# way all is 3 us later, so the last one leaves from 19 to 22 us and is there at 27 us = 3 (3 + 5) + 3. With rounds:
# 3 (6 + 5) = 33 us.
#
# One way a step takes 6 us and the latency, whatever waits for what: 3 (6 + 1) = 21 us.
#
# Stored and forwarded whole, a message both ways is received by the switch in 3 us and sent on in 3 us: 3 us more of
# delay. So a step takes 3 + 4 us, more than the 6 us of its link: 3 (3 + 4) + 3 = 24 us. With 5 us 3 (3 + 8) + 3 = 36.
BY_HAND = [
    ("ring_both_ways", 1e-6, True, 19e-6),
    ("ring_both_ways", 5e-6, True, 27e-6),
    ("ring", 1e-6, True, 21e-6),
    ("ring_both_ways", 1e-6, False, 24e-6),
    ("ring_both_ways", 5e-6, False, 36e-6),
]


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("name", "latency", "cut_through", "seconds"), BY_HAND)
def test_four_nodes_round_a_switch_by_hand(name, latency, cut_through, seconds, mirrored):
    given = (round_a_switch(latency), name, 6000.0, 0.0, cut_through, mirrored)
    assert seen(*given) == pytest.approx(seconds, rel=1e-5)
    assert float(told(*given)) == pytest.approx(seconds, rel=1e-5)


def test_a_ring_of_unlike_links_takes_its_slowest_run_of_steps():
    # Steps 0>1, 1>2, 2>3, 3>0 of 4, 1, 1, 4 us that arrive 3, 2, 1, 1 us later, and 3 rounds. Node 0's own part is on
    # its slow link until 4 us. Node 3's is there at 4 + 1 = 5 us, leaves from 5 to 9 us and is at node 1 at 12 us.
    # Node 2's waits for the link 3>0 until 4 us, is at node 0 at 9 us, leaves from 9 to 13 us and arrives at 16 us.
    # Node 3's goes on from node 1 from 12 to 13 us and is at node 2 at 15 us. So 16 us, where three rounds of the
    # slowest link and of all delays but the quickest would be 12 + 6 = 18 us.
    ends = [(0, 1), (1, 2), (2, 3), (3, 0)]
    ends += [(stop, start) for start, stop in ends]
    rate, latency = np.array([0.25, 1, 1, 0.25] * 2) * 1e9, np.array([3, 2, 1, 1] * 2) * 1e-6
    network = build_graph(4, ends, floats(rate), floats(latency), np.zeros((4, 2)))
    assert seen(network, "ring", 1000.0) == pytest.approx(16e-6, rel=1e-5)
    assert float(told(network, "ring", 1000.0)) == pytest.approx(16e-6, rel=1e-5)


def with_random_links(topology, seed):
    rng = np.random.default_rng(seed)
    rate, latency = 1e9 * rng.uniform(0.3, 1, topology.num_links), 2e-6 * rng.random(topology.num_links)
    return eqx.tree_at(lambda net: (net.link_bandwidth, net.link_latency), topology, (floats(rate), floats(latency)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [300.0, 3000.0])
@pytest.mark.parametrize("mirrored", [False, True])
def test_steps_that_meet_no_others_take_as_long_as_in_the_simulator_on_any_links(seed, size, mirrored):
    mesh = Mesh(full(num_links((3, 4)), 1.0), full(num_links((3, 4)), 0.0), shape=(3, 4))
    for network, name in ((mesh, "ring_both_ways"), (switch(6, 1.0, 0.0), "ring")):
        given = (with_random_links(network, seed), name, size, 0.0, False, mirrored)
        assert float(told(*given)) == pytest.approx(seen(*given), rel=1e-5)


@pytest.mark.parametrize("name", ["ring_both_ways", "rings_4_both_ways_alone"])
@pytest.mark.parametrize("size", [100.0, 10e3, 1e6])
def test_rings_between_switches_take_as_long_as_in_the_simulator(name, size):
    given = (clusters(4, 4, 1e9, 1e-6, 4e8, 5e-6), name, size)
    assert float(told(*given)) == pytest.approx(seen(*given), rel=5e-3)


def test_many_machines_have_the_times_of_each():
    many = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(round_a_switch(each) for each in (1e-6, 5e-6)))
    found = jax.vmap(lambda network: told(network, "ring_both_ways", 6000.0))(many)
    np.testing.assert_allclose(found, [19e-6, 27e-6], rtol=1e-5)


@pytest.mark.parametrize(("latency", "by_latency"), [(1e-6, 1), (5e-6, 3)])
def test_derivatives_are_those_of_what_limits(latency, by_latency):
    # 18 us + latency, all by the link's rate; or 3 latencies and 12 us by the rate.
    by_rate = -18e-6 if by_latency == 1 else -12e-6  # s by one more of a rate
    of = jax.grad(lambda latency, rate: told(round_a_switch(latency, rate * 1e9), "ring_both_ways", 6000.0), (0, 1))
    found = of(jnp.asarray(latency), jnp.asarray(1.0))
    np.testing.assert_allclose(found, [by_latency, by_rate], rtol=1e-4)


def test_relaxed_times_go_to_the_exact_one():
    network, exact = round_a_switch(5e-6), 27e-6
    above = [
        float(told(network, "ring_both_ways", 6000.0, reduction=SmoothMax(jnp.asarray(each)))) - exact
        for each in (0.1, 0.01, 0.001)
    ]
    assert above[0] > above[1] > above[2] > -1e-10
    assert above[2] < 1e-2 * exact
