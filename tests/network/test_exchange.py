"""Gathering and ring reduction of one batch, worked by hand; `test_exchange_oracle` has all of them by loops."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import layer as oracle
from oracles.cases import congestion, mirrored_congestion

from jaxmoe.hardware import Mesh, ring
from jaxmoe.hardware.networks import hop_counts, link_ends, num_links
from jaxmoe.network import Flows, Visits, build_exchange, replicated_visits, sharded_visits
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
    visits = VISITS[mode](jnp.asarray(share, float), cases.batch(tokens), HardSupport())
    for token in range(count):
        reached = {n for hosts in oracle.visited_nodes(share, tokens, token, mode) for n in hosts}
        assert set(np.flatnonzero(visits.visited[token])) == reached
    ((flows,),) = build_exchange(rule, machine.topology)(machine.topology, visits)
    expected = oracle.gather_messages(machine, share, tokens, mode, rule)
    np.testing.assert_allclose(flows.traffic(jnp.asarray(1.0)), expected, rtol=1e-6)


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
    visits = replicated_visits(jnp.asarray(share), cases.batch(tokens), HardSupport())
    np.testing.assert_array_equal(visits.home.sum(axis=1), 1)


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
    home = jax.jit(lambda *args: replicated_visits(*args, HardSupport()).home)(jnp.asarray(share), cases.batch(tokens))
    np.testing.assert_array_equal(home.sum(axis=1), 1)
    assert (share[tokens.experts[:, 0]][np.asarray(home) > 0] > 0).all()


def everywhere(tokens: int, nodes: int) -> Visits:
    """Tokens that visit every node and have node 0 as home."""
    return visits_of(np.ones((tokens, nodes)))


def visits_of(visited) -> Visits:
    """Tokens that visit these nodes and have node 0 as home."""
    tokens, nodes = np.shape(visited)
    nothing, none = jnp.zeros((1, nodes)), jnp.zeros(nodes)
    home = nothing.at[0, 0].set(1)
    ones, draw = jnp.ones(tokens), jnp.zeros(tokens)
    named, source = jnp.ones((tokens, 1)), jnp.zeros(tokens, int)
    return Visits(jnp.asarray(visited, float), named, home, none, nothing, nothing, none, ones, draw, source)


def around(topology, name: str, visits: Visits) -> Flows:
    """What goes round the rings of an exchange, which is its first phase."""
    (flows,), *_ = build_exchange(name, topology)(topology, visits)
    return flows


LARGE = [pytest.param(shape, "ring", marks=pytest.mark.slow) for shape in ((4, 4), (4, 8))]
RINGS = [((2, 2), "ring"), ((3, 4), "ring"), ((4, 8), "rings_1x2"), *LARGE]


@pytest.mark.parametrize(("shape", "rings"), RINGS)
def test_ring_reduce_takes_the_textbook_time(shape, rings):
    # Dispatch and combine of B vectors of 2 h bytes: 4 B h (R-1)/R / BW, which hd_moe Eq. 4 takes for many nodes.
    tokens, hidden, bandwidth = 64, 4096, 50e9
    links = num_links(shape)
    mesh = Mesh(jnp.full(links, bandwidth), jnp.zeros(links), shape=shape)
    flows = around(mesh, rings, everywhere(tokens, shape[0] * shape[1]))
    stage = eqx.filter_jit(congestion)(mesh, flows, jnp.asarray(2.0 * hidden), jnp.asarray(0.0))
    size = shape[0] * shape[1] // exchange_of(rings).count
    expected = 4 * tokens * hidden * (size - 1) / size / bandwidth
    assert 2 * float(stage.total(HardMax())) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("shape", "rings"), [((4, 8), "ring"), ((4, 8), "rings_1x4"), ((2, 8), "rings_1x8")])
def test_both_ways_round_a_ring_take_half_the_time(shape, rings):
    mesh = Mesh(jnp.full(num_links(shape), 50e9), jnp.full(num_links(shape), 1e-6), shape=shape)

    def seconds(both_ways):
        flows = around(mesh, rings + "_both_ways" * both_ways, everywhere(64, shape[0] * shape[1]))
        stage = eqx.filter_jit(congestion)(mesh, flows, jnp.asarray(8192.0), jnp.asarray(0.0))
        return float(stage.link_time.max()), float(stage.path_delay)

    (load, delay), (both_load, both_delay) = seconds(both_ways=False), seconds(both_ways=True)
    halves = 1 if rings == "rings_1x8" else 2  # a ring of two has but one way
    assert both_load == pytest.approx(load / halves, rel=1e-6)
    assert both_delay == pytest.approx(delay, rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("stage", [congestion, mirrored_congestion])
def test_a_ring_pays_the_latency_of_every_round_however_few_the_tokens(stage, tokens):
    # A ring of 32 neighbours: 31 rounds of one hop of 1 us, with a 32nd of the tokens' vectors each.
    shape, vector, bandwidth = (4, 8), 8192.0, 50e9
    mesh = Mesh(jnp.full(num_links(shape), bandwidth), jnp.full(num_links(shape), 1e-6), shape=shape)
    flows = around(mesh, "ring", everywhere(tokens, 32))
    measured = eqx.filter_jit(stage)(mesh, flows, jnp.asarray(vector), jnp.asarray(512.0))
    assert float(measured.path_delay) == pytest.approx(31e-6, rel=1e-6)
    assert float(measured.total(HardMax())) == pytest.approx(31 * (tokens / 32 * vector / bandwidth + 1e-6), rel=1e-5)


@pytest.mark.parametrize("stage", [congestion, mirrored_congestion])
def test_a_ring_that_does_not_close_waits_for_its_last_step(stage):
    # On a line of three, the step from node 2 to node 0 takes two hops of 1 us, and receives the third of a vector
    # that it carries whole in between: the chunk is larger. Two rounds; no link carries two messages in one. Delays are
    # 1, 1 and 5 us; what starts last passes two steps, the slow one and a quick one: 6 us beside two loads of 3 us.
    mesh = Mesh(jnp.full(4, 1e9), jnp.full(4, 1e-6), shape=(1, 3))
    flows = around(mesh, "ring", everywhere(1, 3))
    measured = eqx.filter_jit(stage)(mesh, flows, jnp.asarray(9000.0), jnp.asarray(8192.0))
    assert float(measured.total(HardMax())) == pytest.approx(2 * 3e-6 + 6e-6, rel=1e-5)


def test_a_ring_that_no_token_visits_sends_nothing():
    # Rings of 2 x 2 over the nodes of columns 0 and 1, which the token visits, and 2 and 3, whose links are slow.
    shape = (2, 4)
    latency = np.where((link_ends(shape) % 4 >= 2).all(axis=1), 1e-3, 1e-6)
    mesh = Mesh(jnp.full(num_links(shape), 1e9), jnp.asarray(latency, jnp.float32), shape=shape)
    flows = around(mesh, "rings_1x2", visits_of([[1, 1, 0, 0, 1, 1, 0, 0]]))
    measured = eqx.filter_jit(congestion)(mesh, flows, jnp.asarray(8192.0), jnp.asarray(0.0))
    assert float(measured.total(HardMax())) == pytest.approx(3 * (8192 / 4 / 1e9 + 1e-6), rel=1e-5)


@pytest.mark.parametrize("both_ways", [False, True])
def test_one_ring_goes_round_any_network(both_ways):
    topology, tokens = ring(8, 50e9, 1e-6), 64
    flows = around(topology, "ring" + "_both_ways" * both_ways, everywhere(tokens, 8))
    measured = eqx.filter_jit(congestion)(topology, flows, jnp.asarray(8192.0), jnp.asarray(0.0))
    step = tokens / 8 * 8192 / 50e9 / (2 if both_ways else 1)
    assert float(measured.total(HardMax())) == pytest.approx(7 * (step + 1e-6), rel=1e-5)


def test_rings_stay_inside_their_group_and_step_to_neighbours():
    mesh = Mesh(jnp.ones(104), jnp.zeros(104), shape=(4, 8))
    rings = build_exchange("rings_2x2", mesh)
    group, successor = np.asarray(rings.group), np.asarray(rings.successor)
    assert (group[successor] == group).all()
    assert (hop_counts((4, 8))[np.arange(32), successor] == 1).all()
    assert sorted(successor) == list(range(32))
    assert float(around(mesh, "rings_2x2", everywhere(3, 32)).rounds) == 7
