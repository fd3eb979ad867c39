"""Communication of token layouts: by hand, against plain loops, against the event simulator, and its derivatives."""

import sys
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import schedules as des
from oracles.arrays import floats, full

from jaxmoe.des import GraphBuilder, add_sends, fabric_of, simulate
from jaxmoe.des.token_communication import replay_communication
from jaxmoe.hardware import Mesh, clusters, switch
from jaxmoe.hardware.networks import hop_counts, num_links
from jaxmoe.network import (
    Congestion,
    OneByOne,
    Uncongested,
    price_rounds,
    ring_all_reduce,
)
from jaxmoe.network.token_communication import (
    Counts,
    all_reduce_rounds,
    num_homes,
    scaled,
    token_exchange,
    token_homes,
    visit_counts,
)
from jaxmoe.placement.token_layout import successive_layout, token_layout
from jaxmoe.relax import HardMax, SmoothMax

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "moentwine"))
from layouts import balanced_counts, ring_step_hops, token_communication

sys.path.pop(0)

CHUNK, RATE, VECTOR = 1024.0, 1e12, 8192.0
CONGESTED = Congestion(jnp.asarray(CHUNK))


def mesh_of(shape, rate=RATE, latency=0.0):
    return Mesh(full(num_links(shape), rate), full(num_links(shape), latency), shape=shape)


def dgx(nodes=2):
    return clusters(nodes, 4, 900e9, 0.0, 400e9, 5e-7)


LAYOUTS = {
    "baseline": token_layout("baseline", (4, 4), 4),
    "nearest": token_layout("baseline", (4, 4), 4, fetch="nearest"),
    "er": token_layout("er", (4, 4), 4),
    "no_gather": token_layout("er", (4, 4), 4, all_gather=False),
    "esp": token_layout("esp", (4, 4), 4),
    "baseline_esp": token_layout("baseline_esp", (4, 4), 4),
    "her": token_layout("her", (8, 4), 4, (4, 4)),
    "her_gathered": token_layout("her", (4, 8), 2, (4, 4), all_gather=True),
    "er_9": token_layout("er", (6, 6), 9),
    "dgx": successive_layout(2, 4, 2),
    "nvl": successive_layout(1, 8, 4),
}


def network_of(layout):
    if layout.name != "successive":
        return mesh_of(layout.shape)
    return dgx() if layout.shape[0] == 2 else switch(8, 900e9, 0.0)


def tokens_of(layout, each, experts_per_node=2, top_k=4, seed=0):
    """Where balanced tokens go: nodes of whole experts, or devices that have slices of them."""
    rng, nodes = np.random.default_rng(seed), layout.num_nodes
    hosts = layout.tp if layout.sliced else nodes
    experts = hosts * experts_per_node
    chosen = rng.random((each * layout.num_groups, experts)).argsort(axis=1)[:, :top_k] // experts_per_node
    visited = np.zeros((len(chosen), hosts), bool)
    visited[np.arange(len(chosen))[:, None], chosen] = True
    return visited[:, layout.slices] if layout.sliced else visited


VISITS = jax.jit(visit_counts, static_argnums=(3, 4))


def counted(layout, visited):
    homes = jnp.asarray(token_homes(layout, len(visited)), jnp.int32)
    parts = layout.shape[0] if layout.name == "successive" else 1
    return VISITS(floats(visited), full(len(visited), 1.0), homes, num_homes(layout), parts)


def exchanged(layout, visited):
    """Traffic of every round."""
    return traffic_of(token_exchange(layout, network_of(layout)), counted(layout, visited))


traffic_of = eqx.filter_jit(lambda exchange, counts: exchange(counts).traffic)
balanced = jax.jit(balanced_counts, static_argnums=(1, 2, 3, 4, 5))


@eqx.filter_jit
def priced(communication, topology, counts, tokens, reduction=None):
    return communication(topology, counts, tokens, VECTOR, reduction or HardMax())


def seconds(layout, topology, counts, tokens, exchanging=CONGESTED, reducing=CONGESTED):
    stages = priced(token_communication(layout, topology, exchanging, reducing), topology, counts, float(tokens))
    return {name: float(stage.seconds) for name, stage in stages.items()}


