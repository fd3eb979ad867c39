"""Slices read in turn: layers by hand, and the model beside the event simulator."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.des import FetchedSliceCosts, SliceWork, replay_slices
from jaxmoe.engine import FetchCosts, Fetches, FetchLayer
from jaxmoe.relax import SoftSupport

BYTES = 3 * 7168 * 2048.0
SLICE = BYTES / 2
COSTS = FetchCosts(BYTES, 2 * BYTES)
TOLD = FetchedSliceCosts(BYTES, 2 * BYTES, 2, 16.0, 100e-9, 110e-9, 30e-9)
MACHINE = build_machine(load_hardware("configs/hardware/dojo_5x5.yaml"))
FIRST, HOP, HBM, LINK = 410e-9, 200e-9, SLICE / 2e12, SLICE / 1.5e12  # s: of a miss and HBM, and of a slice
ONE = 2 * SLICE / 1e15  # s of a slice's product with one request


@eqx.filter_jit
def timed(asked, outstanding, switching):
    return FetchLayer(MACHINE, COSTS, outstanding=outstanding, switching=switching).time(asked)


def seconds(asked, outstanding=1, switching="store_and_forward"):
    return float(timed(asked, outstanding, switching).total)


def simulated(asked, outstanding, switching):
    hits = np.zeros(asked.requests.shape) if asked.hits is None else np.asarray(asked.hits)
    requests, home = np.asarray(asked.requests).astype(int), np.asarray(asked.home)
    work = SliceWork(requests, home, np.asarray(asked.local) > 0, np.asarray(asked.copied) > 0, hits)
    cut_through = switching == "cut_through"
    return replay_slices(MACHINE, work, TOLD, outstanding=outstanding, cut_through=cut_through).seconds


def asked_of(requests, home, copied=None, hits=None):
    requests, home = floats(requests), jnp.asarray(home)
    local, none = floats(home[:, None] == jnp.arange(25)), jnp.zeros_like(requests)
    return Fetches(requests, home, local, none if copied is None else floats(copied), hits)


def alone(die, home, requests=1.0):
    return asked_of(full((1, 25), 0.0).at[0, die].set(requests), [home])


WAYS = ("store_and_forward", "cut_through")


@pytest.mark.parametrize("switching", WAYS)
def test_a_local_expert_is_read_slice_after_slice(switching):
    assert seconds(alone(7, 7), switching=switching) == pytest.approx(2 * (FIRST + HBM) + ONE, rel=1e-5)


def test_a_remote_slice_takes_hbm_and_every_hop():
    """S / 2 TB/s and h S / 1.5 TB/s, 1 + 4 h / 3 times a local one, and latency; cut through it takes the slowest."""
    way = FIRST + 16 * HOP
    assert seconds(alone(24, 0)) == pytest.approx(2 * (way + HBM + 8 * LINK) + ONE, rel=1e-5)
    assert seconds(alone(24, 0), switching="cut_through") == pytest.approx(2 * (way + LINK) + ONE, rel=1e-5)


def test_two_outstanding_reads_follow_each_other():
    """Both slices are asked for at once; the second is behind the first at HBM, and then a link behind it."""
    assert seconds(alone(7, 7), 2) == pytest.approx(FIRST + 2 * HBM + ONE, rel=1e-5)
    assert seconds(alone(24, 0), 2) == pytest.approx(FIRST + 16 * HOP + HBM + 9 * LINK + ONE, rel=1e-5)


def test_products_run_beside_reads():
    many = 20_000.0
    assert seconds(alone(7, 7, many)) == pytest.approx(FIRST + HBM + 2 * many * ONE, rel=1e-5)


def test_dies_wait_for_each_other_at_a_home():
    """Neighbours 1 and 5 of die 0 each take an expert of its; die 5 is behind die 1 at HBM, then half a turn ahead."""
    requests = full((2, 25), 0.0).at[0, 1].set(1.0).at[1, 5].set(1.0)
    each = FIRST + 2 * HOP + HBM + LINK
    assert seconds(asked_of(requests, [0, 0])) == pytest.approx(HBM + 2 * each + ONE, rel=1e-5)


def test_a_copy_is_written_after_its_slice():
    one = alone(1, 0)
    written = seconds(replace(one, copied=one.requests))
    each = FIRST + 2 * HOP + HBM + LINK
    assert written == pytest.approx(2 * each + 30e-9 + HBM + 300e-9, rel=1e-5)


def test_what_the_llc_has_is_read_there():
    one = alone(24, 0)
    assert seconds(replace(one, hits=one.requests)) == pytest.approx(2 * (100e-9 + SLICE / 10e12) + ONE, rel=1e-4)


def drawn(seed):
    rng = np.random.default_rng(seed)
    requests = rng.integers(0, 600, (40, 25)) * (rng.random((40, 25)) < 0.15)
    home = rng.integers(0, 25, 40)
    copied = (rng.random((40, 25)) < 0.3) & (home[:, None] != np.arange(25))
    return asked_of(requests, home, copied, floats(rng.integers(0, 3, (40, 25)) / 2))


@pytest.mark.parametrize("switching", WAYS)
@pytest.mark.parametrize(("outstanding", "within"), [(1, 1e-6), (2, 1e-6), (3, 0.05)])
def test_the_model_is_the_simulator(outstanding, within, switching):
    """But where slices of several dies come to a link at the same moment, which the first of three reads often do."""
    with jax.enable_x64(True):
        for seed in range(3):
            asked = drawn(seed)
            modelled = seconds(asked, outstanding, switching)
            assert modelled == pytest.approx(simulated(asked, outstanding, switching), rel=within)


def test_reads_in_turn_take_longer_than_the_busiest_resource():
    for seed in range(3):
        time = timed(drawn(seed), 3, "cut_through")
        busiest = max(float(each.max()) for each in time.busy["fetch"].values())
        assert float(time.total) > busiest


def test_relaxed_reads_in_turn_are_refused():
    layer = FetchLayer(MACHINE, COSTS, outstanding=1)
    with pytest.raises(ValueError, match="outstanding is 1"):
        layer.time(alone(1, 0), support=SoftSupport(0.1))
