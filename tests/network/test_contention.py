"""Order of messages and contention of routers in the model: by hand, against plain loops, and against BookSim2."""

import dataclasses
import json
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.topologies import mesh

from jaxmoe.hardware import Router, ring
from jaxmoe.network import Congestion, Contention, passages_of
from jaxmoe.network.contention import drained
from jaxmoe.relax import HardMax


def model_of(topology, order="shuffled", chunk=4.0, cut_through=True) -> Contention:
    ways, back = (passages_of(topology, order, mirrored) for mirrored in (False, True))
    return Contention(jnp.asarray(chunk), cut_through=cut_through, order=order, ways=ways, ways_back=back)


@eqx.filter_jit
def total(model, topology, traffic):
    return model(topology, traffic).total(HardMax())


busy_ports = eqx.filter_jit(lambda model, topology, traffic: model(topology, traffic).port_time.max())
total_back = eqx.filter_jit(lambda model, topology, traffic: model.mirrored(topology, traffic).total(HardMax()))
seconds_drained = jax.jit(drained)


def seconds(model, topology, traffic) -> float:
    return float(total(model, topology, jnp.asarray(traffic, jnp.float32)))


def with_router(topology, **numbers):
    return dataclasses.replace(
        topology, router=Router(**({"num_vcs": 4, "vc_buf_size": 32, "flit_bytes": 1.0} | numbers))
    )


def small(router: bool = True):
    """A 2x3 mesh with ports, 1 B/s, 1 s a hop."""
    ports = {name: full(6, 1.0) for name in ("injection_bandwidth", "ejection_bandwidth")}
    topology = dataclasses.replace(mesh((2, 3), 1.0, 1.0), endpoint_latency=jnp.asarray(2.0), **ports)
    return with_router(topology) if router else topology


def some_traffic(seed: int, nodes: int = 6) -> np.ndarray:
    draw = np.random.default_rng(seed)
    traffic = draw.integers(1, 40, (nodes, nodes)) * (draw.random((nodes, nodes)) < 0.7)
    np.fill_diagonal(traffic, 0)
    return traffic.astype(float)


# A link brings 0.4 s of work for an output and 0.5 s for others, three more inputs bring 0.2 s each. All get a quarter
# until the three are done, at 0.8 s.
WORK, BEHIND = np.array([[[0.2, 0.2, 0.2, 0.4]], [[0.2, 0.2, 0.2, 0.9]]], np.float32)


def test_what_is_behind_a_throttled_input_waits():
    # The link could bring 4/9; it has 0.25, so its other work goes at 5/9 * 9/16 = 0.3125. At 0.8 s it has 0.2 s
    # for the output and 0.25 s for others left, which take 0.45 s together.
    np.testing.assert_allclose(seconds_drained(WORK, BEHIND, 1.0), 1.25, rtol=1e-5)


def test_what_is_behind_an_input_passes_it_without_coupling():
    # The link's other work takes the 0.75 that is left and is done before 0.8 s; then the rest, 0.2 s, goes at 1.
    np.testing.assert_allclose(seconds_drained(WORK, BEHIND, 0.0), 1.0, rtol=1e-5)


def test_inputs_that_an_output_can_take_hold_nobody_up():
    work, behind = np.array([[[0.3, 0.2, 0.0, 0.0]], [[0.9, 0.8, 0.5, 0.0]]], np.float32)
    # 1/3 and 1/4 of its rate: the slower input decides.
    np.testing.assert_allclose(seconds_drained(work, behind, 1.0), 0.9, rtol=1e-5)


@pytest.mark.parametrize("coupling", [0.0, 0.3, 1.0])
def test_draining_takes_at_least_the_work_and_at_most_one_after_the_other(coupling):
    draw = np.random.default_rng(0)
    work = draw.random((50, 4)) * (draw.random((50, 4)) < 0.8)
    behind = work + draw.random((50, 4)) * (work > 0)
    took = np.asarray(seconds_drained(work, behind, coupling))
    least = np.maximum(work.sum(axis=1), np.where(work > 0, work, 0).max(axis=1))
    assert (took >= least * (1 - 1e-5)).all()
    assert (took <= behind.sum(axis=1) * (1 + 1e-5)).all()


def test_a_lone_message_takes_what_it_takes_without():
    for order, cut_through in (("shuffled", True), ("by_destination", False)):
        topology, traffic = small(), np.zeros((6, 6))
        traffic[0, 5] = 12.0
        alone = seconds(Congestion(jnp.asarray(4.0), cut_through=cut_through), topology, traffic)
        model = model_of(topology, order, cut_through=cut_through)
        np.testing.assert_allclose(seconds(model, topology, traffic), alone, rtol=1e-6)


def test_contention_only_adds_and_is_off_without_a_router():
    ideal, real = small(router=False), small()
    for seed in range(5):
        traffic = some_traffic(seed)
        without, with_it = (seconds(model_of(t), t, traffic) for t in (ideal, real))
        congested = Congestion(jnp.asarray(4.0), cut_through=True)
        load = float(busy_ports(congested, ideal, jnp.asarray(traffic, jnp.float32)))
        assert with_it >= without >= load