def test_eq_1_by_hand():
    # 4x4, TP 4, 8 tokens a group, each visits every device: 8 vectors from each of three other members of a domain at
    # 1, 1 and 2 hops, and twice that for the baseline; parts of 8 vectors, halved both ways, over 6 steps.
    counts = Counts(full((4, 16), 8.0), full((4, 1), 0.0))
    vector = VECTOR / RATE
    for name, hops, step in (("er", 4, 2), ("baseline", 8, 1)):
        told = seconds(LAYOUTS[name], mesh_of((4, 4)), counts, 8, OneByOne(), Uncongested())
        assert told["dispatch"] == pytest.approx(8 * hops * vector, rel=1e-5)
        assert told["combine"] == pytest.approx(8 * hops * vector, rel=1e-5)
        assert told["all_reduce"] == pytest.approx(6 * step * 8 / 4 / 2 * vector, rel=1e-5)
        assert told["closing"] == pytest.approx(told["all_reduce"], rel=1e-6)


@pytest.mark.parametrize("models", [(OneByOne(), Uncongested()), (OneByOne(), CONGESTED)], ids=["eq_1", "mixed"])
def test_sliced_experts_add_up_what_two_models_price(models):
    layout = LAYOUTS["baseline_esp"]
    topology, counts = mesh_of((4, 4)), counted(layout, tokens_of(layout, 8))
    communication = token_communication(layout, topology, *models)
    rings, fetches = communication.exchange.around(counts), communication.exchange.fetched(counts)
    around, fetched = (
        float(priced_rounds(model, topology, scaled(rounds, VECTOR)))
        for model, rounds in ((models[1], rings), (models[0], fetches))
    )
    combine = priced(communication, topology, counts, 8.0)["combine"]
    assert float(combine.seconds) == pytest.approx(around + fetched, rel=1e-6)
    assert min(around, fetched) > 0
    assert combine.pair_time.shape == (0,)


def test_latency_counts_at_every_hop():
    counts = Counts(full((4, 16), 8.0), full((4, 1), 0.0))
    slow, fast = (
        seconds(LAYOUTS["er"], mesh_of((4, 4), latency=delay), counts, 8, OneByOne(), Uncongested())
        for delay in (2e-7, 0.0)
    )
    assert slow["all_reduce"] - fast["all_reduce"] == pytest.approx(6 * 2 * 2e-7, rel=1e-4)
    assert slow["dispatch"] - fast["dispatch"] == pytest.approx(4 * 2e-7, rel=1e-4)


# Entwined rings (IV-B).


@pytest.mark.parametrize(("name", "hops"), [("er", 6), ("her", 7)])
@pytest.mark.parametrize("models", [(OneByOne(), Uncongested()), (CONGESTED, CONGESTED)], ids=["eq_1", "congestion"])
def test_entwined_rings_take_what_they_take_in_rounds_of_single_hops(name, hops, models):
    # `er`: twice three steps of two hops, with half of a part each way. `her`: three such steps on a wafer, and over
    # two wafers one step of four hops with a whole part, for two members have one way round.
    layout, part = LAYOUTS[name], 256 * VECTOR / 4
    topology, cold = (
        mesh_of(layout.shape),
        Counts(full((layout.num_groups, layout.num_nodes), 0.0), full((8, 1), 0.0)),
    )
    told = seconds(layout, topology, cold, 256, *models)["all_reduce"]
    # Chunks that follow each other are late by one chunk for each hop after the first.
    assert told == pytest.approx(hops * part / RATE, rel=1e-5 if models[1] is not CONGESTED else 0.03)


def test_two_members_use_their_link_once():
    rounds = all_reduce_rounds(token_layout("er", (4, 2), 2))
    assert np.unique(rounds.traffic).tolist() == [0.0, 0.5]
    assert rounds.repeats.tolist() == [2.0]


def test_domains_of_one_device_are_one_plain_ring():
    rounds = all_reduce_rounds(token_layout("er", (4, 4), 16))
    order = np.asarray(des.block_rings((4, 4), 1)[0])
    plain = ring_all_reduce(order, 1.0, 16, bidirectional=True)
    np.testing.assert_allclose(des.total_traffic(rounds), des.total_traffic(plain), rtol=1e-6)


