"""Gathering and ring reduction of one batch, worked by hand; `test_exchange_oracle` has all of them by loops."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import layer as oracle
from oracles.arrays import floats, full
from oracles.cases import congestion, mirrored_congestion

from jaxmoe.hardware import Mesh, ring
from jaxmoe.hardware.networks import hop_counts, link_ends, num_links
from jaxmoe.network import Visits, build_exchange, replicated_visits, sharded_visits
from jaxmoe.placement.exchange import exchange_of
from jaxmoe.relax import HardMax, HardSupport

VISITS = {"sharded": sharded_visits, "replicated": replicated_visits}


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("rule", ["lowest_host", "fewest_hops"])
@pytest.mark.parametrize(("count", "shape"), [(20, (3, 4)), (12, (1, 16)), (12, (3, 6))])  # many tokens; and few
def test_visits_and_messages_equal_the_loops(mode, rule, count, shape):
    rng = np.random.default_rng(5)
    machine = cases.random_machine(rng, shape)
    nodes = shape[0] * shape[1]
    share, tokens = cases.random_share(rng, 8, nodes), cases.random_tokens(rng, count, 8, 3, missing=True)
    visits, flows = messages(mode, machine.topology, build_exchange(rule, machine.topology), share, cases.batch(tokens))
    for token in range(count):
        reached = {n for hosts in oracle.visited_nodes(share, tokens, token, mode) for n in hosts}
        assert set(np.flatnonzero(visits.visited[token])) == reached
    expected = oracle.gather_messages(machine, share, tokens, mode, rule)
    np.testing.assert_allclose(flows, expected, rtol=1e-6)


@eqx.filter_jit
def messages(mode, topology, exchange, share, batch):
    """Visits of a batch, and messages from node to node."""
    visits = VISITS[mode](jnp.asarray(share, float), batch, HardSupport())
    ((flows,),) = exchange(topology, visits)
    return visits, flows.traffic(jnp.asarray(1.0))


def test_every_token_is_served_once_per_expert_even_on_the_edge_of_a_slice():
    """Slices of the replicas must leave no gap and no overlap for a draw to fall into."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.ones(8), size=400).astype(np.float32)
    edges = np.cumsum(share, axis=1)[:, 1:7]
    tokens = oracle.Tokens(
        experts=np.repeat(np.arange(400), edges.shape[1])[:, None],
        token_draw=np.zeros(edges.size),
        draw=edges.reshape(-1, 1),
        weight=np.ones(edges.size),
    )
    np.testing.assert_array_equal(np.asarray(homes_of(share, tokens)).sum(axis=1), 1)


@pytest.mark.parametrize("nodes", [12, 512])
def test_a_token_on_the_edge_of_a_slice_is_served_by_one_host_even_beside_nodes_without_a_share(nodes):
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.ones(nodes), size=8) * (rng.random((8, nodes)) < 0.4)
    share = (share / share.sum(axis=1, keepdims=True)).astype(np.float32)
    edges = np.asarray(jnp.cumsum(jnp.asarray(share), axis=1))
    below_one = np.nextafter(np.float32(1), np.float32(0))
    draws = np.minimum(np.concatenate([np.nextafter(edges, np.float32(0)), edges], axis=1), below_one)
    tokens = oracle.Tokens(
        experts=np.repeat(np.arange(8), 2 * nodes)[:, None],
        token_draw=np.zeros(draws.size),
        draw=draws.reshape(-1, 1),
        weight=np.ones(draws.size),
    )
    home = np.asarray(homes_of(share, tokens))
    np.testing.assert_array_equal(home.sum(axis=1), 1)
    assert (share[tokens.experts[:, 0]][home > 0] > 0).all()


def homes_of(share, tokens):
    find = jax.jit(lambda share, batch: replicated_visits(share, batch, HardSupport()).home)
    return find(jnp.asarray(share), cases.batch(tokens))


def everywhere(tokens: int, nodes: int) -> Visits:
    """Tokens that visit every node and have node 0 as home."""
    return visits_of(np.ones((tokens, nodes)))


def visits_of(visited) -> Visits:
    """Tokens that visit these nodes and have node 0 as home."""
    tokens, nodes = np.shape(visited)
    nothing, none = full((1, nodes), 0.0), full(nodes, 0.0)
    home = floats(np.eye(1, nodes))
    ones, draw = full(tokens, 1.0), full(tokens, 0.0)
    first = jnp.asarray(np.zeros(tokens, np.int32))
    return Visits(floats(visited), first, home, none, nothing, nothing, none, ones, draw, first)


def mesh_of(shape, bandwidth: float, latency) -> Mesh:
    links = num_links(shape)
    return Mesh(full(links, bandwidth), floats(np.broadcast_to(latency, links)), shape=shape)


@eqx.filter_jit
def measured(stage, topology, exchange, visits, vector_bytes, chunk_bytes):
    """What goes round the rings of an exchange, which is its first phase, and its time under a model."""
    (flows,), *_ = exchange(topology, visits)
    time = stage(topology, flows, vector_bytes, chunk_bytes)
    return flows, time, time.total(HardMax())


