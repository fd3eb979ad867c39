"""Stage times worked out by hand, and against the loops."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import network as oracle
from oracles.arrays import floats
from oracles.cases import congestion, mirrored_congestion
from oracles.paths import xy_path

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion, Flows
from jaxmoe.relax import HardMax

SHAPE = (2, 3)


def mesh_of(bandwidth=None, latency=0.0, injection=None, ejection=None, shape=SHAPE):
    links = num_links(shape)
    bandwidth = np.full(links, 1e9) if bandwidth is None else bandwidth
    ports = [None if value is None else jnp.full(shape[0] * shape[1], value) for value in (injection, ejection)]
    return Mesh(jnp.asarray(bandwidth, jnp.float32), jnp.full(links, latency), *ports, shape=shape)


def flow(source, destination, amount=1.0, shape=SHAPE):
    nodes = shape[0] * shape[1]
    messages = np.zeros((nodes, nodes))
    messages[source, destination] = amount
    return messages


def time_of(stage, mesh, messages, size=1e6, chunk=None, rounds=1, vectors=1.0):
    """Without chunks: cut-through."""
    flows = cases.pair_flows(messages, rounds, vectors)
    if chunk is None:
        model = Congestion(jnp.asarray(0.0), cut_through=True)
        way = model.of_flows if stage is congestion else model.of_mirrored
        return float(eqx.filter_jit(way)(mesh, flows, jnp.asarray(size)).total(HardMax()))
    return float(eqx.filter_jit(stage)(mesh, flows, jnp.asarray(size), jnp.asarray(chunk)).total(HardMax()))


# Chunk in B (none is cut-through, 0 the message whole), and s that a quarter of a MB waits for it on the path below.
CHUNKS = [(None, 0.0), (1e5, 50e-6 + 25e-6), (1e6, 125e-6 + 62.5e-6), (0.0, 125e-6 + 62.5e-6)]


def path_bandwidths():
    """From node 0 (0, 0) down to (1, 0), then right to (1, 1) and (1, 2): 2, 1 and 4 GB/s; others slow."""
    bandwidth = np.full(num_links(SHAPE), 1e6)
    bandwidth[xy_path(SHAPE, 0, 5)] = [2e9, 1e9, 4e9]
    return bandwidth


def test_a_lone_flow_cut_through():
    # 1 MB at the slowest link's 1 GB/s, and three hops of 1 us.
    measured = time_of(congestion, mesh_of(path_bandwidths(), 1e-6), flow(0, 5))
    assert measured == pytest.approx(1e-3 + 3e-6, rel=1e-6)


def test_a_lone_flow_store_and_forward():
    # A chunk of 100 kB waits 50 us at 2 GB/s and 25 us at 4 GB/s beside the stream over the slowest link.
    measured = time_of(congestion, mesh_of(path_bandwidths(), 1e-6), flow(0, 5), chunk=1e5)
    assert measured == pytest.approx(1e-3 + 3e-6 + 50e-6 + 25e-6, rel=1e-6)


def test_a_message_smaller_than_the_chunk_waits_for_itself_only():
    mesh = mesh_of(path_bandwidths(), 1e-6)
    measured = time_of(congestion, mesh, flow(0, 5), size=1e4, chunk=1e5)
    assert measured == pytest.approx(1e-5 + 3e-6 + 5e-6 + 2.5e-6, rel=1e-6)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("chunk", "waits"), CHUNKS)
def test_a_message_of_a_quarter_vector_pays_latencies_in_full_and_chunks_up_to_its_size(chunk, waits, mirrored):
    mesh = mesh_of(path_bandwidths(), 1e-6)
    stage, mesh = (mirrored_congestion, mesh.reversed()) if mirrored else (congestion, mesh)
    measured = time_of(stage, mesh, flow(0, 5), chunk=chunk, vectors=0.25)
    assert measured == pytest.approx(0.25e-3 + 3e-6 + waits, rel=1e-6)


def test_a_message_of_several_vectors_is_not_cut_at_one():
    # Three vectors of 10 kB as one message, in chunks of 20 kB: more than a vector, less than the message.
    measured = time_of(congestion, mesh_of(path_bandwidths(), 1e-6), flow(0, 5), size=1e4, chunk=2e4, vectors=3)
    assert measured == pytest.approx(3e-5 + 3e-6 + 10e-6 + 5e-6, rel=1e-6)


def test_every_message_waits_for_its_own_chunks():
    # A whole vector to a neighbour, and a quarter of one over the path of three hops, in chunks of up to 1 MB.
    mesh, messages = mesh_of(path_bandwidths(), 1e-6), flow(0, 5) + flow(0, 3)
    vectors = np.where(np.arange(6) == 5, 0.25, 1)
    # The link they share, from (0, 0) to (1, 0), has 2 GB/s and 1.25 MB to carry; the slower next one has 0.25 MB.
    measured = time_of(congestion, mesh, messages, chunk=1e6, vectors=vectors)
    assert measured == pytest.approx(1.25e6 / 2e9 + 3e-6 + 0.25e6 / 2e9 + 0.25e6 / 4e9, rel=1e-6)


def test_the_busiest_link_counts_by_its_own_bandwidth():
    # Both use (0,1) -> (0,2), the second alone (0,0) -> (0,1); the shared link has twice the bandwidth.
    bandwidth = np.full(num_links(SHAPE), 1e9)
    bandwidth[xy_path(SHAPE, 1, 2)] = 2e9
    messages = flow(1, 2, 2.0) + flow(0, 2, 1.0)
    assert time_of(congestion, mesh_of(bandwidth), messages) == pytest.approx(3e6 / 2e9, rel=1e-6)


def test_rounds_repeat_loads_and_delays():
    mesh = mesh_of(path_bandwidths(), 1e-6)
    once = time_of(congestion, mesh, flow(0, 5), chunk=1e5)
    assert time_of(congestion, mesh, flow(0, 5), chunk=1e5, rounds=3) == pytest.approx(3 * once, rel=1e-6)


def test_ports_limit_what_a_node_sends_and_receives():
    messages = flow(0, 1) + flow(0, 3) + flow(0, 4)
    assert time_of(congestion, mesh_of(injection=5e8), messages) == pytest.approx(3e6 / 5e8, rel=1e-6)
    assert time_of(congestion, mesh_of(ejection=1e8), messages) == pytest.approx(1e6 / 1e8, rel=1e-6)
    # Sent back, node 0 receives what it sent.
    assert time_of(mirrored_congestion, mesh_of(ejection=5e8), messages) == pytest.approx(3e6 / 5e8, rel=1e-6)


def test_messages_of_a_node_to_itself_cost_nothing():
    assert time_of(congestion, mesh_of(latency=1e-6, injection=1e6, ejection=1e6), flow(2, 2)) == 0


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_stage_equals_the_loops(seed, mirrored):
    rng = np.random.default_rng(seed)
    machine = cases.random_machine(rng, (3, 4), ports=True)
    messages, vectors = rng.integers(0, 4, (12, 12)).astype(float), rng.uniform(0.1, 3, 12)
    stage = mirrored_congestion if mirrored else congestion
    sizes = (jnp.asarray(8192.0), jnp.asarray(512.0))
    measured = eqx.filter_jit(stage)(machine.topology, cases.pair_flows(messages, 2, vectors), *sizes)
    total, link_time = oracle.stage(machine, messages, 8192.0, 512.0, 2, mirrored, vectors)
    np.testing.assert_allclose(measured.link_time, link_time, rtol=1e-5)
    assert float(measured.total(HardMax())) == pytest.approx(total, rel=1e-5)


def test_a_spread_out_flow_is_the_sum_of_its_pairs():
    """A flow from many nodes to one loads links and ports as its messages one by one do."""
    rng = np.random.default_rng(7)
    machine = cases.random_machine(rng, (3, 4), ports=True)
    source = rng.integers(0, 3, (5, 12)).astype(float)
    destination = np.eye(12)[rng.integers(12, size=5)]
    flows = Flows(*(floats(a) for a in (source, destination, np.ones(5))))
    messages = source.T @ destination
    total, link_time = oracle.stage(machine, messages, 8192.0, 512.0)
    measured = eqx.filter_jit(congestion)(machine.topology, flows, jnp.asarray(8192.0), jnp.asarray(512.0))
    np.testing.assert_allclose(measured.link_time, link_time, rtol=1e-5, atol=1e-12)
    assert float(measured.total(HardMax())) == pytest.approx(total, rel=1e-5)