def test_buffers_smaller_than_the_way_of_a_credit_hold_a_channel_up():
    """Links of 20 s: 18 on the wire and 2 in the router, so a credit is back after 18 + 18 + 1 + its delay of 1 s."""
    topology = dataclasses.replace(small(router=False), link_latency=full(14, 20.0))
    traffic = np.zeros((6, 6))
    traffic[0, 1] = 64.0
    alone = seconds(model_of(topology), topology, traffic)
    for num_vcs, size in ((1, 8), (4, 2), (2, 16), (1, 64)):
        buffered = with_router(topology, num_vcs=num_vcs, vc_buf_size=size)
        window = num_vcs * size  # flits
        waits = max((64 / window - 1) * 38 + window, 64.0) - 64
        np.testing.assert_allclose(seconds(model_of(buffered), buffered, traffic), alone + waits, rtol=1e-6)
    speed = jax.grad(
        lambda size: total(model_of(buffered), with_router(topology, num_vcs=1, vc_buf_size=size), traffic)
    )
    np.testing.assert_allclose(speed(jnp.asarray(8.0)), 1 - 64 / 8**2 * 38, rtol=1e-5)


def plain_in_order(topology, traffic, order, chunk) -> float:
    """The latest of every channel's bounds with release dates, with loops over messages."""
    nodes, links = topology.num_nodes, topology.num_links
    bandwidth, latency = np.asarray(topology.link_bandwidth), np.asarray(topology.link_latency)
    ports, paths, users = topology.injection_bandwidth is not None, topology.paths(), {}
    for source in range(nodes):
        queue: dict = {}
        targets = [(source + k) % nodes for k in range(1, nodes)] if order == "staggered" else range(nodes)
        for target in targets:
            size = traffic[source, target]
            if size == 0 or source == target:
                continue
            stops = [(link, 1 / bandwidth[link], latency[link]) for link in paths[source][target]]
            if ports:
                stops = [
                    (links + source, 1.0, 0.0),
                    *stops,
                    (links + nodes + target, 1.0, float(topology.endpoint_latency)),
                ]
            at = queue.get(stops[0][0], 0.0)
            queue[stops[0][0]] = at + size * stops[0][1]
            hops = [delay + min(chunk, size) * slow for _, slow, delay in stops]
            for place, (channel, slow, delay) in enumerate(stops):
                passed = sum(hops[:place])
                users.setdefault(channel, []).append((at + passed, size * slow, delay + sum(hops[place + 1 :])))
    ends = []
    for members in users.values():
        for arrival, _, _ in members:
            later = sum(work for come, work, _ in members if come >= arrival)
            ends.append(arrival + later + min(rest for *_, rest in members))
    return max(ends)


@pytest.mark.parametrize("order", ["staggered", "by_destination"])
@pytest.mark.parametrize("seed", range(3))
def test_order_is_as_in_plain_loops(order, seed):
    traffic = some_traffic(seed)
    for topology in (small(router=False), ring(6, 2.0, 1.5)):
        told = seconds(model_of(topology, order, cut_through=False), topology, traffic)
        np.testing.assert_allclose(told, plain_in_order(topology, traffic, order, 4.0), rtol=1e-5)


def test_what_is_sent_back_is_what_the_opposite_way_takes():
    """Combine retraces the paths of dispatch: on a mesh those of the other order of directions."""
    topology, traffic = small(), some_traffic(7)
    other = dataclasses.replace(topology, routing="yx")
    back = total_back(model_of(topology), topology, jnp.asarray(traffic, jnp.float32))
    np.testing.assert_allclose(back, seconds(model_of(other), other, traffic.T), rtol=1e-6)


def test_it_has_a_gradient_and_runs_for_many_at_once():
    topology, model = small(), model_of(small())
    traffic = some_traffic(3).astype(np.float32)

    def time(traffic):
        return total(model, topology, jnp.asarray(traffic))

    both = jax.jit(jax.vmap(time))(np.stack([traffic, 2 * traffic]))
    np.testing.assert_allclose(both, [time(traffic), time(2 * traffic)], rtol=1e-6)
    slope = np.asarray(jax.jit(jax.grad(time))(traffic))
    assert np.isfinite(slope).all()
    direction = np.random.default_rng(1).random((6, 6)).astype(np.float32) * (traffic > 0)
    ahead, behind = (float(time(traffic + np.float32(step) * direction)) for step in (0.05, -0.05))
    np.testing.assert_allclose((slope * direction).sum(), (ahead - behind) / 0.1, rtol=2e-2)


def test_a_faster_crossbar_decouples():
    topology = small()
    model = model_of(topology)
    times = [
        seconds(model, with_router(topology, internal_speedup=speedup), some_traffic(2))
        for speedup in (1.0, 1.5, 2.0, 4.0)
    ]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(times))


@pytest.mark.parametrize(("hardware", "variant", "most"), [("s2", "vc4s2_shuffle", 2.5), ("base", "vc4_shuffle", 4.0)])
def test_moe_traffic_of_booksim2(shared, configs, hardware, variant, most):
    from jaxmoe.config import build_time_model, build_topology, load_hardware

    folder = shared / "reference" / "booksim2_mesh"
    records = [r for r in json.loads((folder / "index.json").read_text()) if (r["rows"], r["cols"]) == (4, 4)]
    records = [r for r in records if r["cls"].startswith("moe_")]
    machine = load_hardware(configs / "hardware" / f"booksim2_{hardware}.yaml")
    topology, model = build_topology(machine), build_time_model(machine)
    with np.load(folder / "matrices.npz") as matrices:
        traffic = jnp.asarray(np.stack([matrices[r["id"]] for r in records]), jnp.float32)
    told = np.asarray(jax.jit(jax.vmap(lambda matrix: total(model, topology, matrix)))(traffic))
    measured = np.array([np.mean(r["completion"][variant]) for r in records])
    assert 100 * np.abs(told / measured - 1).mean() <= most