@pytest.mark.parametrize(("shape", "tp"), [((4, 4), 4), ((4, 8), 8), ((6, 6), 4), ((4, 2), 2)])
def test_square_domains_are_borne_out_hop_by_hop(shape, tp):
    # The simulator's nodes forward whole messages hop by hop, without a barrier; tiles here are squares.
    layout, size = token_layout("er", shape, tp), 1.2e6
    topology = mesh_of(shape, latency=1e-7)
    side = int(ring_step_hops(layout).max())
    fabric = fabric_of(topology, None)
    graph = GraphBuilder(fabric.num_links, 0)
    add_sends(graph, des.entwined_ring_sends(shape, (side, side), size), fabric.paths, [()] * layout.num_nodes)
    seen = simulate(graph.build(), fabric.rate, fabric.latency).makespan
    straight = Congestion(jnp.asarray(0.0), cut_through=True)
    told = priced_rounds(straight, topology, scaled(all_reduce_rounds(layout), size))
    assert float(told) == pytest.approx(seen, rel=1e-6)


@eqx.filter_jit
def priced_rounds(model, topology, rounds):
    return price_rounds(model, topology, rounds, HardMax()).seconds


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not LAYOUTS[name].sliced])
def test_traffic_of_every_token(name):
    layout = LAYOUTS[name]
    visited = tokens_of(layout, 5)
    rounds = np.asarray(exchanged(layout, visited))
    expected = np.zeros_like(rounds)
    for token, home in enumerate(token_homes(layout, len(visited)).tolist()):
        for node in np.flatnonzero(visited[token]):
            if layout.name == "successive":
                rank, size = home % layout.shape[1], layout.shape[1]
                relay = node // size * size + rank
                expected[0, node, relay] += layout.group[node] != layout.group[home]
                continue
            holders = layout.parts[home, :, node]
            np.add.at(expected[0, node], holders, 1 / len(holders))
        if layout.name == "successive":
            for part in range(layout.shape[0]):
                mine = visited[token, part * layout.shape[1] : (part + 1) * layout.shape[1]]
                expected[1, part * layout.shape[1] + home % layout.shape[1], home] += mine.any()
    np.testing.assert_allclose(rounds, expected, atol=1e-4)


@given(st.sampled_from([name for name in LAYOUTS if not LAYOUTS[name].sliced]), st.integers(0, 2**31))
@settings(max_examples=20)
def test_every_device_returns_what_it_got(name, seed):
    layout = LAYOUTS[name]
    visited = tokens_of(layout, 3, seed=seed)
    traffic = np.asarray(exchanged(layout, visited))[0]
    copies = visited.sum(axis=0)
    if layout.name == "successive":
        group = np.arange(len(visited)) // 3
        copies = copies - np.array([visited[group == layout.group[node], node].sum() for node in range(len(copies))])
    np.testing.assert_allclose(traffic.sum(axis=1), copies, rtol=1e-5)


# One of each way to slice and to cluster.
FEW = ("er", "esp", "dgx")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_the_simulator_bears_it_out(name):
    # 2 % is for the mean over cases (studies/moentwine); a single one has 3 %.
    layout, each = LAYOUTS[name], 64
    topology, visited = network_of(layout), tokens_of(layout, 64)
    told = seconds(layout, topology, counted(layout, visited), each)
    group = np.arange(len(visited)) // each
    seen = replay_communication(fabric_of(topology, CHUNK), layout, visited, group, VECTOR)
    total = sum(stage.seconds for stage in seen.values())
    assert sum(told[stage] for stage in seen) == pytest.approx(total, rel=0.03)
    assert told["all_reduce"] == pytest.approx(seen["all_reduce"].seconds, rel=0.03)


