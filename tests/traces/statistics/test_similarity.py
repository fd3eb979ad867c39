"""Rank correlation against SciPy's, overlaps against sets."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.traces.statistics import common_fraction, hottest, jaccard, spearman, spearman_of_heatmaps

seeds = st.integers(0, 2**32 - 1)


def random_pair(seed, shape):
    """With many ties, or with few."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, rng.choice([3, 1000]), (2, *shape))


@given(seeds)
def test_spearman_is_that_of_scipy(seed):
    one, other = random_pair(seed, (4, 9))
    one[0, 0], one[0, 1] = 0, 1  # not all equal
    expected = [scipy.stats.spearmanr(*layer).statistic for layer in zip(one, other, strict=True)]
    np.testing.assert_allclose(spearman(one, other), expected, atol=1e-12)


@given(seeds)
def test_heatmaps_are_compared_cell_by_cell(seed):
    one, other = random_pair(seed, (3, 4, 4))
    expected = [scipy.stats.spearmanr(a.ravel(), b.ravel()).statistic for a, b in zip(one, other, strict=True)]
    np.testing.assert_allclose(spearman_of_heatmaps(one, other), expected, atol=1e-12)


def test_order_alone_matters():
    values = np.array([3.0, 1.0, 2.0, 9.0])
    assert spearman(values, np.exp(values)) == pytest.approx(1)
    assert spearman(values, -values) == pytest.approx(-1)
    assert np.isnan(spearman(values, np.ones(4)))


@given(seeds, st.integers(1, 7))
def test_overlaps_are_those_of_sets(seed, count):
    one, other = random_pair(seed, (5, 7))
    hot, other_hot = hottest(one, count), hottest(other, count)
    for layer in range(5):
        order = sorted(range(7), key=lambda expert: (-one[layer, expert], expert))
        assert hot[layer].tolist() == order[:count]
    sets = [(set(a), set(b)) for a, b in zip(hot.tolist(), other_hot.tolist(), strict=True)]
    np.testing.assert_allclose(common_fraction(hot, other_hot), [len(a & b) / count for a, b in sets])
    np.testing.assert_allclose(jaccard(hot, other_hot), [len(a & b) / len(a | b) for a, b in sets])
