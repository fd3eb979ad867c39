"""Collectives: by hand, against plain loops over paths, and against the event simulator."""

from functools import partial

import equinox as eqx
import jax
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
    replay,
    seconds,
    uneven_mesh,
)
from hypothesis import given
from hypothesis import strategies as st
from oracles import schedules as des
from oracles.arrays import floats, full

from jaxmoe.hardware import fully_connected, ring
from jaxmoe.hardware.networks import link_ends
from jaxmoe.network import (
    Congestion,
    all_to_all,
    build_exchange,
    price_rounds,
    ring_all_reduce,
    ring_reduce_scatter,
)
from jaxmoe.network.token_communication import all_reduce_rounds
from jaxmoe.network.token_communication import scaled as scaled_rounds
from jaxmoe.placement.token_layout import token_layout
from jaxmoe.relax import SmoothMax

seeds = st.integers(0, 2**32 - 1)


def step(members, ways=1, size=SIZE):
    """A part of the buffer over one hop, s."""
    return size / members / ways / BANDWIDTH + LATENCY


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (4, 4)])
def test_rings_take_the_textbook_time(shape):
    nodes, order = shape[0] * shape[1], np.asarray(des.block_rings(shape, 1)[0])
    mesh = mesh_of(shape)
    scatter = seconds(mesh, ring_reduce_scatter(order, SIZE, nodes))
    assert scatter == pytest.approx((nodes - 1) * step(nodes), rel=1e-6)
    assert seconds(mesh, ring_all_reduce(order, SIZE, nodes)) == pytest.approx(2 * scatter, rel=1e-6)


def test_a_bidirectional_ring_halves_bytes_but_not_latencies():
    rounds = ring_all_reduce(np.arange(8), SIZE, 8, bidirectional=True)
    assert seconds(ring(8, BANDWIDTH, LATENCY), rounds) == pytest.approx(14 * step(8, ways=2), rel=1e-6)
    # Two members have one link to each other, and both halves go over it.
    both = ring_all_reduce(np.arange(2), SIZE, 2, bidirectional=True)
    assert seconds(ring(2, BANDWIDTH, LATENCY), both) == pytest.approx(2 * step(2), rel=1e-6)


def test_a_ring_of_one_takes_no_time():
    assert seconds(ring(3, BANDWIDTH, LATENCY), ring_all_reduce(np.array([1]), SIZE, 3)) == 0


def test_rings_at_once_wait_for_the_one_with_most():
    orders = np.asarray(des.block_rings((4, 4), 4))
    sizes = jnp.asarray([SIZE, 2 * SIZE, 3 * SIZE, SIZE / 2])
    rounds = ring_all_reduce(orders, sizes, 16)
    assert seconds(mesh_of((4, 4)), rounds) == pytest.approx(6 * step(4, size=3 * SIZE), rel=1e-6)
    sent = np.asarray(des.total_traffic(rounds)).sum(axis=1)
    np.testing.assert_allclose(sent[orders], np.broadcast_to(2 * 3 / 4 * np.asarray(sizes)[:, None], (4, 4)), rtol=1e-6)


def test_the_ring_of_the_exchange_sends_the_same():
    exchange = build_exchange("rings_2x2", mesh_of((4, 4)))
    orders = np.asarray(des.block_rings((4, 4), 4))
    traffic = np.asarray(ring_reduce_scatter(orders, 4.0, 16).traffic)[0]
    np.testing.assert_array_equal(traffic, np.eye(16)[np.asarray(exchange.successor)])


def test_rounds_follow_each_other():
    order = np.arange(4)
    scatter, gather = (ring_reduce_scatter(order, size, 4) for size in (SIZE, 2 * SIZE))
    network = ring(4, BANDWIDTH, LATENCY)
    both = seconds(network, scatter.then(gather))
    assert both == pytest.approx(seconds(network, scatter) + seconds(network, gather), rel=1e-6)


one_round = jax.jit(lambda mesh, traffic: WHOLE(mesh, traffic))


@given(seeds)
def test_all_to_all_of_uneven_sizes_is_one_round(seed):
    traffic = jnp.asarray(np.random.default_rng(seed).integers(0, 4, (12, 12)) * 1e4, jnp.float32)
    mesh = uneven_mesh((3, 4))
    expected = float(one_round(mesh, traffic).total(EXACT))
    assert seconds(mesh, all_to_all(traffic)) == pytest.approx(expected, rel=1e-6)


def test_smooth_times_are_an_upper_bound_that_closes():
    rounds = ring_all_reduce(np.asarray(des.entwined_rings((4, 4), (2, 2))), SIZE, 16, bidirectional=True)
    mesh = uneven_mesh((4, 4))
    hard = seconds(mesh, rounds)
    smooth = [seconds(mesh, rounds, reduction=SmoothMax(jnp.asarray(t))) for t in (0.1, 0.01, 0.001)]
    assert smooth[0] > smooth[1] > smooth[2] >= hard * (1 - 1e-6)
    assert smooth[2] == pytest.approx(hard, rel=1e-2)


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_rings_of_equal_links_are_borne_out(nodes, bidirectional):
    network = ring(nodes, BANDWIDTH, LATENCY)
    seen = replay(network, des.ring_all_reduce_sends(range(nodes), SIZE, bidirectional))
    told = seconds(network, ring_all_reduce(np.arange(nodes), SIZE, nodes, bidirectional))
    assert told == pytest.approx(seen, rel=1e-6)


