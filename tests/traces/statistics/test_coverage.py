"""How much falls on the most frequent pairs: by hand, and against sorting in Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import traces as oracle

from jaxmoe.traces.statistics import coverage, coverage_curve, coverage_of, every_pair, pairs_above

seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0, 1)


def random_events(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, rng.choice([2, 5, 10**12]), (3, 14))


@given(seeds, shares)
def test_coverage_is_that_of_a_sorted_list(seed, share):
    events = random_events(seed)
    found = coverage(events, share)
    np.testing.assert_allclose(found, [oracle.coverage(layer.tolist(), share) for layer in events], rtol=1e-12)


@given(seeds, shares)
def test_coverage_by_pairs_chosen_elsewhere(seed, share):
    chosen, events = random_events(seed), random_events(seed + 1)
    expected = [oracle.coverage_of(*layer, share) for layer in zip(chosen.tolist(), events.tolist(), strict=True)]
    np.testing.assert_allclose(coverage_of(chosen, events, share), expected, rtol=1e-12)
    assert (coverage_of(chosen, events, share) <= coverage(events, share) + 1e-12).all()
    np.testing.assert_allclose(coverage_of(events, events, share), coverage(events, share), rtol=1e-12)


@given(seeds)
def test_the_curve_passes_through_every_coverage(seed):
    events = random_events(seed)
    curve = coverage_curve(events)
    for count in range(1, events.shape[1] + 1):
        expected = [oracle.coverage(layer.tolist(), count / events.shape[1]) for layer in events]
        np.testing.assert_allclose(curve[:, count - 1], expected, rtol=1e-12)


def test_coverage_by_hand():
    table = np.array([[[0, 4, 1], [0, 0, 5], [0, 0, 0]]])
    assert pairs_above(table).tolist() == [[4, 1, 5]]
    assert every_pair(table[:0]).shape == (0, 9)
    assert every_pair(table).tolist() == [[0, 4, 1, 0, 0, 5, 0, 0, 0]]
    assert coverage(pairs_above(table), 0.4).tolist() == [0.5]  # 1.2 pairs are one
    assert coverage(every_pair(table), 0.2).tolist() == [0.9]  # 1.8 pairs are two
    assert coverage_curve(pairs_above(table)).tolist() == [[0.5, 0.9, 1.0]]


@pytest.mark.parametrize("pairs", [0, 5])
def test_nothing_covers_nothing(pairs):
    none = np.zeros((2, pairs), np.int64)
    assert np.isnan(coverage(none, 0.2)).all()
    assert np.isnan(coverage_of(none, none, 0.2)).all()
    assert np.isnan(coverage_curve(none)).all()
