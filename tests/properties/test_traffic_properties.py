"""What must hold of any replayed traffic: conservation, bounds, symmetry; and how the model stands to it."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import paths as oracle
from oracles.arrays import floats, full
from oracles.topologies import NETWORKS, mesh, random_traffic, with_random_numbers

from jaxmoe.des import TrafficReplay, fabric_of, replay_traffic
from jaxmoe.hardware import AbstractTopology, ring, torus
from jaxmoe.network import Congestion
from jaxmoe.relax import HardMax

seeds = st.integers(0, 2**32 - 1)
every_network = pytest.mark.parametrize("topology", NETWORKS.values(), ids=NETWORKS.keys())
switching = pytest.mark.parametrize("cut_through", [False, True], ids=["stored", "cut_through"])


class Case(NamedTuple):
    """A network, traffic on it, and how it is sent."""

    topology: AbstractTopology
    traffic: np.ndarray
    chunk_bytes: float | None
    cut_through: bool
    order: str

    def replay(self) -> TrafficReplay:
        return replay_traffic(fabric_of(self.topology, self.chunk_bytes, self.cut_through), self.traffic, self.order)


def random_case(seed: int) -> Case:
    """Any network, with or without ports, sent in any way."""
    rng = np.random.default_rng(seed)
    topology = list(NETWORKS.values())[rng.integers(len(NETWORKS))]
    return Case(
        with_random_numbers(topology, rng, ports=bool(rng.integers(2))),
        random_traffic(rng, topology.num_nodes, density=rng.uniform(0.1, 1)).astype(float),
        chunk_bytes=[None, 5e4, 3e5][rng.integers(3)],
        cut_through=bool(rng.integers(2)),
        order=["staggered", "by_destination", "shuffled"][rng.integers(3)],
    )


def busy_times(case: Case) -> np.ndarray:
    """Bytes over rate of every link and port, by walking the paths."""
    loads = [oracle.link_loads(case.topology, case.traffic), oracle.port_loads(case.topology, case.traffic)]
    rates = [np.asarray(case.topology.link_bandwidth, float), oracle.port_rates(case.topology)]
    return np.concatenate(loads) / (np.concatenate(rates) * float(case.topology.efficiency))


@settings(max_examples=100)
@given(seeds)
def test_bytes_are_conserved_on_every_link_and_port_and_none_outruns_its_load(seed):
    case = random_case(seed)
    replay, expected = case.replay(), busy_times(case)
    busy = replay.run.link_busy
    np.testing.assert_allclose(busy[: expected.size], expected, rtol=1e-9)
    assert not busy[expected.size :].any()  # ports that only delay
    np.testing.assert_array_equal(replay.link_busy, busy[: case.topology.num_links])
    assert replay.completion_s >= expected.max(initial=0.0) * (1 - 1e-9)
    assert replay.completion_s == replay.received_s.max()


def alone(case: Case, source: int, destination: int, path: list[int]) -> float:
    """Seconds of the message between two nodes if it were the only one."""
    topology, size = case.topology, float(case.traffic[source, destination])
    rates = [rate * float(topology.efficiency) for rate in oracle.station_rates(topology, source, destination, path)]
    delay = float(topology.endpoint_latency) + sum(oracle.at(topology.link_latency, path))
    if case.cut_through:
        return delay + size / min(rates)
    return delay + oracle.lone_message(rates, size, case.chunk_bytes or np.inf)


@given(seeds)
def test_no_message_is_faster_for_not_being_alone(seed):
    case = random_case(seed)._replace(order="staggered")
    received = case.replay().received_s
    for source, destination, path in oracle.walks(case.topology):
        if case.traffic[source, destination] > 0:
            assert received[destination] >= alone(case, source, destination, path) * (1 - 1e-9)


@eqx.filter_jit
def predicted(model: Congestion, topology: AbstractTopology, traffic) -> jnp.ndarray:
    return model(topology, traffic).total(HardMax())


def lone_message(topology: AbstractTopology, rng: np.random.Generator, chunks: float, cut_through: bool) -> Case:
    """One message of so many chunks between two nodes, whose routers are ideal."""
    source, destination = rng.choice(topology.num_nodes, 2, replace=False)
    chunk = float(rng.integers(1000, 100_000))
    traffic = np.zeros((topology.num_nodes, topology.num_nodes))
    traffic[source, destination] = round(chunks * chunk)
    return Case(topology, traffic, chunk, cut_through, "staggered")


def times(case: Case) -> tuple[float, float]:
    """Seconds that the model tells and that the simulator sees."""
    model = Congestion(floats(case.chunk_bytes), case.cut_through)
    told = float(predicted(model, case.topology, floats(case.traffic)))
    return told, case.replay().completion_s


whole_chunks = st.integers(1, 20)
broken_chunks = st.floats(0.1, 20)


@switching
@every_network
@settings(max_examples=10)
@given(seed=seeds, chunks=whole_chunks)
def test_a_lone_message_of_whole_chunks_takes_what_the_model_tells(topology, cut_through, seed, chunks):
    rng = np.random.default_rng(seed)
    topology = dataclasses.replace(with_random_numbers(topology, rng), efficiency=1.0)
    told, seen = times(lone_message(topology, rng, chunks, cut_through))
    assert told == pytest.approx(seen, rel=1e-6)


@switching
@every_network
@settings(max_examples=10)
@given(seed=seeds, chunks=broken_chunks)
def test_a_lone_message_over_equal_links_takes_what_the_model_tells(topology, cut_through, seed, chunks):
    rng = np.random.default_rng(seed)
    varied = with_random_numbers(topology, rng)
    equal = [full(size, 2e9) for size in (topology.num_links, topology.num_nodes, topology.num_nodes)]
    fields = ("link_bandwidth", "injection_bandwidth", "ejection_bandwidth")
    topology = dataclasses.replace(varied, **dict(zip(fields, equal, strict=True)), efficiency=1.0)
    told, seen = times(lone_message(topology, rng, chunks, cut_through))
    assert told == pytest.approx(seen, rel=1e-6)


@every_network
@settings(max_examples=10)
@given(seed=seeds, chunks=broken_chunks)
def test_a_lone_message_cuts_through_as_the_model_tells_whatever_its_chunks(topology, seed, chunks):
    rng = np.random.default_rng(seed)
    told, seen = times(lone_message(with_random_numbers(topology, rng), rng, chunks, cut_through=True))
    assert told == pytest.approx(seen, rel=1e-6)


@every_network
@settings(max_examples=10)
@given(seed=seeds, chunks=broken_chunks)
def test_a_shorter_last_chunk_makes_the_model_an_upper_bound(topology, seed, chunks):
    """Behind the slowest station it is faster than the chunk that the model takes it for."""
    rng = np.random.default_rng(seed)
    topology = dataclasses.replace(with_random_numbers(topology, rng), efficiency=1.0)
    case = lone_message(topology, rng, chunks, cut_through=False)
    told, seen = times(case)
    ((source, destination),) = np.argwhere(case.traffic)
    path = list(topology.paths()[source][destination])
    assert seen == pytest.approx(alone(case, source, destination, path), rel=1e-9)
    waits = [1 / rate for rate in oracle.station_rates(topology, source, destination, path)]
    missing = -case.traffic.sum() % case.chunk_bytes  # B that the last chunk is short of
    assert seen * (1 - 1e-6) <= told <= (seen + missing * (sum(waits) - max(waits))) * (1 + 1e-6)


def moved(topology: AbstractTopology, to: np.ndarray) -> AbstractTopology:
    """The same network with node n under the number to[n]: its links and ports take their numbers along."""
    ends = topology.link_ends.tolist()
    link = np.argsort([ends.index([int(to[a]), int(to[b])]) for a, b in ends])
    node = np.argsort(to)
    return dataclasses.replace(
        topology,
        link_bandwidth=topology.link_bandwidth[link],
        link_latency=topology.link_latency[link],
        injection_bandwidth=topology.injection_bandwidth[node],
        ejection_bandwidth=topology.ejection_bandwidth[node],
    )


def check_moved(case: Case, to: np.ndarray) -> None:
    """Under other numbers, the same nodes receive at the same time."""
    node = np.argsort(to)
    other = case._replace(topology=moved(case.topology, to), traffic=case.traffic[np.ix_(node, node)])
    one, another = case.replay(), other.replay()
    np.testing.assert_allclose(another.received_s[to], one.received_s, rtol=1e-12)
    np.testing.assert_allclose(np.sort(another.link_busy), np.sort(one.link_busy), rtol=1e-12)


def reflections(shape: tuple[int, int]) -> list[np.ndarray]:
    grid = np.arange(shape[0] * shape[1]).reshape(shape)
    return [grid[::-1].ravel(), grid[:, ::-1].ravel(), grid[::-1, ::-1].ravel()]


def shifts(shape: tuple[int, int]) -> list[np.ndarray]:
    grid = np.arange(shape[0] * shape[1]).reshape(shape)
    return [np.roll(grid, (x, y), (0, 1)).ravel() for x, y in np.ndindex(shape)]


SYMMETRIES = {
    "mesh": (mesh((3, 4)), reflections((3, 4))),
    "yx_mesh": (mesh((3, 4), routing="yx"), reflections((3, 4))),
    "torus": (torus((3, 4), 1.0, 0.0), shifts((3, 4))),
}


@pytest.mark.parametrize("name", SYMMETRIES)
@given(seed=seeds)
def test_symmetries_of_a_network_change_nothing_where_every_node_sends_one_message(name, seed):
    rng = np.random.default_rng(seed)
    topology, ways = SYMMETRIES[name]
    nodes = topology.num_nodes
    traffic = np.zeros((nodes, nodes))
    traffic[np.arange(nodes), rng.permutation(nodes)] = rng.uniform(1e4, 1e6, nodes)
    case = Case(with_random_numbers(topology, rng), traffic, 5e4, bool(rng.integers(2)), "by_destination")
    check_moved(case, ways[rng.integers(len(ways))])


@given(seeds, st.integers(1, 5))
def test_turning_a_ring_changes_nothing_where_messages_go_round(seed, step):
    rng = np.random.default_rng(seed)
    topology = with_random_numbers(ring(6, 1.0, 0.0), rng)
    case = Case(topology, random_traffic(rng, 6).astype(float), 5e4, bool(rng.integers(2)), "staggered")
    check_moved(case, np.roll(np.arange(6), step))


def with_more_bandwidth(topology: AbstractTopology, rng: np.random.Generator) -> AbstractTopology:
    """A quarter of the links up to four times as fast."""
    factor = np.where(rng.random(topology.num_links) < 0.25, rng.uniform(1, 4, topology.num_links), 1)
    return dataclasses.replace(topology, link_bandwidth=topology.link_bandwidth * floats(factor))


def test_more_bandwidth_seldom_makes_a_replay_slower():
    """It can, by a few percent: what a faster link brings early stands before what the last message waits for."""
    cases = [random_case(seed)._replace(order="staggered") for seed in range(200)]
    slower = 0
    for seed, case in enumerate(cases):
        faster = case._replace(topology=with_more_bandwidth(case.topology, np.random.default_rng(seed)))
        slower += faster.replay().completion_s > case.replay().completion_s * (1 + 1e-9)
    assert slower <= 0.05 * len(cases)
