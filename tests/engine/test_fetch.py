"""Fetched experts: hand-worked layers, what must hold of any, derivatives, one code path."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.arrays import floats, full
from oracles.wafer import traffic

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.engine import FetchCosts, Fetches, FetchLayer, HostLink, Overlap, Pipelined, ScheduleError
from jaxmoe.hardware import Die, Energy, Machine, Mesh
from jaxmoe.relax import HardSupport, SmoothMax, SoftSupport

BYTES = 3 * 7168 * 2048.0
COSTS = FetchCosts(BYTES, 2 * BYTES)
MACHINE = build_machine(load_hardware("configs/hardware/dojo_5x5.yaml"))


@eqx.filter_jit
def timed(machine, asked, reduction=None, support=None, **settings):
    return FetchLayer(machine, COSTS, **settings).time(asked, None, reduction, support)


@eqx.filter_jit
def read(machine, asked):
    """Reads, and their figures."""
    reads = asked.reads(COSTS, HardSupport())
    return reads, reads.figures(machine)


def fetches(requests, home, local=None, copied=None, hits=None):
    requests, home = floats(requests), jnp.asarray(home)
    local = jnp.asarray(home[:, None] == jnp.arange(requests.shape[1]), requests.dtype) if local is None else local
    return Fetches(requests, home, local, jnp.zeros_like(requests) if copied is None else copied, hits)


def drawn(seed, experts=12):
    rng = np.random.default_rng(seed)
    requests = rng.integers(0, 300, (experts, 25)) * (rng.random((experts, 25)) < 0.2)
    home = rng.integers(0, 25, experts)
    local = (home[:, None] == np.arange(25)) | (rng.random((experts, 25)) < 0.1)
    copied = (rng.random((experts, 25)) < 0.5) & ~local
    return requests, home, local, copied


def of(seed):
    requests, home, local, copied = drawn(seed)
    return fetches(requests, home, floats(local), floats(copied))


def alone(die, home, requests=1.0):
    return fetches(full((1, 25), 0.0).at[0, die].set(requests), [home])


def test_a_local_expert_is_bound_by_hbm():
    time = timed(MACHINE, alone(7, 7))
    assert float(time.total) == pytest.approx(110e-9 + 300e-9 + BYTES / 2e12, rel=1e-5)


def test_a_remote_expert_is_bound_by_links_and_pays_both_ways():
    time = timed(MACHINE, alone(24, 0))
    assert float(time.total) == pytest.approx(110e-9 + 300e-9 + 16 * 200e-9 + BYTES / 1.5e12, rel=1e-4)


def test_many_requests_are_bound_by_compute():
    assert float(timed(MACHINE, alone(3, 3, 1e4)).total) == pytest.approx(1e4 * 2 * BYTES / 1e15, rel=1e-5)


def test_what_the_llc_has_takes_its_latency():
    one = alone(24, 0)
    time = timed(MACHINE, replace(one, hits=one.requests))
    assert float(time.total) == pytest.approx(100e-9 + BYTES / 10e12, rel=1e-5)


def test_dies_that_share_a_channel_share_its_bandwidth():
    """As DDR that dies share: two dies read their own experts through one channel, and wait for both."""
    pairs = replace(MACHINE.memory[-1], channel=jnp.arange(25) // 2)
    shared = replace(MACHINE, memory=(MACHINE.memory[0], pairs))
    both = fetches(full((2, 25), 0.0).at[0, 6].set(1.0).at[1, 7].set(1.0), [6, 7])
    assert float(timed(shared, both).total) == pytest.approx(110e-9 + 300e-9 + 2 * BYTES / 2e12, rel=1e-5)
    assert float(timed(MACHINE, both).total) == pytest.approx(110e-9 + 300e-9 + BYTES / 2e12, rel=1e-5)


def test_half_an_expert_in_the_llc_leaves_half_to_read():
    one = alone(7, 7)
    time = timed(MACHINE, replace(one, hits=one.requests / 2))
    assert float(time.total) == pytest.approx(110e-9 + 300e-9 + BYTES / 2 / 2e12, rel=1e-5)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_traffic_is_that_of_the_plain_loop_and_bytes_are_conserved(seed):
    """Line 7: what HBM gives is what arrives, and an expert arrives once wherever it is computed."""
    requests, home, local, copied = drawn(seed)
    demand, figures = read(MACHINE, of(seed))
    found, _, _ = traffic((5, 5), requests, home, local, copied, BYTES, 2)
    assert {name: float(figures[name]) for name in found} == pytest.approx(found, rel=1e-5)
    arrived = (requests > 0).sum(axis=0) * BYTES
    np.testing.assert_allclose(demand.reads.sum(axis=0), arrived, rtol=1e-6)
    assert float(demand.reads.sum()) == pytest.approx(float(figures["local_read"] + figures["remote_read"]), rel=1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_faster_links_never_slow_a_fixed_allocation(seed):
    """Line 7: doubling D2D bandwidth."""
    double = eqx.tree_at(lambda m: m.topology.link_bandwidth, MACHINE, MACHINE.topology.link_bandwidth * 2)
    assert float(timed(double, of(seed)).total) <= float(timed(MACHINE, of(seed)).total)


def test_a_lone_die_has_no_hops():
    none = full(0, 0.0)
    one = [
        replace(
            level, bandwidth=level.bandwidth[:1], latency=level.latency[:1], capacity=None, channel=level.channel[:1]
        )
        for level in MACHINE.memory
    ]
    lone = Machine(Mesh(none, none, shape=(1, 1)), Die(MACHINE.die.flops[:1]), tuple(one))
    _, figures = read(lone, fetches(full((4, 1), 30.0), [0] * 4))
    assert float(figures["hops"]) == float(figures["remote_read"]) == 0.0
    assert float(timed(lone, fetches(full((4, 1), 30.0), [0] * 4)).total) == pytest.approx(4 * BYTES / 2e12, rel=0.01)


def test_relaxed_goes_to_exact():
    exact = float(timed(MACHINE, of(5)).total)
    soft = [float(timed(MACHINE, of(5), SmoothMax(t), SoftSupport(jnp.asarray(t / 10))).total) for t in (0.1, 0.001)]
    assert abs(soft[1] / exact - 1) < 0.01 < abs(soft[0] / exact - 1)


def test_gradients_are_finite_differences():
    """Of hardware numbers and of requests, relaxed and in double precision."""
    with jax.enable_x64(True):
        machine = jax.tree.map(lambda leaf: leaf.astype(float) if eqx.is_inexact_array(leaf) else leaf, MACHINE)
        given_, costs = of(2), FetchCosts(BYTES, 2 * BYTES)

        @jax.jit
        def total(scale):
            changed = eqx.tree_at(
                lambda m: (m.topology.link_bandwidth, m.memory[-1].bandwidth, m.die.flops),
                machine,
                (
                    machine.topology.link_bandwidth * scale[0],
                    machine.memory[-1].bandwidth * scale[1],
                    machine.die.flops * scale[2],
                ),
            )
            asked = replace(given_, requests=given_.requests.at[:, 3].multiply(scale[3]))
            relaxed = SmoothMax(0.1), SoftSupport(jnp.asarray(0.05))
            return FetchLayer(changed, costs).time(asked, None, *relaxed).total

        at = full(4, 1.0)
        step = 1e-6
        rough = [(total(at.at[i].add(step)) - total(at.at[i].add(-step))) / (2 * step) for i in range(4)]
        np.testing.assert_allclose(jax.jit(jax.grad(total))(at), jnp.asarray(rough), rtol=1e-4, atol=1e-12)
        assert (np.asarray(rough[:3]) < 0).all()


def test_numbers_do_not_recompile():
    traced = []

    @eqx.filter_jit
    def time(machine, given_, costs):
        traced.append(1)
        return FetchLayer(machine, costs).time(given_).total

    for scale in (1.0, 2.0):
        machine = eqx.tree_at(lambda m: m.die.flops, MACHINE, MACHINE.die.flops * scale)
        time(machine, of(1), FetchCosts(BYTES * scale, 2 * BYTES))
    assert len(traced) == 1


def test_the_host_takes_its_fixed_time_and_the_table():
    host = HostLink(64e9, 10e-6)
    # 256 experts of 5 B and 25 bits up, 40 B down
    assert float(host.seconds(256, 25)) == pytest.approx(10e-6 + 256 * (5 + 25 / 8 + 40) / 64e9)


def test_the_host_comes_before_the_layer():
    host = HostLink(64e9, 10e-6)
    plain, hosted = timed(MACHINE, of(1)), timed(MACHINE, of(1), host=host)
    assert float(hosted.stages["host"]) == pytest.approx(float(host.seconds(12, 25)))
    assert float(hosted.total) == pytest.approx(float(plain.total + hosted.stages["host"]))


def test_micro_batches_are_refused_and_overlap_is_the_same():
    assert float(timed(MACHINE, of(1), schedule=Overlap()).total) == float(timed(MACHINE, of(1)).total)
    with pytest.raises(ScheduleError, match=r"cuts a batch into parts, but the stage fetch is of whole batches; use"):
        timed(MACHINE, of(1), schedule=Pipelined(2))


def test_energy_is_of_all_that_moves_and_computes():
    """Expert 0 from die 0 on die 2, two hops, copied there; half of expert 1 from the LLC of its home, die 7."""
    kinds = {"link": full(80, 3e-12)}
    energy = Energy(jnp.asarray(1e-12), {"llc": jnp.asarray(2e-12), "hbm": jnp.asarray(5e-12)}, kinds, jnp.asarray(4.0))
    requests = full((2, 25), 0.0).at[0, 2].set(10.0).at[1, 7].set(20.0)
    copied, hits = full((2, 25), 0.0).at[0, 2].set(1.0), full((2, 25), 0.0).at[1, 7].set(0.5)
    asked = replace(fetches(requests, [0, 7]), copied=copied, hits=hits)
    time = timed(replace(MACHINE, energy=energy), asked)
    own = {name: float(joules) for name, joules in time.energy.items()}
    assert own == pytest.approx(
        {
            "compute": 30 * 2 * BYTES * 1e-12,
            "memory_llc": BYTES / 2 * 2e-12,
            "memory_hbm": (BYTES + BYTES + BYTES / 2) * 5e-12,  # read at home, written, and half read at home
            "link": 2 * (BYTES + 2 * 16) * 3e-12,  # and two requests, of a slice each
            "idle": float(time.total) * 25 * 4.0,
        },
        rel=1e-5,
    )
    assert not timed(MACHINE, asked).energy
