"""Multicasts: against plain loops over paths, by hand, and against the event simulator."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from collective_cases import (
    BANDWIDTH,
    EXACT,
    LATENCY,
    SIZE,
    WHOLE,
    mesh_of,
    multicasts_of,
    replay,
    seconds,
    uneven_mesh,
)
from hypothesis import given
from hypothesis import strategies as st
from oracles.arrays import floats, full

from jaxmoe.des import schedules as des
from jaxmoe.hardware import clusters, torus
from jaxmoe.hardware.networks import link_ends
from jaxmoe.network import (
    Congestion,
    all_to_all,
    multicast_loads,
    multicast_stage,
)

seeds = st.integers(0, 2**32 - 1)


def random_multicasts(rng, nodes, count=3):
    return (
        rng.integers(nodes, size=count),
        (rng.random((count, nodes)) < 0.4).astype(float),
        rng.uniform(1e5, 1e6, count),
    )


jitted_stage, jitted_loads = eqx.filter_jit(multicast_stage), eqx.filter_jit(multicast_loads)


def multicast_seconds(topology, multicasts, model=WHOLE):
    return float(jitted_stage(model, topology, multicasts).total(EXACT))


NETWORKS = {
    "xy": uneven_mesh((3, 4)),
    "yx": uneven_mesh((3, 4), routing="yx"),
    "torus": torus((3, 4), BANDWIDTH, LATENCY),
    "clusters": clusters(3, 4, BANDWIDTH, LATENCY, BANDWIDTH, LATENCY, spines=2),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_link_carries_a_message_once(network, seed):
    topology = NETWORKS[network]
    source, destinations, size = random_multicasts(np.random.default_rng(seed), 12)
    paths, expected = topology.paths(), np.zeros(topology.num_links)
    for start, to, amount in zip(source, destinations, size, strict=True):
        used = {link for destination in np.flatnonzero(to) for link in paths[start][destination]}
        expected[sorted(used)] += amount
    loads = jitted_loads(topology, multicasts_of(source, destinations, size))
    np.testing.assert_allclose(loads, expected, rtol=1e-5)


def test_a_broadcast_crosses_every_node_once():
    loads = jitted_loads(mesh_of((4, 4)), multicasts_of([5], np.ones((1, 16)), [1.0]))
    assert float(loads.sum()) == 15
    assert np.bincount(link_ends((4, 4))[:, 1], np.asarray(loads), 16).tolist() == [*[1] * 5, 0, *[1] * 10]


def test_multicasts_at_once_add_up():
    one, other = (random_multicasts(np.random.default_rng(seed), 12) for seed in (0, 1))
    mesh = uneven_mesh((3, 4))
    both = multicasts_of(*(np.concatenate(parts) for parts in zip(one, other, strict=True)))
    np.testing.assert_allclose(
        jitted_loads(mesh, both),
        jitted_loads(mesh, multicasts_of(*one)) + jitted_loads(mesh, multicasts_of(*other)),
        rtol=1e-6,
    )


def test_a_multicast_takes_its_busiest_link_and_its_longest_path():
    # From the corner of a 3x3 mesh to all, in chunks of a tenth: four hops, three of which wait for a chunk.
    everyone = multicasts_of([0], np.ones((1, 9)), [SIZE])
    measured = multicast_seconds(mesh_of((3, 3)), everyone, Congestion(jnp.asarray(SIZE / 10)))
    assert measured == pytest.approx(SIZE / BANDWIDTH * 1.3 + 4 * LATENCY, rel=1e-6)


def test_ports_send_a_message_once_and_receive_it_everywhere():
    to = np.ones((1, 9))
    slow = full(9, BANDWIDTH / 10)
    sending = mesh_of((3, 3), injection_bandwidth=slow)
    receiving = mesh_of((3, 3), ejection_bandwidth=slow)
    cut_through = Congestion(jnp.asarray(0.0), cut_through=True)
    expected = 10 * SIZE / BANDWIDTH + 4 * LATENCY
    for mesh in (sending, receiving):
        assert multicast_seconds(mesh, multicasts_of([0], to, [SIZE]), cut_through) == pytest.approx(expected, rel=1e-6)
    # Two messages from different nodes leave by different ports, and meet where they arrive.
    two = multicasts_of([0, 8], np.ones((2, 9)), [SIZE, SIZE])
    assert multicast_seconds(sending, two, cut_through) == pytest.approx(expected, rel=1e-6)
    twice = expected + 10 * SIZE / BANDWIDTH
    assert multicast_seconds(receiving, two, cut_through) == pytest.approx(twice, rel=1e-6)


def test_a_message_to_its_sender_is_free():
    mesh = mesh_of((3, 3), injection_bandwidth=full(9, 1.0), ejection_bandwidth=full(9, 1.0))
    assert multicast_seconds(mesh, multicasts_of([4], np.eye(9)[4:5], [SIZE])) == 0


@given(seeds)
def test_a_multicast_is_never_slower_than_its_messages_one_by_one(seed):
    mesh, chunk = uneven_mesh((3, 4)), 1e5
    source, destinations, size = random_multicasts(np.random.default_rng(seed), 12, count=2)
    unicasts = np.zeros((12, 12))
    for start, to, amount in zip(source, destinations, size, strict=True):
        unicasts[start] += to * amount
    model = Congestion(jnp.asarray(chunk))
    together = multicast_seconds(mesh, multicasts_of(source, destinations, size), model)
    assert together <= seconds(mesh, all_to_all(floats(unicasts)), model) * (1 + 1e-6)


@given(seeds)
def test_lone_multicasts_are_borne_out(seed):
    rng = np.random.default_rng(seed)
    mesh, chunk = mesh_of((3, 4)), SIZE / 8
    source, to = int(rng.integers(12)), np.flatnonzero(rng.random(12) < 0.5).tolist()
    sends = des.tree_sends(des.multicast_tree((3, 4), source, to), SIZE, chunk)
    multicast = multicasts_of([source], np.eye(12)[to].sum(axis=0)[None], [SIZE])
    told = multicast_seconds(mesh, multicast, Congestion(jnp.asarray(chunk)))
    assert told == pytest.approx(replay(mesh, sends), rel=1e-6)
