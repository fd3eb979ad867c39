"""Counts of pairs against loops over tokens, whole and in chunks; and what shuffling keeps and takes away."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import traces as oracle

from jaxmoe.traces import GatingTrace
from jaxmoe.traces.statistics import count_pairs, count_shuffled

seeds = st.integers(0, 2**32 - 1)
chunk_sizes = st.sampled_from([8, 64])  # 37 tokens in five chunks, of which the last is shorter, or in one


def small(experts, starts=(0,)) -> GatingTrace:
    experts = np.array(experts, np.int16)
    return GatingTrace(experts, 3, np.arange(experts.shape[1]), np.array(starts), None, {})


def equal(counts, expected):
    for name, values in expected.items():
        found = getattr(counts, name)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, values, err_msg=name)


@given(seeds, chunk_sizes)
def test_counts_are_those_of_loops_over_tokens(seed, chunk_tokens):
    trace = oracle.random_trace(seed)
    equal(count_pairs(trace, chunk_tokens=chunk_tokens), oracle.pair_counts(trace))


@given(seeds, chunk_sizes)
def test_only_marked_tokens_and_steps_between_them_are_counted(seed, chunk_tokens):
    trace = oracle.random_trace(seed)
    only = np.random.default_rng(seed).random(trace.num_tokens) < 0.7
    equal(count_pairs(trace, only=only, chunk_tokens=chunk_tokens), oracle.pair_counts(trace, only))


def test_three_tokens_by_hand():
    trace = small([[[0, 1], [2, 1]], [[1, 2], [0, 2]], [[1, -1], [0, 1]]])
    counts = count_pairs(trace)
    assert counts.load.tolist() == [[1, 3, 1], [2, 2, 2]]
    assert counts.token_pairs[0].tolist() == [[0, 1, 1], [0, 2, 1], [0, 1, 0]]
    assert counts.layer_pairs[0].tolist() == [[0, 1, 1], [2, 2, 2], [1, 0, 1]]
    assert counts.together[1].tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert (counts.shared.tolist(), counts.slots.tolist()) == ([2, 2], [3, 4])
    assert counts.reuse.tolist() == [2 / 3, 1 / 2]


def test_a_sequence_start_is_no_step():
    counts = count_pairs(small([[[0]], [[0]], [[1]], [[1]]], starts=(0, 2)))
    assert counts.token_pairs[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert counts.reuse.tolist() == [1]


def test_one_token_of_one_layer_has_no_neighbour():
    counts = count_pairs(small([[[0, 2]]]))
    assert counts.layer_pairs.shape == (0, 3, 3)
    assert counts.token_pairs.sum() == 0
    assert counts.together[0, 0, 2] == counts.together.sum() == 1
    assert np.isnan(counts.reuse).all()


def test_progress_is_reported_up_to_the_last_token():
    seen = []
    count_pairs(oracle.random_trace(0), lambda done, total: seen.append((done, total)), chunk_tokens=8)
    assert seen == [(8, 37), (16, 37), (24, 37), (32, 37), (37, 37)]


@given(seeds)
def test_shuffling_keeps_loads_and_makes_one_step_of_every_token(seed):
    trace = oracle.random_trace(seed, missing=0)
    shuffled, expected = count_shuffled(trace, seed, chunk_tokens=64), oracle.pair_counts(trace)
    equal(shuffled, {name: expected[name] for name in ("load", "together")})
    # Every token is once the first and once the second, with all of its K experts.
    for pairs, first, second in (
        (shuffled.token_pairs, expected["load"], expected["load"]),
        (shuffled.layer_pairs, expected["load"][:-1], expected["load"][1:]),
    ):
        np.testing.assert_array_equal(pairs.sum(axis=2), oracle.TOP_K * first)
        np.testing.assert_array_equal(pairs.sum(axis=1), oracle.TOP_K * second)
    assert (shuffled.slots == trace.num_tokens * oracle.TOP_K).all()


@given(seeds)
def test_shuffling_in_chunks_leaves_out_fewer_tokens_than_there_are_chunks(seed):
    trace = oracle.random_trace(seed, missing=0)
    shuffled, chunks = count_shuffled(trace, seed, chunk_tokens=8), 5
    load = oracle.load(trace)
    assert (shuffled.load <= load).all()
    assert (load.sum(axis=1) - shuffled.load.sum(axis=1) < chunks * oracle.TOP_K).all()
    assert (shuffled.token_pairs.sum(axis=(1, 2)) == oracle.TOP_K * shuffled.load.sum(axis=1)).all()


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_shuffled_pairs_are_those_of_unrelated_tokens(chunk_tokens):
    """Over many seeds a step shares what two different tokens share on average, and no structure is left."""
    trace = dataclasses.replace(oracle.random_trace(3, missing=0), seq_start=np.array([0]))
    load = oracle.load(trace)
    tokens, top_k = trace.num_tokens, oracle.TOP_K
    expected = (load * (load - 1)).sum(axis=1) / (tokens * (tokens - 1) * top_k)
    drawn = [count_shuffled(trace, seed, chunk_tokens=chunk_tokens) for seed in range(200)]
    np.testing.assert_allclose(np.mean([counts.reuse for counts in drawn], axis=0), expected, atol=0.015)
    pairs = np.mean([counts.layer_pairs / counts.layer_pairs.sum(axis=(1, 2), keepdims=True) for counts in drawn], 0)
    share = load / load.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(pairs, share[:-1, :, None] * share[1:, None, :], atol=0.01)


def test_the_same_seed_shuffles_alike():
    trace = oracle.random_trace(5)
    one, again, other = (count_shuffled(trace, seed, chunk_tokens=8).token_pairs for seed in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()


@pytest.mark.parametrize("chunk_tokens", [1, 8, 64])
def test_a_token_never_follows_itself(chunk_tokens):
    experts = np.arange(32).reshape(32, 1, 1)
    trace = GatingTrace(experts, 32, np.arange(1), np.array([0]), None, {})
    for seed in range(20):
        assert count_shuffled(trace, seed, chunk_tokens=chunk_tokens).shared.sum() == 0
