"""That made-up traces have the skew, co-activation and reuse that they state."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.traces import GatingTrace, TraceError, synthetic_trace


def trace(tokens=16384, layer_ids=(0, 1), num_experts=32, top_k=4, skew=0.0, coactivation=0.0, reuse=0.0, seed=0):
    return synthetic_trace(tokens, layer_ids, num_experts, top_k, skew, coactivation, reuse, seed)


def first_choices(trace: GatingTrace, layer: int) -> np.ndarray:
    """Share of the first choices on every expert, the most popular first."""
    counts = np.bincount(trace.experts[:, layer, 0], minlength=trace.num_experts)
    return np.sort(counts)[::-1] / trace.num_tokens


def chosen(trace: GatingTrace) -> np.ndarray:
    """bool [token, layer, expert]."""
    return (trace.experts[..., None] == np.arange(trace.num_experts)).any(axis=2)


def neighbour_overlap(trace: GatingTrace) -> float:
    """Mean share of a token's experts that the token before in its sequence chose too."""
    hits = chosen(trace)
    inside = np.setdiff1d(np.arange(1, trace.num_tokens), trace.seq_start)
    return float((hits[inside] & hits[inside - 1]).sum() / (inside.size * hits.shape[1] * trace.top_k))


def unrelated_overlap(trace: GatingTrace) -> float:
    """The same for two independent tokens: sum of squared expert loads over top_k."""
    load = chosen(trace).mean(axis=0)
    return float((load**2).sum(axis=1).mean() / trace.top_k)


def pair_concentration(trace: GatingTrace) -> float:
    """Share of pairs of experts chosen together that falls on a tenth of all pairs."""
    hits = chosen(trace).astype(float)
    pairs = np.einsum("tle,tlf->lef", hits, hits)[:, *np.triu_indices(trace.num_experts, 1)]
    most = np.sort(pairs, axis=1)[:, ::-1][:, : pairs.shape[1] // 10]
    return float((most.sum(axis=1) / pairs.sum(axis=1)).mean())


@pytest.mark.parametrize("coactivation", [0.0, 0.8])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 2.0])
def test_first_choices_follow_the_zipf_exponent(skew, coactivation):
    tokens = 16384
    made = trace(tokens, skew=skew, coactivation=coactivation)
    expected = np.arange(1, 33) ** -skew
    expected /= expected.sum()
    for layer in range(2):
        measured = first_choices(made, layer)
        # Sorting by measured counts lifts the top of equally popular experts: five standard deviations hold it.
        assert (np.abs(measured - expected) < 5 * np.sqrt(expected / tokens) + 1e-4).all()


def test_measured_exponent_is_the_stated_one():
    # Slope of log share over log rank for the eight most popular experts, which are seen often enough.
    made = trace(65536, skew=0.8)
    slope = np.polyfit(np.log(np.arange(1, 9)), np.log(first_choices(made, 0)[:8]), 1)[0]
    assert slope == pytest.approx(-0.8, abs=0.03)


def test_popular_experts_differ_between_layers():
    made = trace(2048, layer_ids=range(8), skew=2.0)
    assert len({np.bincount(made.experts[:, layer, 0]).argmax() for layer in range(8)}) > 3


@pytest.mark.parametrize(("skew", "coactivation"), [(0.0, 0.0), (0.7, 0.0), (0.7, 0.9)])
@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.9, 1.0])
def test_neighbours_share_as_stated(reuse, skew, coactivation):
    settings = {"tokens": 32768, "skew": skew, "coactivation": coactivation}
    baseline = unrelated_overlap(trace(**settings))
    measured = neighbour_overlap(trace(**settings, reuse=reuse))
    assert measured == pytest.approx(reuse + (1 - reuse) * baseline, abs=0.01)


def test_reuse_leaves_popularity_and_stops_at_sequences():
    made = trace(reuse=1.0, layer_ids=(3,), skew=1.0)
    sequences = made.experts.reshape(-1, 512, 4)
    assert (sequences == sequences[:, :1]).all()
    assert len(np.unique(sequences[:, 0], axis=0)) > 16  # of 32 sequences; few would be alike by chance
    np.testing.assert_array_equal(made.seq_start, np.arange(0, 16384, 512))