def around(topology, name: str, visits: Visits, vector_bytes: float, chunk_bytes=0.0, stage=congestion):
    sizes = jnp.asarray(vector_bytes), jnp.asarray(chunk_bytes)
    return measured(stage, topology, build_exchange(name, topology), visits, *sizes)


LARGE = [pytest.param(shape, "ring", marks=pytest.mark.slow) for shape in ((4, 4), (4, 8))]
RINGS = [((2, 2), "ring"), ((3, 4), "ring"), ((4, 8), "rings_1x2"), *LARGE]


@pytest.mark.parametrize(("shape", "rings"), RINGS)
def test_ring_reduce_takes_the_textbook_time(shape, rings):
    # Dispatch and combine of B vectors of 2 h bytes: 4 B h (R-1)/R / BW, which hd_moe Eq. 4 takes for many nodes.
    tokens, hidden, bandwidth = 64, 4096, 50e9
    visits = everywhere(tokens, shape[0] * shape[1])
    _, _, total = around(mesh_of(shape, bandwidth, 0.0), rings, visits, 2.0 * hidden)
    size = shape[0] * shape[1] // exchange_of(rings).count
    expected = 4 * tokens * hidden * (size - 1) / size / bandwidth
    assert 2 * float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("shape", "rings"), [((4, 8), "ring"), ((4, 8), "rings_1x4"), ((2, 8), "rings_1x8")])
def test_both_ways_round_a_ring_take_half_the_time(shape, rings):
    mesh, visits = mesh_of(shape, 50e9, 1e-6), everywhere(64, shape[0] * shape[1])

    def seconds(both_ways):
        _, time, _ = around(mesh, rings + "_both_ways" * both_ways, visits, 8192.0)
        return np.asarray(time.link_time).max(), float(time.path_delay)

    (load, delay), (both_load, both_delay) = seconds(both_ways=False), seconds(both_ways=True)
    halves = 1 if rings == "rings_1x8" else 2  # a ring of two has but one way
    assert both_load == pytest.approx(load / halves, rel=1e-6)
    assert both_delay == pytest.approx(delay, rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("stage", [congestion, mirrored_congestion])
def test_a_ring_pays_the_latency_of_every_round_however_few_the_tokens(stage, tokens):
    # A ring of 32 neighbours: 31 rounds of one hop of 1 us, with a 32nd of the tokens' vectors each.
    shape, vector, bandwidth = (4, 8), 8192.0, 50e9
    mesh = mesh_of(shape, bandwidth, 1e-6)
    _, time, total = around(mesh, "ring", everywhere(tokens, 32), vector, 512.0, stage)
    assert float(time.path_delay) == pytest.approx(31e-6, rel=1e-6)
    assert float(total) == pytest.approx(31 * (tokens / 32 * vector / bandwidth + 1e-6), rel=1e-5)


@pytest.mark.parametrize("stage", [congestion, mirrored_congestion])
def test_a_ring_that_does_not_close_waits_for_its_last_step(stage):
    # On a line of three, the step from node 2 to node 0 takes two hops of 1 us, and receives the third of a vector
    # that it carries whole in between: the chunk is larger. Two rounds; no link carries two messages in one. Delays are
    # 1, 1 and 5 us; what starts last passes two steps, the slow one and a quick one: 6 us beside two loads of 3 us.
    _, _, total = around(mesh_of((1, 3), 1e9, 1e-6), "ring", everywhere(1, 3), 9000.0, 8192.0, stage)
    assert float(total) == pytest.approx(2 * 3e-6 + 6e-6, rel=1e-5)


def test_a_ring_that_no_token_visits_sends_nothing():
    # Rings of 2 x 2 over the nodes of columns 0 and 1, which the token visits, and 2 and 3, whose links are slow.
    shape = (2, 4)
    latency = np.where((link_ends(shape) % 4 >= 2).all(axis=1), 1e-3, 1e-6)
    _, _, total = around(mesh_of(shape, 1e9, latency), "rings_1x2", visits_of([[1, 1, 0, 0, 1, 1, 0, 0]]), 8192.0)
    assert float(total) == pytest.approx(3 * (8192 / 4 / 1e9 + 1e-6), rel=1e-5)


@pytest.mark.parametrize("both_ways", [False, True])
def test_one_ring_goes_round_any_network(both_ways):
    topology, tokens = ring(8, 50e9, 1e-6), 64
    _, _, total = around(topology, "ring" + "_both_ways" * both_ways, everywhere(tokens, 8), 8192.0)
    step = tokens / 8 * 8192 / 50e9 / (2 if both_ways else 1)
    assert float(total) == pytest.approx(7 * (step + 1e-6), rel=1e-5)


def test_rings_stay_inside_their_group_and_step_to_neighbours():
    mesh = mesh_of((4, 8), 1.0, 0.0)
    rings = build_exchange("rings_2x2", mesh)
    group, successor = np.asarray(rings.group), np.asarray(rings.successor)
    assert (group[successor] == group).all()
    assert (hop_counts((4, 8))[np.arange(32), successor] == 1).all()
    assert sorted(successor) == list(range(32))
    flows, _, _ = around(mesh, "rings_2x2", everywhere(64, 32), 8192.0)
    assert float(flows.rounds) == 7
