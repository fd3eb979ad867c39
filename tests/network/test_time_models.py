"""Time models: worked by hand, against loops over paths, and as functions that JAX can transform."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import paths as oracle
from oracles.arrays import floats, full
from oracles.cases import CHUNK, TIME_MODELS, pair_flows
from oracles.topologies import NETWORKS, mesh, random_traffic, with_random_numbers

from jaxmoe.hardware import AbstractTopology, clusters
from jaxmoe.network import AbstractTimeModel, AlphaBeta, Congestion, Flows, OneByOne, Uncongested, alpha_beta
from jaxmoe.relax import HardMax, SmoothMax

seeds = st.integers(0, 2**32 - 1)
every_network = pytest.mark.parametrize("topology", NETWORKS.values(), ids=NETWORKS.keys())


def messages(nodes: int, *sent: tuple[int, int, float]) -> np.ndarray:
    """Bytes [source, destination]."""
    traffic = np.zeros((nodes, nodes), np.float32)
    for source, destination, size in sent:
        traffic[source, destination] = size
    return traffic


def time_of(model: AbstractTimeModel, topology: AbstractTopology, traffic: np.ndarray) -> float:
    return float(eqx.filter_jit(model)(topology, jnp.asarray(traffic)).total(HardMax()))


def line(**numbers) -> AbstractTopology:
    """Nodes 0, 1, 2: 2 GB/s and 1 us from 0 to 1, 1 GB/s and 3 us from 1 to 2; slow the other way."""
    bandwidth, latency = floats([2e9, 1e9, 1e6, 1e6]), floats([1e-6, 3e-6, 1e-3, 1e-3])
    return dataclasses.replace(mesh((1, 3)), link_bandwidth=bandwidth, link_latency=latency, **numbers)


PORTS = {"injection_bandwidth": full(3, 0.5e9), "ejection_bandwidth": full(3, 4e9)}
ALONE = messages(3, (0, 2, 1e6))


@pytest.mark.parametrize(
    ("chunk", "numbers", "expected"),
    [
        (None, {}, 1e-3 + 4e-6),
        (1e5, {}, 1e-3 + 4e-6 + 50e-6),
        (0.0, {}, 1e-3 + 4e-6 + 500e-6),
        (1e7, {}, 1e-3 + 4e-6 + 500e-6),
        # 2 ms at the port that sends. A chunk of 100 kB waits 50, 100 and 25 us for the others.
        (None, PORTS, 2e-3 + 4e-6),
        (1e5, PORTS, 2e-3 + 4e-6 + 175e-6),
        (None, {"endpoint_latency": 1e-5}, 1e-3 + 4e-6 + 10e-6),
        (1e5, {"endpoint_latency": 1e-5}, 1e-3 + 4e-6 + 50e-6 + 10e-6),
        # Contention stretches loads of links and ports, and no delay.
        (None, {"efficiency": 0.5}, 2e-3 + 4e-6),
        (1e5, {"efficiency": 0.5}, 2e-3 + 4e-6 + 50e-6),
        (1e5, {"efficiency": 0.5, **PORTS}, 4e-3 + 4e-6 + 175e-6),
    ],
)
def test_congestion_of_a_lone_message(chunk, numbers, expected):
    model = Congestion(jnp.asarray(chunk or 0.0), cut_through=chunk is None)
    assert time_of(model, line(**numbers), ALONE) == pytest.approx(expected, rel=1e-6)


def test_congestion_adds_the_longest_path_to_the_busiest_link():
    # From 1 to 2 go 1 MB from 0, and 2 MB from 1. The longest path is that from 0, whose chunk waits 50 us.
    traffic = messages(3, (0, 2, 1e6), (1, 2, 2e6), (1, 1, 1e9))
    assert time_of(Congestion(jnp.asarray(1e5)), line(), traffic) == pytest.approx(3e-3 + 4e-6 + 50e-6, rel=1e-6)


def test_congestion_shares_ports_among_messages():
    # Node 0 sends 3 MB at 0.5 GB/s; with cut-through nothing else counts but 4 us to node 2.
    traffic = messages(3, (0, 1, 2e6), (0, 2, 1e6))
    model = Congestion(jnp.asarray(0.0), cut_through=True)
    assert time_of(model, line(**PORTS), traffic) == pytest.approx(6e-3 + 4e-6, rel=1e-6)
    # Node 2 receives 3 MB at 0.25 GB/s.
    ports = {"ejection_bandwidth": full(3, 0.25e9)}
    traffic = messages(3, (0, 2, 2e6), (1, 2, 1e6))
    assert time_of(model, line(**ports), traffic) == pytest.approx(12e-3 + 4e-6, rel=1e-6)


@pytest.mark.parametrize("hops", [1, 2, 5])
def test_uncongested_is_moentwine_equation_1(hops):
    topology = mesh((1, 6), 50e9, 2e-6)
    expected = (1e6 / 50e9 + 2e-6) * hops
    assert time_of(Uncongested(), topology, messages(6, (0, hops, 1e6))) == pytest.approx(expected, rel=1e-6)


def test_uncongested_takes_the_slowest_pair_and_shares_nothing():
    # (1 MB / 1 GB/s + 1 us) x 3 hops is less than (4 MB / 1 GB/s + 1 us) x 1 hop; both use link 0.
    traffic = messages(4, (0, 3, 1e6), (0, 1, 4e6), (2, 2, 1e9))
    assert time_of(Uncongested(), mesh((1, 4), 1e9, 1e-6), traffic) == pytest.approx(4e-3 + 1e-6, rel=1e-6)


def test_one_by_one_adds_up_what_a_node_sends_and_receives():
    # Node 0 sends 1 MB over 3 hops and 4 MB over one; node 3 receives 1 and 2 MB.
    traffic = messages(4, (0, 3, 1e6), (0, 1, 4e6), (2, 3, 2e6), (1, 1, 1e9))
    assert time_of(OneByOne(), mesh((1, 4), 1e9, 1e-6), traffic) == pytest.approx(7e-3 + 4e-6, rel=1e-6)


def test_uncongested_adds_up_links_that_differ():
    # 1 MB at 2 and at 1 GB/s, of which contention leaves half.
    assert time_of(Uncongested(), line(), ALONE) == pytest.approx(1.5e-3 + 4e-6, rel=1e-6)
    assert time_of(Uncongested(), line(efficiency=0.5), ALONE) == pytest.approx(3e-3 + 4e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("pipelined", "beta", "beta_within"),
    [
        (False, 2 / 400e9 + 2 / 50e9, 2 / 400e9),  # camoe Eq. 7: that of every hop
        (True, 1 / 50e9, 1 / 400e9),  # camoe, limitations: that of the slowest
    ],
)
def test_alpha_beta_of_hops(pipelined, beta, beta_within):
    topology = clusters(2, 4, 400e9, 1e-6, 50e9, 5e-6)
    constants = alpha_beta(topology, pipelined)
    # Node 0 to node 5: up over the leaf to the spine, and down again.
    alphas, betas = np.asarray(constants.alpha), np.asarray(constants.beta)
    assert alphas[0, 5] == pytest.approx(12e-6, rel=1e-6)
    assert betas[0, 5] == pytest.approx(beta, rel=1e-6)
    assert alphas[0, 3] == pytest.approx(2e-6, rel=1e-6)
    assert betas[0, 3] == pytest.approx(beta_within, rel=1e-6)
    np.testing.assert_array_equal(np.diag(betas), 0)
    # camoe Eq. 9: the slowest of all pairs.
    traffic = messages(8, (0, 5, 1e6), (0, 3, 2e6), (4, 4, 1e9))
    assert time_of(constants, topology, traffic) == pytest.approx(12e-6 + beta * 1e6, rel=1e-6)


MEASURED = AlphaBeta(
    alpha=floats([[9.0, 1.0, 2.0], [3.0, 9.0, 4.0], [5.0, 6.0, 9.0]]),
    beta=floats([[9.0, 0.5, 0.25], [1.0, 9.0, 2.0], [0.1, 0.2, 9.0]]),
)


def test_measured_alpha_beta_counts_whatever_lies_between():
    traffic = messages(3, (0, 1, 4.0), (1, 0, 1.0), (2, 1, 5.0), (1, 1, 100.0))
    # 1 + 0.5 x 4, 3 + 1 x 1, 6 + 0.2 x 5; nothing else is sent, though 4 s and more would be its alpha.
    assert time_of(MEASURED, line(), traffic) == 7.0
    assert time_of(MEASURED, line(), np.zeros((3, 3), np.float32)) == 0.0


def test_messages_sent_back_take_what_was_measured_the_other_way():
    flows = pair_flows(messages(3, (0, 1, 1.0), (1, 2, 1.0)), rounds=3)
    stage = eqx.filter_jit(MEASURED.of_mirrored)(line(), flows, jnp.asarray(4.0))
    # From 1 to 0: 3 + 1 x 4. From 2 to 1: 6 + 0.2 x 4. Three rounds of the slower.
    assert float(stage.total(HardMax())) == pytest.approx(3 * 7.0, rel=1e-6)
    traffic = jnp.asarray(messages(3, (0, 1, 4.0), (1, 2, 4.0)))
    assert float(mirrored(MEASURED, line(), traffic)[1]) == pytest.approx(7.0, rel=1e-6)


@eqx.filter_jit
def mirrored(model, topology, traffic):
    """Bytes of every link and the time of traffic sent back."""
    stage = model.mirrored(topology, traffic)
    return stage.link_bytes, stage.total(HardMax())


def test_traffic_sent_back_loads_the_links_of_flows_sent_back():
    traffic = messages(3, (0, 1, 4.0), (1, 2, 8.0))
    model = Congestion(jnp.asarray(0.0))
    back, seconds = mirrored(model, line(), jnp.asarray(traffic))
    flows = eqx.filter_jit(model.of_mirrored)(line(), pair_flows(traffic), jnp.asarray(1.0))
    np.testing.assert_allclose(back, flows.link_bytes)
    np.testing.assert_allclose(back, [0, 0, 4, 8])
    assert float(seconds) == pytest.approx(8e-6 + 1e-3, rel=1e-6)  # 8 B at 1 MB/s, 1 ms


@eqx.filter_jit
def totals(topology: AbstractTopology, traffic: jax.Array, reduction) -> dict[str, jax.Array]:
    return {name: model(topology)(topology, traffic).total(reduction) for name, model in TIME_MODELS.items()}


@eqx.filter_jit
def totals_of_flows(topology: AbstractTopology, flows: Flows, size) -> dict[str, jax.Array]:
    return {
        name: model(topology).of_flows(topology, flows, size).total(HardMax()) for name, model in TIME_MODELS.items()
    }


@eqx.filter_jit
def totals_sent_back(topology: AbstractTopology, flows: Flows, size) -> dict[str, jax.Array]:
    return {
        name: model(topology).of_mirrored(topology, flows, size).total(HardMax()) for name, model in TIME_MODELS.items()
    }


def expected_totals(topology: AbstractTopology, traffic: np.ndarray, mirrored: bool = False) -> dict[str, float]:
    """What walking the paths says; alpha-beta pairs are measured, and so do not retrace paths."""
    return {
        "stored": oracle.congestion(topology, traffic, CHUNK, False, mirrored)[0],
        "cut_through": oracle.congestion(topology, traffic, CHUNK, True, mirrored)[0],
        "uncongested": oracle.slowest_pair(topology, traffic, False, mirrored),
        "alpha_beta": oracle.slowest_pair(topology, traffic, False),
        "pipelined": oracle.slowest_pair(topology, traffic, True),
    }


def same(measured: dict[str, jax.Array], expected: dict[str, float], factor: float = 1.0) -> None:
    for name in TIME_MODELS:
        np.testing.assert_allclose(measured[name], factor * expected[name], rtol=1e-5, err_msg=name)


@every_network
@settings(max_examples=5)
@given(seed=seeds)
def test_every_model_agrees_with_walking_paths(topology, seed):
    rng = np.random.default_rng(seed)
    topology, traffic = with_random_numbers(topology, rng), random_traffic(rng, topology.num_nodes)
    same(totals(topology, jnp.asarray(traffic), HardMax()), expected_totals(topology, traffic))


@pytest.mark.parametrize("ports", [False, True])
def test_every_link_and_port_is_busy_for_its_load(ports):
    rng = np.random.default_rng(1)
    topology = with_random_numbers(NETWORKS["spines"], rng, ports)
    traffic = random_traffic(rng, topology.num_nodes)
    stage = eqx.filter_jit(Congestion(jnp.asarray(CHUNK)))(topology, jnp.asarray(traffic))
    total, link_time, port_time = oracle.congestion(topology, traffic, CHUNK, False)
    np.testing.assert_allclose(stage.link_time, link_time, rtol=1e-5)
    np.testing.assert_allclose(stage.port_time, port_time, rtol=1e-5)
    assert stage.port_time.shape == (12 if ports else 0,)
    assert float(stage.total(HardMax())) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    ["mesh", "detours", *(pytest.param(name, marks=pytest.mark.slow) for name in ("yx_mesh", "torus", "spines"))],
)
def test_flows_of_messages_of_one_size_take_what_their_traffic_takes(name):
    rng = np.random.default_rng(2)
    topology, nodes = with_random_numbers(NETWORKS[name], rng), NETWORKS[name].num_nodes
    sent = (rng.random((nodes, nodes)) < 0.6).astype(np.float32)
    vectors = rng.uniform(0.1, 3, nodes).astype(np.float32)  # of the messages to each node
    traffic, size = sent * vectors * 1e5, jnp.asarray(1e5)
    flows = pair_flows(sent, rounds=2, vectors=vectors)
    same(totals_of_flows(topology, flows, size), expected_totals(topology, traffic), factor=2)
    same(totals_sent_back(topology, flows, size), expected_totals(topology, traffic.T, mirrored=True), factor=2)


@pytest.mark.parametrize("name", ["mesh", "yx_mesh", "spines"])
@pytest.mark.parametrize("without", [None, "injection_bandwidth", "ejection_bandwidth"])
def test_links_and_ports_of_what_is_sent_back_are_numbered_as_they_are(name, without):
    rng = np.random.default_rng(3)
    topology, nodes = with_random_numbers(NETWORKS[name], rng), NETWORKS[name].num_nodes
    topology = dataclasses.replace(topology, **({without: None} if without else {}))
    sent = (rng.random((nodes, nodes)) < 0.4).astype(np.float32)
    stage = eqx.filter_jit(Congestion(jnp.asarray(CHUNK)).of_mirrored)(topology, pair_flows(sent), jnp.asarray(1e5))
    _, link_time, port_time = oracle.congestion(topology, 1e5 * sent.T, CHUNK, False, mirrored=True)
    np.testing.assert_allclose(stage.link_time, link_time, rtol=1e-5)
    np.testing.assert_allclose(stage.port_time, port_time, rtol=1e-5)


@every_network
def test_no_traffic_takes_no_time(topology):
    topology = with_random_numbers(topology, np.random.default_rng(0))
    traffic = floats(1e6 * np.eye(topology.num_nodes))
    assert set(map(float, totals(topology, traffic, HardMax()).values())) == {0.0}


@pytest.mark.parametrize("name", ["mesh", "torus", "spines"])
def test_many_traffics_at_once_equal_one_by_one(name):
    rng = np.random.default_rng(4)
    topology = with_random_numbers(NETWORKS[name], rng)
    traffic = jnp.asarray(np.stack([random_traffic(rng, topology.num_nodes) for _ in range(4)]))
    together = eqx.filter_vmap(totals, in_axes=(None, 0, None))(topology, traffic, HardMax())
    for index, one in enumerate(np.asarray(traffic)):
        alone = totals(topology, jnp.asarray(one), HardMax())
        same({name: np.asarray(values)[index] for name, values in together.items()}, alone)


@pytest.mark.parametrize("name", ["mesh", "spines"])
def test_smooth_time_tends_to_the_hard_one(name):
    rng = np.random.default_rng(5)
    topology = with_random_numbers(NETWORKS[name], rng)
    traffic = jnp.asarray(random_traffic(rng, topology.num_nodes))
    hard = totals(topology, traffic, HardMax())
    items = topology.num_links + 2 * topology.num_nodes + topology.num_nodes**2
    for temperature in (1.0, 0.1, 0.01, 0.001):
        smooth = totals(topology, traffic, SmoothMax(jnp.asarray(temperature)))
        for model in TIME_MODELS:
            excess = float(smooth[model] / hard[model]) - 1
            assert -1e-6 <= excess <= temperature * np.log(items) + 1e-6
