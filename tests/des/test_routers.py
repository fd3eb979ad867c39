"""Routers with finite buffers: against plain objects event for event, by hand, and what holds for all of them."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.router import Network, Packet, Simulation

from jaxmoe.des import Fabric, GraphBuilder, fabric_of, replay_traffic
from jaxmoe.des.event_loop import run_on
from jaxmoe.des.routers import DeadlockError, RouterError, simulate_routers
from jaxmoe.des.tasks import TaskGraph, add_transfers, messages, no_rows
from jaxmoe.hardware import AbstractTopology, Mesh, Router, ring, switch, torus
from jaxmoe.hardware.networks import num_links

WIRE = 2  # cycles, of links and of ports


def latencies(speedup: float) -> tuple[float, float]:
    """Of a hop and of both end points in cycles, with wires of `WIRE`."""
    begun = 2 // speedup
    return WIRE + begun, 2 * WIRE + begun - 1


def mesh(shape=(2, 3), routing="xy", cut_through=True, **router) -> Fabric:
    """A mesh of a flit a cycle, 1 B in 1 s, with chunks of four flits."""
    return fabric_of(mesh_topology(shape, routing, **router), 4.0, cut_through)


def mesh_topology(shape, routing="xy", **router) -> Mesh:
    numbers = {"num_vcs": 2, "vc_buf_size": 4, "flit_bytes": 1.0} | router
    hop, ends = latencies(numbers.get("internal_speedup", 1))
    links, ports = num_links(shape), full(shape[0] * shape[1], 1.0)
    network = Mesh(full(links, 1.0), jnp.full(links, float(hop)), ports, ports, shape=shape, routing=routing)
    return dataclasses.replace(network, endpoint_latency=jnp.asarray(float(ends)), router=Router(**numbers))


def graph_of(fabric: Fabric, source, destination, size) -> TaskGraph:
    builder = GraphBuilder(len(fabric.rate), 0, fabric.chunk_bytes)
    source, destination, size = np.asarray(source), np.asarray(destination), np.asarray(size, float)
    add_transfers(builder, messages(fabric.paths, source, destination, size), no_rows(fabric.num_nodes))
    return builder.build()


def plain(topology: AbstractTopology, source, destination, flits, allowed=None, switching="wormhole") -> Simulation:
    """The same messages, each one packet, as plain objects."""
    router, ends, paths = topology.router, topology.link_ends, topology.paths()
    links, nodes = topology.num_links, topology.num_nodes
    channels = [(int(a), int(b), WIRE) for a, b in ends]
    channels += [(None, node, WIRE) for node in range(nodes)] + [(node, None, WIRE) for node in range(nodes)]
    outs = {at: [link for link in range(links) if ends[link][0] == at] for at in range(len(topology.positions()))}
    back = np.asarray(topology.reverse_links).tolist()
    ins = {at: [back[link] for link in outs[at]] for at in outs}
    for node in range(nodes):
        ins[node].append(links + node)
        outs[node].append(links + nodes + node)
    net = Network(
        channels, ins, outs, int(router.num_vcs), int(router.vc_buf_size), int(router.alloc_iters),
        int(router.internal_speedup), int(router.credit_delay), switching, router.priority == "network_age",
    )  # fmt: skip
    every, packets = list(range(net.vcs)), []
    for number, (s, d, m) in enumerate(zip(source, destination, flits, strict=True)):
        path = [links + s, *paths[s][d], links + nodes + d]
        packets.append(Packet(number, path, [every if allowed is None else allowed(link) for link in path], m))
    return Simulation(net, packets)


def some_messages(seed: int, nodes: int, count: int, most: int):
    """Sources, destinations and flits of messages, in the order of their sources."""
    draw = np.random.default_rng(seed)
    source = np.sort(draw.integers(0, nodes, count))
    return source, (source + draw.integers(1, nodes, count)) % nodes, draw.integers(1, most + 1, count)


ROUTERS = [
    {},
    {"num_vcs": 1, "vc_buf_size": 1},
    {"num_vcs": 3, "vc_buf_size": 2, "alloc_iters": 2},
    {"internal_speedup": 2, "vc_buf_size": 6},
    {"priority": "network_age"},
    {"num_vcs": 4, "priority": "network_age", "alloc_iters": 3, "credit_delay": 3, "internal_speedup": 2},
]


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_packets_move_as_those_of_plain_objects(router, seed):
    topology = mesh_topology((2, 3), **router)
    source, destination, flits = some_messages(seed, 6, 30, 4)
    fabric = fabric_of(topology, 4.0, cut_through=True)
    run = simulate_routers(fabric, graph_of(fabric, source, destination, flits.astype(float)))
    witness = plain(topology, source, destination, flits.tolist())
    witness.run()
    np.testing.assert_array_equal(run.start, [p.begun for p in witness.packets])
    np.testing.assert_array_equal(run.finish, [p.finish for p in witness.packets])
    assert run.peak.max() <= int(topology.router.vc_buf_size)


@pytest.mark.parametrize("switching", ["cut_through", "store_and_forward"])
@pytest.mark.parametrize("seed", range(3))
def test_switching_that_needs_room_for_whole_packets(switching, seed):
    topology = mesh_topology((2, 3), wormhole=False, vc_buf_size=5)
    source, destination, flits = some_messages(seed, 6, 30, 4)
    fabric = fabric_of(topology, 4.0, switching == "cut_through")
    run = simulate_routers(fabric, graph_of(fabric, source, destination, flits.astype(float)))
    witness = plain(topology, source, destination, flits.tolist(), switching=switching)
    witness.run()
    np.testing.assert_array_equal(run.finish, [p.finish for p in witness.packets])


def test_a_lone_message_takes_the_latencies_and_its_flits():
    for speedup, begun in ((1, 2), (2, 1)):
        fabric = mesh((1, 4), internal_speedup=speedup, vc_buf_size=16)
        run = simulate_routers(fabric, graph_of(fabric, [0], [3], [11.0]))
        # Injected over a wire; three hops, each some cycles in the router and a wire; then the same to the node.
        assert run.finish[0] == WIRE + 3 * (begun + WIRE) + (begun + WIRE) + 10


def test_a_buffer_smaller_than_the_round_trip_of_a_credit_halves_the_rate():
    # A credit is back 6 cycles after its flit was sent: two flits in every six cycles.
    fabric = mesh((1, 3), num_vcs=1, vc_buf_size=2)
    alone = simulate_routers(fabric, graph_of(fabric, [0], [2], [4.0])).finish[0]
    long = simulate_routers(dataclasses.replace(fabric, chunk_bytes=None), graph_of(fabric, [0], [2], [64.0])).finish[0]
    assert long - alone >= (64 - 4) * 6 / 2 - 6


def all_to_all(nodes: int, size: float) -> np.ndarray:
    return size * (1 - np.eye(nodes))


def test_larger_buffers_come_near_unbounded_ones_from_above():
    traffic = all_to_all(9, 16.0)
    topology = mesh_topology((3, 3), internal_speedup=4, alloc_iters=4)
    ideal = dataclasses.replace(topology, router=None)
    bound = replay_traffic(fabric_of(ideal, 4.0, cut_through=True), traffic, "staggered").completion_s
    times = []
    for size in (2, 4, 16, 256):
        router = dataclasses.replace(topology.router, vc_buf_size=jnp.asarray(float(size)))
        fabric = fabric_of(dataclasses.replace(topology, router=router), 4.0, cut_through=True)
        times.append(replay_traffic(fabric, traffic, "staggered").completion_s)
    assert times == sorted(times, reverse=True)
    assert times[-1] >= bound * 0.99
    assert times[-1] / bound < times[0] / bound
    assert times[-1] <= 1.15 * bound


def ring_fabric(dateline: bool, vcs: int = 2) -> tuple[AbstractTopology, Fabric]:
    hop, ends = latencies(1)
    network = ring(6, 1.0, float(hop))
    router = Router(vcs, 2, 1.0, dateline=dateline)
    topology = dataclasses.replace(network, endpoint_latency=jnp.asarray(float(ends)), router=router)
    return topology, fabric_of(topology, 16.0, cut_through=True)


def round_the_ring() -> tuple[list[int], list[int], list[int]]:
    """Every node sends two places on, more than one buffer holds."""
    return [*range(6)] * 2, [(node + 2) % 6 for node in range(6)] * 2, [16] * 12


def test_a_deadlock_on_a_ring_is_named():
    topology, fabric = ring_fabric(dateline=False, vcs=1)
    source, destination, flits = round_the_ring()
    with pytest.raises(DeadlockError, match=r"12 tasks unfinished: link (\d) to \d .*waits for link") as error:
        simulate_routers(fabric, graph_of(fabric, source, destination, flits))
    names = str(error.value).split(": ")[1].split(". Set")[0].split(" waits for ")
    ends = [tuple(map(int, (name.split()[1], name.split()[3]))) for name in names]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert names[0] == names[-1]
    assert "router.dateline" in str(error.value)
    assert plain(topology, source, destination, flits).run() is None


def test_datelines_make_it_go_away():
    topology, fabric = ring_fabric(dateline=True)
    source, destination, flits = round_the_ring()
    run = simulate_routers(fabric, graph_of(fabric, source, destination, flits))
    # Packets that cross from 5 to 0 take the upper virtual channel there and after it.
    assert np.isfinite(run.finish).all()
    assert run.finish.min() > 0
    links = topology.link_ends.tolist()
    crossing = {number for number, (s, d) in enumerate(zip(source, destination, strict=True)) if d < s}
    witness = plain(topology, source, destination, flits)
    for packet in witness.packets:
        passed = False
        for place, channel in enumerate(packet.path):
            if channel < len(links):
                passed |= links[channel] == [5, 0]
                packet.allowed[place] = [1] if passed else [0]
        assert passed == (packet.number in crossing)
    witness.run()
    np.testing.assert_array_equal(run.finish, [p.finish for p in witness.packets])


def test_a_torus_deadlocks_without_datelines_and_not_with_them():
    hop, ends = latencies(1)
    network = dataclasses.replace(torus((4, 4), 1.0, float(hop)), endpoint_latency=jnp.asarray(float(ends)))
    traffic = all_to_all(16, 32.0)
    dead = dataclasses.replace(network, router=Router(1, 1, 1.0))
    with pytest.raises(DeadlockError):
        replay_traffic(fabric_of(dead, 16.0, cut_through=True), traffic)
    for order in ("staggered", "by_destination", "shuffled"):
        free = dataclasses.replace(network, router=Router(2, 1, 1.0, dateline=True))
        replay = replay_traffic(fabric_of(free, 16.0, cut_through=True), traffic, order)
        assert (replay.run.finish > 0).all()


def test_tasks_that_wait_and_nodes_that_compute():
    """A message, then a computation of 10.5 s where it went, then a message back: cycles are whole."""
    fabric = mesh((1, 2))
    builder = GraphBuilder(len(fabric.rate), 2, 4.0)
    there = builder.transfer(fabric.paths[0, 1], 4.0)
    computed = builder.compute(1, 10.5, [there])
    back = builder.transfer(fabric.paths[1, 0], 4.0, [computed])
    done = builder.barrier([back])
    run = run_on(fabric, builder.build(), record=True)
    alone = WIRE + 2 * (2 + WIRE) + 3
    np.testing.assert_array_equal(run.finish[[there, computed]], [alone, alone + 10.5])
    assert run.start[back] == np.ceil(alone + 10.5)
    assert run.finish[back] == run.finish[done] == run.start[back] + alone
    np.testing.assert_array_equal(run.node_busy, [0, 10.5])
    assert run.services is not None
    # Three channels there, the computation, three channels back, each for the four flits.
    np.testing.assert_array_equal(run.services.end - run.services.begin, [4, 4, 4, 10.5, 4, 4, 4])


def test_links_of_half_the_bandwidth_take_two_cycles_for_a_flit():
    topology = mesh_topology((1, 3), vc_buf_size=16)
    slow = np.where(topology.link_ends[:, 0] == 1, 0.5, 1.0)
    fabric = fabric_of(dataclasses.replace(topology, link_bandwidth=jnp.asarray(slow)), 8.0, cut_through=True)
    run = simulate_routers(fabric, graph_of(fabric, [0], [2], [8.0]))
    # The first flit takes as long as ever. The last one follows it 7 * 2 cycles later over the slow link, and does not
    # wait for a virtual channel behind it.
    assert run.finish[0] == WIRE + 3 * (2 + WIRE) + 7 * 2 - 1


@pytest.mark.parametrize("speedup", [1.0, 1.5, 2.0])
def test_long_wires_only_delay(speedup):
    """Cycles in which nothing moves are passed over; what is sent later than all that is on its way is on time."""
    times, ready = [], np.zeros((4, 4))
    ready[0, 1], ready[2, 3] = 10_000, 25_000.5
    for more in (0.0, 3000.0):
        topology = mesh_topology((2, 2), internal_speedup=speedup)
        # Room for all flits: credits that come late would hold them up as well.
        router = dataclasses.replace(topology.router, vc_buf_size=jnp.asarray(64.0))
        hop = topology.link_latency + more
        fabric = fabric_of(dataclasses.replace(topology, link_latency=hop, router=router), 4.0, cut_through=True)
        traffic = 8.0 * (ready > 0)
        traffic[3, 0] = 8.0
        times.append(replay_traffic(fabric, traffic, ready_s=ready).received_s)
    np.testing.assert_array_equal(times[1] - times[0], [2 * 3000, 3000, 0, 3000])


def test_several_ports_of_a_node_send_at_once():
    topology = mesh_topology((2, 2), vc_buf_size=16, ports_per_node=2)
    free = dataclasses.replace(topology, injection_bandwidth=None, ejection_bandwidth=None)
    traffic = np.zeros((4, 4))
    traffic[0, 1] = traffic[0, 2] = 64.0
    two, one = (
        replay_traffic(fabric_of(t, 8.0, cut_through=True), traffic, "in_turns").completion_s
        for t in (free, mesh_topology((2, 2), vc_buf_size=16))
    )
    assert two < 0.6 * one


@pytest.mark.parametrize("order", ["staggered", "shuffled"])
def test_packets_take_the_ports_of_their_nodes_in_turn(order):
    """At the source in the order sent; at the destination as they were cut from their message, from the source's on."""
    lanes, nodes, topology = 2, 4, mesh_topology((2, 2), vc_buf_size=8, ports_per_node=2)
    free = dataclasses.replace(topology, injection_bandwidth=None, ejection_bandwidth=None)
    traffic = 4.0 * np.array([[0, 3, 2, 1], [5, 0, 1, 0], [2, 2, 0, 3], [0, 4, 1, 0]])  # packets of 4 flits
    replay = replay_traffic(fabric_of(free, 4.0, cut_through=True), traffic, order, seed=3)
    links, ends = topology.num_links, topology.link_ends.tolist()
    into, out = links, links + nodes * lanes
    channels = [(a, b, WIRE) for a, b in ends]
    channels += [(None, at // lanes, WIRE) for at in range(nodes * lanes)]
    channels += [(at // lanes, None, WIRE) for at in range(nodes * lanes)]
    back = np.asarray(topology.reverse_links).tolist()
    outs = {at: [link for link in range(links) if ends[link][0] == at] for at in range(nodes)}
    ins = {at: [back[link] for link in outs[at]] + [into + at * lanes + lane for lane in range(lanes)] for at in outs}
    outs = {at: outs[at] + [out + at * lanes + lane for lane in range(lanes)] for at in outs}
    draw, packets, paths = np.random.default_rng(3), [], topology.paths()
    for s in range(nodes):
        to = [(s + step) % nodes for step in range(nodes)] if order == "staggered" else range(nodes)
        cut = [(d, number) for d in to for number in range(int(traffic[s, d] / 4))]
        for place, which in enumerate(draw.permutation(len(cut)) if order == "shuffled" else range(len(cut))):
            d, number = cut[which]
            path = [into + s * lanes + place % lanes, *paths[s][d], out + d * lanes + (number + s) % lanes]
            packets.append(Packet(len(packets), path, [[0, 1]] * len(path), 4))
    witness = Simulation(Network(channels, ins, outs, 2, 8), packets)
    assert witness.run() == replay.completion_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_vcs": 0.0}, "router.num_vcs is 0"),
        ({"vc_buf_size": 0.0}, "router.vc_buf_size is 0"),
        ({"internal_speedup": 0.5}, "router.internal_speedup is 0.5"),
        ({"num_vcs": 40.0}, "router.num_vcs is 40 at a router with 5 ports"),
        ({"dateline": True}, "router.dateline is true"),
        ({"wormhole": False, "vc_buf_size": 3.0}, "router.vc_buf_size is 3 flits, but a packet has 4"),
        ({"flit_bytes": 4.0}, "latency_ns of a link is"),
    ],
)
def test_what_cannot_be_is_said(change, message):
    topology = mesh_topology((3, 3))
    fabric = fabric_of(
        dataclasses.replace(topology, router=dataclasses.replace(topology.router, **change)), 4.0, cut_through=True
    )
    with pytest.raises(RouterError, match=message):
        simulate_routers(fabric, graph_of(fabric, [0], [8], [8.0]))


def test_a_switch_with_more_ports_than_bits_is_said():
    topology = dataclasses.replace(switch(70, 1.0, 4.0), endpoint_latency=jnp.asarray(5.0), router=Router(1, 4, 1.0))
    with pytest.raises(RouterError, match=r"at a router with 70 ports; .* most: write null for unbounded buffers"):
        replay_traffic(fabric_of(topology, 4.0, cut_through=True), np.ones((70, 70)))


def test_trees_need_unbounded_buffers():
    fabric = mesh((1, 3))
    builder = GraphBuilder(len(fabric.rate), 0, 4.0)
    builder.transfer(fabric.routes[0, 2], 4.0)
    with pytest.raises(RouterError, match="trees of routers"):
        run_on(fabric, builder.build())


def test_messages_are_sent_when_they_are_ready():
    traffic, ready = np.zeros((4, 4)), np.zeros((4, 4))
    traffic[0, 1] = traffic[0, 2] = 4.0
    ready[0, 1], ready[0, 2] = 20.5, 3.0
    alone = 2 * (2 + WIRE) + WIRE + 3
    real = replay_traffic(mesh((2, 2)), traffic, ready_s=ready)
    # Cycles are whole: what is ready at 20.5 s goes at 21.
    np.testing.assert_array_equal(real.received_s[1:3], [21 + alone, 3 + alone])
    ideal = fabric_of(dataclasses.replace(mesh_topology((2, 2)), router=None), 4.0, cut_through=True)
    assert replay_traffic(ideal, traffic, ready_s=ready).received_s[1] == 20.5 + alone
    with pytest.raises(ValueError, match="ready_s must be finite"):
        replay_traffic(ideal, traffic, ready_s=-ready)


def test_a_network_without_buffers_has_no_routers_to_simulate():
    fabric = dataclasses.replace(mesh(), router=None)
    with pytest.raises(RouterError, match="has no routers with buffers"):
        simulate_routers(fabric, graph_of(fabric, [0], [1], [1.0]))
