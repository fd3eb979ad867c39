"""Loads of windows, batches, nodes and topics against loops over tokens."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import traces as oracle

from jaxmoe.traces import GatingTrace, LoadCounts, TraceError, load_counts
from jaxmoe.traces.statistics import (
    batch_node_ratio,
    expert_runs,
    imbalance,
    loads_of_groups,
    long_tail,
    node_load_ratio,
    topics_of_files,
    topics_of_sequences,
    topics_of_windows,
)

seeds = st.integers(0, 2**32 - 1)
NODES = 4


def random_shares(seed):
    share = np.random.default_rng(seed).random((oracle.LAYERS, oracle.EXPERTS, NODES)).astype(np.float32)
    return share / share.sum(axis=2, keepdims=True)


def node_ratio(trace, share, tokens):
    """Load of nodes over their mean, [layer][node]; NaN where nothing was chosen."""
    load, work = oracle.load(trace, tokens), np.zeros((oracle.LAYERS, NODES))
    for layer, expert, node in itertools.product(range(oracle.LAYERS), range(oracle.EXPERTS), range(NODES)):
        work[layer, node] += load[layer, expert] * share[layer, expert, node]
    return [[value / (sum(row) / NODES) if sum(row) else np.nan for value in row] for row in work]


@given(seeds, st.sampled_from([8, 64]))
def test_loads_of_groups_are_those_of_their_tokens(seed, chunk_tokens):
    trace = oracle.random_trace(seed)
    group = np.random.default_rng(seed).integers(-1, 3, trace.num_tokens)
    found = loads_of_groups(trace, group, 3, chunk_tokens)
    for index in range(3):
        np.testing.assert_array_equal(found[index], oracle.load(trace, np.flatnonzero(group == index)))


@given(seeds)
def test_topics_are_sequences_of_one_name(seed):
    trace = oracle.random_trace(seed)
    topics = topics_of_sequences(trace)
    assert topics.names == tuple(dict.fromkeys(trace.seq_name))
    ends = [*trace.seq_start[1:], trace.num_tokens]
    for topic, name in enumerate(topics.names):
        tokens = [
            token
            for start, end, seq_name in zip(trace.seq_start, ends, trace.seq_name, strict=True)
            for token in range(start, end)
            if seq_name == name
        ]
        np.testing.assert_array_equal(topics.counts[topic], oracle.load(trace, tokens))


def windows(counts, names) -> LoadCounts:
    return LoadCounts(np.array(counts), np.arange(len(counts[0])), 2, tuple(names), {})


def test_topics_by_hand():
    topics = topics_of_windows(windows([[[3, 1, 0, 0]], [[0, 2, 2, 0]], [[1, 3, 0, 0]]], ["law", "art", "law"]))
    assert topics.names == ("law", "art")
    assert topics.counts.tolist() == [[[4, 4, 0, 0]], [[0, 2, 2, 0]]]
    assert topics.load.tolist() == [[[2, 2, 0, 0]], [[0, 2, 2, 0]]]
    assert topics.top(2).tolist() == [[[0, 1]], [[1, 2]]]
    assert topics.overlap(2)[..., 0].tolist() == [[1, 0.5], [0.5, 1]]


def test_topics_of_files_have_the_layers_in_common():
    one = LoadCounts(np.array([[[1, 2], [3, 4]]]), np.array([5, 6]), 1, ("all",), {})
    other = LoadCounts(np.array([[[5, 6], [7, 8]], [[1, 1], [1, 1]]]), np.array([6, 9]), 1, ("a", "b"), {})
    topics = topics_of_files({"one": one, "other": other})
    assert topics.names == ("one", "other")
    assert topics.layer_ids.tolist() == [6]
    assert topics.counts.tolist() == [[[3, 4]], [[6, 7]]]
    with pytest.raises(TraceError, match="no layer in common"):
        topics_of_files({"one": one, "far": dataclasses.replace(other, layer_ids=np.array([8, 9]))})
    with pytest.raises(TraceError, match="three has 3 experts, one has 2"):
        topics_of_files({"one": one, "three": LoadCounts(np.ones((1, 1, 3), int), np.array([5]), 1, ("all",), {})})


def test_topics_need_names():
    with pytest.raises(TraceError, match="seq_name"):
        topics_of_sequences(dataclasses.replace(oracle.random_trace(0), seq_name=None))


@given(seeds)
def test_nodes_of_windows_are_loops_over_tokens(seed):
    trace, share = oracle.random_trace(seed), random_shares(seed)
    found = node_load_ratio(trace, share, 5)
    assert found.shape == (7, oracle.LAYERS, NODES)
    for window in range(7):
        expected = node_ratio(trace, share, range(5 * window, 5 * window + 5))
        np.testing.assert_allclose(found[window], expected, rtol=1e-5)


def test_windows_that_do_not_fit_into_memory_together(monkeypatch):
    trace, share = oracle.random_trace(1), random_shares(1)
    expected = node_load_ratio(trace, share, 5)
    monkeypatch.setattr("jaxmoe.traces.statistics.topics.CHUNK_TOKENS", 15)
    np.testing.assert_allclose(node_load_ratio(trace, share, 5), expected, rtol=1e-6)


def test_a_window_longer_than_the_trace_is_refused():
    with pytest.raises(TraceError, match="37 tokens, fewer than a window of 38"):
        node_load_ratio(oracle.random_trace(1), random_shares(1), 38)


def test_a_batch_of_all_tokens_is_the_whole_trace():
    trace, share = oracle.random_trace(2), random_shares(2)
    found = batch_node_ratio(trace, share, trace.num_tokens, batches=3)
    expected = node_ratio(trace, share, range(trace.num_tokens))
    for batch in found:
        np.testing.assert_allclose(batch, expected, rtol=1e-5)


def test_imbalance_is_of_the_busiest_node():
    ratio = np.array([[[1.0, 1.0]], [[1.5, 0.5]], [[0.25, 1.75]], [[np.nan, np.nan]]])
    found = imbalance(ratio)
    busiest = [1, 1.5, 1.75]
    assert (found.mean.tolist(), found.worst.tolist()) == ([np.mean(busiest)], [1.75])
    assert found.p95.tolist() == [np.percentile(busiest, 95)]
    assert np.isnan(imbalance(ratio[3:]).mean).all()


def test_experts_live_in_runs():
    assert expert_runs(2, 5, 2).argmax(axis=2).tolist() == [[0, 0, 0, 1, 1]] * 2
    assert expert_runs(1, 8, 4).argmax(axis=2).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]


def test_the_long_tail_of_whole_traces_is_their_sorted_load():
    trace = oracle.random_trace(4)
    found = long_tail(trace, [5, trace.num_tokens], batches=3)
    expected = -np.sort(-oracle.load(trace), axis=1)
    np.testing.assert_array_equal(found[1], [expected] * 3)
    assert (np.diff(found, axis=3) <= 0).all()
    whole = dataclasses.replace(trace, experts=np.abs(oracle.random_trace(4, missing=0).experts))
    np.testing.assert_allclose(long_tail(whole, [5], batches=3).sum(axis=3), 5 * oracle.TOP_K)


def test_batches_of_the_long_tail_are_drawn_evenly():
    """Of two kinds of token, one in four is of the first: batches of two tokens, drawn without replacement."""
    trace = GatingTrace(np.array([0, 1, 1, 1]).reshape(4, 1, 1), 3, np.arange(1), np.array([0]), None, {})
    found = long_tail(trace, [1, 2], batches=4000)[:, :, 0].mean(axis=1)
    assert found[0].tolist() == [1, 0, 0]
    np.testing.assert_allclose(found[1], [1.5, 0.5, 0], atol=0.03)
    assert (long_tail(trace, [1, 2], batches=10, seed=3) == long_tail(trace, [1, 2], batches=10, seed=3)).all()


def test_a_batch_larger_than_the_trace_is_refused():
    with pytest.raises(TraceError, match="a batch of 38 tokens cannot be drawn from a trace of 37"):
        long_tail(oracle.random_trace(1), [16, 38])


def test_loads_of_one_group_are_those_of_the_trace():
    trace = oracle.random_trace(6)
    found = loads_of_groups(trace, np.zeros(trace.num_tokens, int), 1)
    np.testing.assert_array_equal(found, load_counts(trace).counts)
