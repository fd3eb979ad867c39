"""The slice-by-slice simulator by hand, and against the model: traffic exactly, time closely."""

from itertools import islice

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.wafer import traffic

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.des import FetchedSliceCosts, SliceWork, replay_slices
from jaxmoe.engine import FetchCosts, Fetches, FetchLayer, Overlap, Serial
from jaxmoe.methods import AllocationCosts, AllocationTask, GreedyAllocation, deal
from jaxmoe.relax import HardSupport

BYTES = 3 * 7168 * 2048.0
COSTS = FetchedSliceCosts(BYTES, 2 * BYTES, 2, 16.0, 100e-9, 110e-9, 30e-9)
MODEL = FetchCosts(BYTES, 2 * BYTES)
DEAL = jax.jit(deal, static_argnums=1)


def machine(name="dojo_5x5", **changes):
    return build_machine(load_hardware(f"configs/hardware/{name}.yaml", [f"{k}={v}" for k, v in changes.items()]))


def work_of(requests, home, copied=None, hits=None, local=None):
    none = np.zeros(requests.shape)
    local = (home[:, None] == np.arange(requests.shape[1])) if local is None else local
    return SliceWork(requests, home, local, none > 0 if copied is None else copied, none if hits is None else hits)


def alone(die, home, requests=1):
    plan = np.zeros((1, 25), int)
    plan[0, die] = requests
    return plan, np.array([home])


def test_a_lone_local_expert_takes_its_latency_and_its_bytes():
    replay = replay_slices(machine(), work_of(*alone(7, 7)), COSTS)
    assert replay.seconds == pytest.approx(110e-9 + 300e-9 + BYTES / 2e12, rel=0.01)
    assert (replay.hops, replay.remote_read, replay.local_read) == (0, 0.0, BYTES)


def test_a_lone_remote_expert_takes_the_slowest_of_its_way():
    replay = replay_slices(machine(), work_of(*alone(24, 0)), COSTS)
    # 8 hops there and back; the links are slower than HBM.
    assert replay.seconds == pytest.approx(110e-9 + 300e-9 + 16 * 200e-9 + BYTES / 1.5e12, rel=0.05)
    assert (replay.hops, replay.remote_read, replay.local_read) == (16, BYTES, 0.0)


def test_many_requests_are_bound_by_compute():
    replay = replay_slices(machine(), work_of(*alone(3, 3, 10_000)), COSTS)
    assert replay.seconds == pytest.approx(10_000 * 2 * BYTES / 1e15, rel=0.01)


def test_what_the_llc_has_is_not_read():
    plan, home = alone(24, 0)
    replay = replay_slices(machine(), work_of(plan, home, hits=plan / 1.0), COSTS)
    assert (replay.llc_read, replay.remote_read, replay.hops) == (BYTES, 0.0, 0)
    assert replay.seconds == pytest.approx(100e-9 + BYTES / 10e12, rel=0.05)


def test_a_copy_is_written_beside_what_is_read():
    plan, home = alone(1, 0)
    replay = replay_slices(machine(), work_of(plan, home, copied=plan > 0), COSTS)
    assert replay.local_write == replay.remote_read == BYTES


def test_a_home_outside_the_machine_is_refused():
    with pytest.raises(ValueError, match=r"homes span 0\.\.25"):
        replay_slices(machine(), work_of(np.ones((2, 25), int), np.array([0, 25])), COSTS)


def cases():
    rng = np.random.default_rng(0)
    for name in ("dojo_5x5", "tsmc_sow_3x8", "dojo_enhanced_5x5"):
        chip = machine(name)
        for batch in (512, 4096):
            popularity = np.exp(0.35 * rng.standard_normal(256))
            counts = jnp.asarray(rng.multinomial(8 * batch, popularity / popularity.sum()))
            home = rng.permutation(np.arange(256) % chip.num_nodes)
            held = (home[:, None] == np.arange(chip.num_nodes)) | (rng.random((256, chip.num_nodes)) < 0.05)
            hops = jnp.asarray(chip.topology.hop_counts())
            allocate = GreedyAllocation(hops, AllocationCosts.of(chip, MODEL), cost="serial", begin="idle")
            smart = eqx.filter_jit(allocate)(AllocationTask(counts, jnp.asarray(home), jnp.asarray(held)))
            for plan in (DEAL(counts, chip.num_nodes), smart):
                copied = rng.random(held.shape) < 0.1
                yield chip, np.asarray(plan), home, held, copied & ~held & (np.asarray(plan) > 0)


@eqx.filter_jit
def modelled_traffic(chip, asked):
    """Figures and seconds, as the model has them, under the schedules `serial` and `overlap`."""
    serial, overlap = (FetchLayer(chip, MODEL, schedule=schedule) for schedule in (Serial(), Overlap()))
    figures = asked.reads(MODEL, HardSupport()).figures(chip)
    return figures, serial.time(asked).total, overlap.time(asked).total


def test_model_and_simulator_agree():
    """Line 3: bytes and hops are the same, times within 5 % on average, R2 at least 0.99."""
    pairs = []
    for chip, plan, home, held, copied in cases():
        replay = replay_slices(chip, work_of(plan, home, copied, local=held), COSTS)
        amounts = (jnp.asarray(each, jnp.float32) for each in (held, copied))
        asked = Fetches(jnp.asarray(plan, jnp.float32), jnp.asarray(home), *amounts)
        figures, total, overlapped = modelled_traffic(chip, asked)
        assert float(overlapped) == float(total)
        for name in ("hops", "local_read", "remote_read", "local_write"):
            assert float(figures[name]) == pytest.approx(getattr(replay, name), rel=1e-6)
        pairs.append((float(total), replay.seconds))
    modelled, simulated = np.array(pairs).T
    assert np.mean(np.abs(modelled / simulated - 1)) < 0.05
    spread = ((simulated - simulated.mean()) ** 2).sum()
    assert 1 - ((modelled - simulated) ** 2).sum() / spread > 0.99


def test_traffic_is_that_of_the_plain_loop():
    for chip, plan, home, held, copied in islice(cases(), 2):
        found, links, channels = traffic(chip.topology.shape, plan, home, held, copied, BYTES, 2)
        replay = replay_slices(chip, work_of(plan, home, copied, local=held), COSTS)
        assert {name: getattr(replay, name) for name in found} == pytest.approx(found)
        number = {tuple(ends): at for at, ends in enumerate(chip.topology.link_ends.tolist())}
        carried = np.zeros(chip.topology.num_links)
        for ends, size in links.items():
            carried[number[ends]] = size
        asked = 16.0 * 2 * len(home) * 25  # requests add no more than this
        np.testing.assert_allclose(replay.run.link_busy[: len(carried)] * 1.5e12, carried, atol=asked, rtol=1e-7)
        np.testing.assert_allclose(
            replay.run.link_busy[len(carried) + 25 : len(carried) + 50] * 2e12, channels, rtol=1e-7
        )