@pytest.mark.parametrize("skew", [0.0, 0.6])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (32, 4), (64, 6)])
def test_coactivation_gathers_pairs(num_experts, top_k, skew):
    strengths = [0.0, 0.25, 0.5, 0.75, 1.0]
    measured = [
        pair_concentration(trace(8192, num_experts=num_experts, top_k=top_k, skew=skew, coactivation=strength))
        for strength in strengths
    ]
    assert (np.diff(measured) > 0).all()


def test_full_coactivation_keeps_to_groups():
    # 32 experts, top 4: four groups of eight. Two experts of different groups are never seen together.
    hits = chosen(trace(layer_ids=(0,), coactivation=1.0))[:, 0]
    together = hits.T.astype(int) @ hits > 0
    assert (together.sum(axis=1) == 8).all()
    np.testing.assert_array_equal(together @ together, together)


def test_one_group_means_no_effect():
    few = {"num_experts": 7, "top_k": 2, "skew": 0.5}
    np.testing.assert_array_equal(trace(**few, coactivation=1.0).experts, trace(**few).experts)


def test_further_choices_are_draws_without_replacement():
    # Rates 1, 1/2, 1/3 and two choices: P(a then b) = p_a p_b / (1 - p_a), with p = 6/11, 3/11, 2/11.
    made = trace(65536, layer_ids=(0,), num_experts=3, top_k=2, skew=1.0).experts[:, 0]
    rank = np.argsort(-np.bincount(made[:, 0]))
    share = np.array([6, 3, 2]) / 11
    for a in range(3):
        for b in set(range(3)) - {a}:
            measured = ((made[:, 0] == rank[a]) & (made[:, 1] == rank[b])).mean()
            assert measured == pytest.approx(share[a] * share[b] / (1 - share[a]), abs=0.01)


@given(
    tokens=st.integers(1, 1100),
    num_experts=st.integers(1, 20),
    top_k=st.integers(1, 20),
    skew=st.floats(0, 1000),
    coactivation=st.floats(0, 1),
    reuse=st.floats(0, 1),
)
def test_every_choice_is_legal(tokens, num_experts, top_k, skew, coactivation, reuse):
    top_k = min(top_k, num_experts)
    # GatingTrace refuses ids out of range and experts chosen twice.
    made = trace(tokens, (4, 2), num_experts, top_k, skew, coactivation, reuse)
    assert made.experts.shape == (tokens, 2, top_k)
    assert made.layer_ids.tolist() == [4, 2]


def test_same_arguments_give_the_same_trace():
    settings = {"tokens": 600, "skew": 0.5, "coactivation": 0.3, "reuse": 0.3}
    made, again, other = (trace(**settings, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(made.experts, again.experts)
    assert made.facts == again.facts
    assert (made.experts != other.experts).any()
    np.testing.assert_array_equal(trace(**settings, seed=1, layer_ids=(1,)).experts, made.experts[:, 1:])


def test_facts_say_that_it_is_synthetic():
    facts = trace(64, skew=0.5, coactivation=0.25, reuse=0.75, seed=9).facts
    assert all("synthetic" in text for text in facts.values())
    for setting in ("skew=0.5", "coactivation=0.25", "reuse=0.75", "seed=9"):
        assert setting in facts["source"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"top_k": 33}, "top_k is 33, expected 1 to num_experts, 32"),
        ({"top_k": 0}, "top_k is 0"),
        ({"skew": -0.1}, "skew is -0.1"),
        ({"skew": float("nan")}, "skew is nan"),
        ({"coactivation": 1.5}, "coactivation is 1.5"),
        ({"reuse": float("nan")}, "reuse is nan"),
        ({"layer_ids": (1, 1)}, "names a layer twice"),
        ({"layer_ids": ()}, "experts has shape"),
    ],
)
def test_numbers_out_of_range(settings, message):
    with pytest.raises(TraceError, match=message):
        trace(**{"tokens": 64} | settings)


def test_a_usual_trace_is_drawn_in_seconds():
    start = time.process_time()
    made = trace(8192, layer_ids=range(32), num_experts=64, top_k=6, skew=0.5, coactivation=0.2, reuse=0.2)
    assert time.process_time() - start < 3
    assert dataclasses.replace(made).num_tokens == 8192
