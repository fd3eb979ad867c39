"""Profiles of simulated networks against the numbers that these were made with; and tables of measurements."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import build_topology, load_hardware
from jaxmoe.des import fabric_of
from jaxmoe.experiment.profile_fit import fit_profile, profile_network
from jaxmoe.experiment.profiling import by_simulator, disturbed, read_timings, write_timings
from jaxmoe.network.pairwise import ProfileError

ROOT = Path(__file__).parents[2]
NETWORK = build_topology(load_hardware(ROOT / "configs" / "hardware" / "camoe_4nodes.yaml"))
AWAY = ~np.eye(4, dtype=bool)
# Half of the sizes are below those whose alpha and beta x bytes are equal, 0.1 to 0.8 MB.
SIZES = np.geomspace(1e3, 64e6, 32).tolist()


def truth() -> tuple[np.ndarray, np.ndarray]:
    """Delay and seconds per byte of every pair: each has a link of its own."""
    delay, slowness = np.zeros((4, 4)), np.zeros((4, 4))
    for (start, end), latency, rate in zip(
        NETWORK.link_ends, np.asarray(NETWORK.link_latency), np.asarray(NETWORK.link_bandwidth), strict=True
    ):
        delay[start, end], slowness[start, end] = latency, 1 / rate
    return delay, slowness


def errors(found) -> tuple[float, float]:
    """Largest relative errors of alpha and beta over phases and pairs."""
    delay, slowness = truth()
    alpha, beta = (
        np.abs(table[:, AWAY] / true[AWAY] - 1).max() for table, true in ((found.alpha, delay), (found.beta, slowness))
    )
    return float(alpha), float(beta)


def test_a_simulated_network_is_recovered_without_noise_within_1_percent():
    found = profile_network(4, SIZES[::4], by_simulator(fabric_of(NETWORK, None)))
    assert max(*errors(found.baseline), *errors(found.refined)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_and_within_5_percent_with_5_percent_noise_and_2_percent_outliers(seed):
    measure = disturbed(by_simulator(fabric_of(NETWORK, None)), noise=0.05, outliers=0.02, seed=seed)
    assert max(errors(profile_network(4, SIZES, measure).baseline)) < 0.05


def test_above_the_burst_of_a_token_bucket_beta_is_right_and_alpha_is_less_by_its_time():
    slow = np.asarray(NETWORK.link_bandwidth) < 1e9
    burst = np.where(slow, 2e6 / 8, 10e6 / 8)  # Mbit of A.3 in B
    fabric = fabric_of(replace(NETWORK, link_burst=jnp.asarray(burst, jnp.float32)), None)
    found = profile_network(4, np.geomspace(2e6, 64e6, 8).tolist(), by_simulator(fabric)).baseline
    delay, slowness = truth()
    bursts = np.zeros((4, 4))
    bursts[tuple(NETWORK.link_ends.T)] = burst
    np.testing.assert_allclose(found.beta[:, AWAY], np.broadcast_to(slowness[AWAY], (3, 12)), rtol=0.01)
    expected = (delay - bursts * slowness)[AWAY]
    np.testing.assert_allclose(found.alpha[:, AWAY], np.broadcast_to(expected, (3, 12)), rtol=0.01)
    assert (expected < 0).all()
    assert found.warnings()


def test_a_table_of_timings_is_read_as_it_was_written(tmp_path):
    timed = profile_network(4, [1e3, 1e6], by_simulator(fabric_of(NETWORK, None))).alone
    write_timings(tmp_path / "timings.csv", timed)
    read = read_timings(tmp_path / "timings.csv")
    np.testing.assert_array_equal(fit_profile(read).beta, fit_profile(timed).beta)


HEAD = "source,destination,phase,bytes,seconds\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source,bytes\n", "has no column destination, phase, seconds"),
        (HEAD, "has no timings"),
        (HEAD + "0,1,send,1,1\n", "line 2: phase is 'send', expected one of metadata, dispatch, combine"),
        (HEAD + "0,1,dispatch,much,1\n", "line 2: bytes is 'much', expected a number"),
        (HEAD + "0,1,dispatch,1,1\n0,-1,dispatch,1,1\n", "line 3: expected nodes as whole numbers"),
        (HEAD + "0,1,dispatch,1,0\n", "seconds above 0"),
        (HEAD + "0,1,dispatch,1,nan\n", "all finite"),
    ],
)
def test_a_bad_table_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "timings.csv"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        read_timings(path)
