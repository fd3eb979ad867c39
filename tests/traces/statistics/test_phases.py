"""Prefill against decode: against SciPy on counts by loops, and beside phases that mean nothing."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from oracles import traces as oracle

from jaxmoe.traces import TraceError, synthetic_trace
from jaxmoe.traces.statistics import phase_agreement, shuffled_phases

seeds = st.integers(0, 2**32 - 1)


def rho(one, other):
    """Spearman's, of counts that may all be equal."""
    constant = len(set(np.ravel(one))) == 1 or len(set(np.ravel(other))) == 1
    return np.nan if constant else scipy.stats.spearmanr(np.ravel(one), np.ravel(other)).statistic


def rows_over_sum(table):
    return np.array([[value / max(sum(row), 1) for value in row] for row in table])


@given(seeds)
def test_agreement_is_that_of_tokens_of_either_phase(seed):
    trace = oracle.random_trace(seed)
    phase = np.append(trace.phase[:-2], [0, 1])  # both are there
    found = phase_agreement(trace, phase, chunk_tokens=8)
    prefill, decode = (oracle.pair_counts(trace, phase == kind) for kind in (0, 1))
    for layer in range(oracle.LAYERS):
        np.testing.assert_allclose(found.load[layer], rho(prefill["load"][layer], decode["load"][layer]), atol=1e-12)
    for name, heatmap in (("token_pairs", found.token_heatmap), ("layer_pairs", found.layer_heatmap)):
        for layer, value in enumerate(heatmap):
            one, other = (rows_over_sum(counts[name][layer]) for counts in (prefill, decode))
            np.testing.assert_allclose(value, rho(one, other), atol=1e-12)


def test_dealing_phases_anew_keeps_their_tokens():
    phase = oracle.random_trace(3, tokens=300).phase
    dealt = shuffled_phases(phase, seed=0)
    assert (dealt != phase).any()
    assert dealt.sum() == phase.sum()
    assert (shuffled_phases(phase, seed=0) == dealt).all()
    assert (shuffled_phases(phase[:37], seed=0) == phase[:37]).all()  # there is one block


def test_phases_that_differ_agree_less_than_phases_at_random():
    one, other = (synthetic_trace(2048, [0, 1], 8, 2, 0.8, 0.0, 0.0, seed) for seed in (1, 2))
    experts = np.concatenate([one.experts, other.experts])
    trace, phase = dataclasses.replace(one, experts=experts), np.repeat(np.array([0, 1]), 2048)
    measured, dealt = phase_agreement(trace, phase), phase_agreement(trace, shuffled_phases(phase, 0))
    for name in ("load", "token_heatmap", "layer_heatmap"):
        assert getattr(measured, name).mean() + 0.3 < getattr(dealt, name).mean()


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (np.zeros(37, int), "no decode token"),
        (np.ones(37, int), "no prefill token"),
    ],
)
def test_traces_of_one_phase_are_refused(phase, message):
    with pytest.raises(TraceError, match=message):
        phase_agreement(oracle.random_trace(0), phase)