def test_the_simulator_keeps_the_same_links_busy():
    layout = LAYOUTS["er"]
    topology, visited = network_of(layout), tokens_of(layout, 8)
    stages = priced(
        token_communication(layout, topology, CONGESTED, CONGESTED), topology, counted(layout, visited), 8.0
    )
    seen = replay_communication(fabric_of(topology, CHUNK), layout, visited, np.arange(32) // 8, VECTOR)
    for name, stage in seen.items():
        np.testing.assert_allclose(stages[name].link_time, stage.link_busy, rtol=1e-4, atol=1e-12)


def test_links_between_domains_stay_cold_under_er():
    layout = token_layout("er", (6, 6), 4)
    topology = mesh_of((6, 6))
    stages = priced(
        token_communication(layout, topology, CONGESTED, CONGESTED),
        topology,
        balanced(64.0, 9, 36, 1, 128, 8),
        64.0,
    )
    ends = topology.link_ends
    between = layout.domain[ends[:, 0]] != layout.domain[ends[:, 1]]
    for name in ("dispatch", "combine"):
        assert (np.asarray(stages[name].link_bytes)[between] == 0).all()
        assert (np.asarray(stages[name].link_bytes)[~between] > 0).all()


def test_balanced_counts():
    # Two draws of four experts on two nodes: both on the same one with the chance 1/3.
    counts = balanced(3.0, 5, 2, 1, 4, 2)
    np.testing.assert_allclose(counts.node, np.full((5, 2), 3 * 5 / 6), rtol=1e-6)
    np.testing.assert_allclose(counts.cluster, np.full((5, 1), 3.0))
    # Eight experts on 32 nodes, each shared by four: two of 32 nodes are visited.
    np.testing.assert_allclose(balanced(1.0, 1, 32, 4, 8, 2).node, 2 / 32, rtol=1e-6)
    layout = LAYOUTS["er"]
    drawn = np.asarray(counted(layout, tokens_of(layout, 2000)).node).mean()
    assert np.asarray(balanced(2000.0, 4, 16, 1, 32, 4).node).mean() == pytest.approx(drawn, rel=0.02)


def test_one_group_of_devices_sends_nothing():
    layout = token_layout("er", (2, 2), 4)
    told = seconds(layout, mesh_of((2, 2)), Counts(full((1, 4), 1.0), full((1, 1), 1.0)), 4)
    assert told["all_reduce"] > 0
    assert told["dispatch"] == told["combine"] == 0


def test_groups_of_one_reduce_nothing():
    layout = token_layout("er", (2, 2), 1)
    told = seconds(layout, mesh_of((2, 2)), Counts(full((4, 4), 1.0), full((4, 1), 1.0)), 4)
    assert told["all_reduce"] == 0 < told["dispatch"]


def test_relaxed_holders_blend_exact_ones():
    er, base = (token_exchange(LAYOUTS[name], mesh_of((4, 4))) for name in ("er", "baseline"))
    counts = Counts(floats(np.random.default_rng(0).uniform(1, 2, (4, 16))), full((4, 1), 0.0))
    weights = np.eye(4, dtype=np.float32)
    soft = eqx.tree_at(lambda e: e.holds, er, jnp.asarray(weights[er.holds]))
    np.testing.assert_allclose(traffic_of(soft, counts), traffic_of(er, counts), rtol=1e-6)
    half = eqx.tree_at(lambda e: e.holds, soft, jnp.asarray((weights[er.holds] + weights[base.holds]) / 2))
    assert np.isfinite(np.asarray(traffic_of(half, counts))).all()


@pytest.mark.parametrize(
    "models",
    [pytest.param((OneByOne(), Uncongested()), marks=pytest.mark.slow), (CONGESTED, CONGESTED)],
    ids=["eq_1", "congestion"],
)
def test_derivatives(models):
    layout, topology = LAYOUTS["er"], mesh_of((4, 4), latency=1e-7)
    communication = token_communication(layout, topology, *models)
    counts = floats(np.random.default_rng(1).uniform(20, 40, (4, 16)))

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1))
    def total(log_rate, log_tokens):
        network = eqx.tree_at(lambda t: t.link_bandwidth, topology, topology.link_bandwidth * jnp.exp(log_rate))
        amount = jnp.exp(log_tokens)
        stages = communication(
            network, Counts(counts * amount, full((4, 1), 0.0)), 30 * amount, VECTOR, SmoothMax(jnp.asarray(0.1))
        )
        return 1e6 * sum(stage.seconds for stage in stages.values())

    step, slopes = 1e-2, total(0.0, 0.0)[1]
    for slope, along in zip(slopes, ((step, 0.0), (0.0, step)), strict=True):
        ahead, behind = (float(total(*(sign * part for part in along))[0]) for sign in (1, -1))
        assert float(slope) == pytest.approx((ahead - behind) / (2 * step), rel=1e-2)


def test_rings_and_fetching_lose_nothing_to_hops():
    # What links carry is what is sent times its hops.
    layout = LAYOUTS["baseline"]
    topology = mesh_of((4, 4))
    stages = priced(
        token_communication(layout, topology, CONGESTED, CONGESTED),
        topology,
        balanced(8.0, 4, 16, 1, 32, 4),
        8.0,
    )
    counts = np.asarray(balanced(8.0, 4, 16, 1, 32, 4).node)
    hops = hop_counts((4, 4))[layout.fetch, np.arange(16)]
    assert np.asarray(stages["combine"].link_bytes).sum() == pytest.approx((counts * hops).sum() * VECTOR, rel=1e-5)
