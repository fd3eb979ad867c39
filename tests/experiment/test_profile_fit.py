"""Profiles: lines recovered from timings, the algorithm's samples, and what timings cannot tell."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.experiment.profile_fit import Lines, Timings, fit_lines, fit_profile, profile_network
from jaxmoe.network import AlphaBeta
from jaxmoe.network.pairwise import STAGES, ProfileError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "camoe"))
from hops import chained

sys.path.pop(0)

SIZES = np.geomspace(1e3, 1e8, 12)
LIST = SIZES.tolist()


def network(nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """alpha and beta of every phase and pair."""
    rng = np.random.default_rng(seed)
    shape = (len(STAGES), nodes, nodes)
    return rng.uniform(1e-5, 1e-3, shape), 1 / rng.uniform(1e8, 1e10, shape)


def slowest_pair(alpha: np.ndarray, beta: np.ndarray):
    """Times of a network in which every pair has the line to itself."""

    def measure(phase, traffic):
        row = STAGES.index(phase)
        return float(np.where(traffic > 0, alpha[row] + beta[row] * traffic, 0).max())

    return measure


@settings(deadline=None, max_examples=25)
@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7), st.integers(0, 2**31))
def test_exact_lines_are_found(alpha, beta, seed):
    sizes = np.random.default_rng(seed).uniform(1e3, 1e7, 9)
    lines = fit_lines(np.zeros(9, int), sizes, alpha + beta * sizes, 1)
    assert lines.alpha[0] + lines.beta[0] * 1e6 == pytest.approx(alpha + beta * 1e6, rel=1e-6)
    assert lines.beta[0] == pytest.approx(beta, rel=1e-4, abs=1e-4 * alpha / 1e7)


@pytest.fixture(scope="module")
def noisy() -> tuple[np.ndarray, Lines]:
    """Times with noise, and their line."""
    seconds = (1e-4 + 1e-9 * SIZES) * (1 + 0.05 * np.random.default_rng(5).standard_normal(12))
    return seconds, fit_lines(np.zeros(12, int), SIZES, seconds, 1)


@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(12)), factor=st.floats(1e-3, 1e3))
def test_a_fit_knows_no_order_and_no_unit(noisy, order, factor):
    seconds, first = noisy
    second = fit_lines(np.zeros(12, int), SIZES[order], factor * seconds[order], 1)
    np.testing.assert_allclose(second.alpha, factor * first.alpha, rtol=1e-6)
    np.testing.assert_allclose(second.beta, factor * first.beta, rtol=1e-6)


def test_one_message_in_twelve_that_takes_ten_times_as_long_changes_nothing():
    seconds = 1e-4 + 1e-9 * SIZES
    seconds[7] *= 10
    lines = fit_lines(np.zeros(12, int), SIZES, seconds, 1)
    np.testing.assert_allclose([lines.alpha[0], lines.beta[0]], [1e-4, 1e-9], rtol=1e-6)


def test_standard_errors_are_those_of_many_fits():
    rng, fits = np.random.default_rng(0), 400
    sizes = np.tile(SIZES, fits)
    seconds = (1e-3 + 1e-9 * sizes) * (1 + 0.02 * rng.standard_normal(len(sizes)))
    lines = fit_lines(np.repeat(np.arange(fits), 12), sizes, seconds, fits)
    # The biweight trims little of normal noise; a standard error of twelve residuals is known to about a fifth.
    assert lines.alpha.std() == pytest.approx(np.sqrt((lines.alpha_error**2).mean()), rel=0.25)
    assert lines.beta.std() == pytest.approx(np.sqrt((lines.beta_error**2).mean()), rel=0.25)


def test_phase_one_finds_every_pair_way_and_phase():
    alpha, beta = network(4, 1)
    found = profile_network(4, LIST, slowest_pair(alpha, beta)).baseline
    away = np.broadcast_to(~np.eye(4, dtype=bool), alpha.shape)
    np.testing.assert_allclose(found.alpha[away], alpha[away], rtol=1e-6)
    np.testing.assert_allclose(found.beta[away], beta[away], rtol=1e-6)
    assert (found.samples[away] == len(SIZES)).all()
    assert not found.alpha[~away].any()
    assert not found.warnings()


def test_phase_two_takes_one_sample_where_refining_every_edge_takes_one_less_than_nodes():
    alpha, beta = network(5, 2)
    found = profile_network(5, LIST, slowest_pair(alpha, beta))
    ways = [STAGES.index("dispatch"), STAGES.index("combine")]
    every_edge = np.isin(found.alone.phase, ways).sum()
    assert len(found.contended) * (5 - 1) == every_edge


def test_phase_two_refines_the_bottleneck_alone():
    # Sending to all others takes twice the slowest pair: the edges that were slowest learn it, the others do not.
    alpha, beta = network(4, 3)
    alone = slowest_pair(alpha, beta)

    def measure(phase, traffic):
        return alone(phase, traffic) * (2 if (traffic > 0).sum() > 1 else 1)

    found = profile_network(4, LIST, measure)
    sampled = np.zeros(alpha.shape, bool)
    pairs = zip(found.contended.phase, found.contended.source, found.contended.destination, strict=True)
    for pair in set(pairs):
        numbers = np.stack([found.contended.phase, found.contended.source, found.contended.destination])
        sampled[pair] = (numbers == np.array(pair)[:, None]).all(axis=0).sum() >= 6
    np.testing.assert_allclose(found.refined.beta[sampled], 2 * beta[sampled], rtol=1e-6)
    np.testing.assert_array_equal(found.refined.beta[~sampled], found.baseline.beta[~sampled])
    assert 0 < sampled.sum() < 24


def timings(pairs, sizes, phase=1) -> Timings:
    rows = [(*pair, phase, size, 1e-3 + 1e-9 * size) for pair in pairs for size in sizes]
    source, destination, row, size, seconds = map(np.array, zip(*rows, strict=True))
    return Timings(source, destination, row, size.astype(float), seconds)


BOTH_WAYS = [(0, 1), (1, 0)]


def test_phases_that_were_not_timed_are_as_dispatch():
    found = fit_profile(timings(BOTH_WAYS, [1e3, 1e6]))
    np.testing.assert_array_equal(found.alpha[0], found.alpha[1])
    assert found.samples[0].sum() == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_few_noisy_samples_of_phase_two_do_no_harm(seed):
    alpha, beta = network(4, 4)
    rng, alone = np.random.default_rng(seed), slowest_pair(alpha, beta)
    found = profile_network(
        4, LIST, lambda phase, sent: alone(phase, sent) * (1 + 0.05 * rng.standard_normal())
    ).refined
    away = np.broadcast_to(~np.eye(4, dtype=bool), alpha.shape)
    assert np.abs(found.beta[away] / beta[away] - 1).max() < 0.3
    assert np.abs(found.alpha[away] / alpha[away] - 1).max() < 0.3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (timings([(0, 1)], [1e3, 1e6]), "lack dispatch 1 -> 0"),
        (timings(BOTH_WAYS, [1e6]), "cannot tell alpha from beta"),
        (timings(BOTH_WAYS, [1e6, 1.1e6]), "cannot tell alpha from beta"),
        (timings(BOTH_WAYS, [1e3, 1e6], phase=2), "no messages of phase dispatch"),
    ],
)
def test_timings_that_do_not_tell_are_one_clear_error(given, message):
    with pytest.raises(ProfileError, match=message):
        fit_profile(given)


def test_a_negative_alpha_is_kept_for_prediction_and_warned_of():
    burst = timings(BOTH_WAYS, [6e6, 8e6, 16e6])
    burst.seconds[:] = 1e-3 + 1e-9 * (burst.bytes - 5e6)
    found = fit_profile(burst)
    np.testing.assert_allclose(found.alpha[1, 0, 1], -4e-3, rtol=1e-6)
    (warning,) = found.warnings()
    assert "negative" in warning
    assert "add" in warning
    with pytest.raises(ProfileError, match="no latency"):
        chained([found.model("dispatch")] * 2)


def test_hops_in_a_row_add_up_or_are_as_slow_as_the_slowest():
    hops = [AlphaBeta(jnp.full((2, 2), a), jnp.full((2, 2), b)) for a, b in ((1.0, 4.0), (2.0, 3.0))]
    stored, pipelined = chained(hops), chained(hops, pipelined=True)
    assert float(stored.alpha[0, 1]) == float(pipelined.alpha[0, 1]) == 3.0
    assert (float(stored.beta[0, 1]), float(pipelined.beta[0, 1])) == (7.0, 4.0)