@given(seeds)
def test_rings_of_unequal_links_lie_between_their_slowest_link_and_rounds(seed):
    # Without rounds a member need not wait for all others. The slowest link is busy for all steps, and nothing takes
    # longer than if every step waited for the slowest: n (s + l) is told, n s + l <= seen <= n (s + l).
    mesh, order = uneven_mesh((4, 4), seed), des.block_rings((4, 4), 1)[0]
    told = seconds(mesh, ring_all_reduce(np.asarray(order), SIZE, 16))
    seen = replay(mesh, des.ring_all_reduce_sends(order, SIZE))
    index = {tuple(pair): link for link, pair in enumerate(link_ends((4, 4)).tolist())}
    used = [index[start, end] for start, end in zip(order, np.roll(order, -1).tolist(), strict=True)]
    busy = SIZE / 16 / np.asarray(mesh.link_bandwidth)[used]
    assert told == pytest.approx(30 * (busy.max() + np.asarray(mesh.link_latency)[used].max()), rel=1e-5)
    assert 30 * busy.max() + np.asarray(mesh.link_latency)[used].min() <= seen * (1 + 1e-6)
    assert seen <= told * (1 + 1e-6)


def test_all_to_all_without_contention_is_borne_out():
    traffic = np.random.default_rng(0).uniform(1e5, 1e6, (6, 6))
    network = fully_connected(6, BANDWIDTH, LATENCY)
    seen = replay(network, des.all_to_all_sends(traffic))
    assert seconds(network, all_to_all(floats(traffic))) == pytest.approx(seen, rel=1e-6)


def test_all_to_all_on_a_mesh_is_borne_out():
    traffic, mesh = np.random.default_rng(1).uniform(1e5, 1e6, (16, 16)), mesh_of((4, 4))
    seen = replay(mesh, des.all_to_all_sends(traffic), chunk_bytes=4096.0)
    told = seconds(mesh, all_to_all(floats(traffic)), Congestion(jnp.asarray(4096.0)))
    assert told == pytest.approx(seen, rel=0.1)


def scaled(mesh, log_bandwidth, log_latency):
    numbers = (mesh.link_bandwidth * jnp.exp(log_bandwidth), mesh.link_latency * jnp.exp(log_latency))
    return eqx.tree_at(lambda m: (m.link_bandwidth, m.link_latency), mesh, numbers)


def pair_traffic(size):
    return jnp.asarray(np.random.default_rng(3).uniform(0.1, 1, (8, 8))) * size


ORDER = np.asarray(des.block_rings((4, 2), 1)[0])
ROUNDS = {
    "all_to_all": lambda size: all_to_all(pair_traffic(size)),
    "reduce_scatter": lambda size: ring_reduce_scatter(ORDER, size, 8),
    "all_reduce": lambda size: ring_all_reduce(ORDER, size, 8, bidirectional=True),
    "entwined": lambda size: scaled_rounds(all_reduce_rounds(token_layout("er", (4, 2), 2)), size),
    "hierarchical": lambda size: scaled_rounds(all_reduce_rounds(token_layout("her", (4, 2), 4, (2, 2))), size),
}


def log_time(name, mesh, log_bandwidth, log_latency, log_size):
    """Logarithms keep numbers of all sizes alike. Links are unequal, so no two are the slowest."""
    mesh, size = scaled(mesh, log_bandwidth, log_latency), SIZE * jnp.exp(log_size)
    return jnp.log(price_rounds(WHOLE, mesh, ROUNDS[name](size), EXACT).seconds)


ONE_OF_A_KIND = ("all_to_all", "hierarchical", "entwined")


@pytest.mark.parametrize(
    "name",
    [*ONE_OF_A_KIND, *(pytest.param(name, marks=pytest.mark.slow) for name in ROUNDS if name not in ONE_OF_A_KIND)],
)
def test_gradients_equal_finite_differences(name):
    with jax.enable_x64(True):
        mesh = uneven_mesh((4, 2), dtype=jnp.float64)
        point = (np.zeros(mesh.num_links), np.zeros(mesh.num_links), np.zeros(()))

        @jax.jit
        @partial(jax.value_and_grad, argnums=(0, 1, 2))
        def value(*at):
            return log_time(name, mesh, *at)

        gradients = jax.device_get(value(*point)[1])
        # More bandwidth never takes longer, more latency and bytes never less, and all of them count.
        assert (gradients[0] <= 0).all()
        assert (gradients[1] >= 0).all()
        assert min(float(-gradients[0].sum()), float(gradients[1].sum()), float(gradients[2])) > 1e-3
        # Time is made of latencies and of bytes over bandwidth, and of nothing else.
        assert float(gradients[1].sum() - gradients[0].sum()) == pytest.approx(1, rel=1e-9)
        rng, width = np.random.default_rng(0), 1e-5
        for _ in range(3):
            way = [rng.normal(size=at.shape) for at in point]
            ahead, behind = (
                value(*(at + side * w for at, w in zip(point, way, strict=True)))[0] for side in (width, -width)
            )
            along = sum(float((g * w).sum()) for g, w in zip(gradients, way, strict=True))
            assert along == pytest.approx(float(ahead - behind) / (2 * width), rel=1e-6)


def test_sizes_and_machines_batch():
    sizes = floats([1e5, 1e6])
    bandwidths = floats([1e10, 5e10, 2e11])
    mesh, blocks = mesh_of((4, 4)), np.asarray(des.block_rings((4, 4), 4))

    def value(size, bandwidth):
        machine = eqx.tree_at(lambda m: m.link_bandwidth, mesh, full(mesh.num_links, 1.0) * bandwidth)
        return price_rounds(WHOLE, machine, ring_all_reduce(blocks, size, 16, bidirectional=True), EXACT).seconds

    grid = jax.jit(jax.vmap(jax.vmap(value, (None, 0)), (0, None)))(sizes, bandwidths)
    expected = 6 * (np.asarray(sizes)[:, None] / 8 / np.asarray(bandwidths) + LATENCY)
    np.testing.assert_allclose(grid, expected, rtol=1e-5)
