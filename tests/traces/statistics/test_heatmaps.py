"""Heatmaps against divisions pair by pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles import traces as oracle

from jaxmoe.traces.statistics import affinity, coactivation, conditional

seeds = st.integers(0, 2**32 - 1)


@given(seeds)
def test_heatmaps_are_divisions_pair_by_pair(seed):
    counts = oracle.pair_counts(oracle.random_trace(seed))
    pairs, together, load = counts["token_pairs"], counts["together"], counts["load"]
    found = conditional(pairs), affinity(together, load), coactivation(together)
    experts = range(oracle.EXPERTS)
    for layer in range(oracle.LAYERS):
        random = 2 / (oracle.EXPERTS * (oracle.EXPERTS - 1))
        for i in experts:
            events = sum(pairs[layer, i])
            for j in experts:
                both = together[layer, min(i, j), max(i, j)]
                share = both / together[layer].sum() if together[layer].any() else 0
                expected = (
                    pairs[layer, i, j] / events if events else 0,
                    both / load[layer, i] if load[layer, i] else 0,
                    share / random,
                )
                np.testing.assert_allclose([heatmap[layer, i, j] for heatmap in found], expected, rtol=1e-12)


def test_pairs_by_chance_have_a_coactivation_of_one():
    together = np.triu(np.full((1, 8, 8), 3), 1)
    np.testing.assert_allclose(coactivation(together), [1 - np.eye(8)])
