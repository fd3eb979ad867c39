"""Drifting mixtures: parts of scenarios by hand, what iterations serve against plain loops, counts and traces."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.traces import TraceError
from jaxmoe.traces.synthesis import PRESETS, Arrivals, drawn_counts, read_arrivals

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "moentwine"))
from scenarios import (
    cyclic_mixture,
    iteration_mixture,
    merged_arrivals,
    only_topic,
    scenario_of_requests,
    scenario_shares,
)

sys.path.pop(0)


@pytest.fixture(scope="module")
def process():
    return PRESETS["qwen3-235b-a22b"].process(layers=2)


def arrivals_of(prompt, answer):
    return Arrivals(np.arange(len(prompt), dtype=float), np.array(prompt), np.array(answer))


def test_every_scenario_has_its_turn():
    parts = cyclic_mixture(np.arange(4) / 4, 4)
    np.testing.assert_array_equal(parts.argmax(axis=1), [0, 1, 2, 3])
    np.testing.assert_allclose(parts.sum(axis=1), 1)
    np.testing.assert_allclose(cyclic_mixture(np.array([0.3]), 4, sharpness=0.0), [[0.25] * 4])
    np.testing.assert_allclose(cyclic_mixture(np.array([0.0]), 2)[0, 0], np.e**2 / (np.e**2 + np.e**-2))


def test_scenarios_follow_the_mixture_of_their_moment():
    many = arrivals_of([1] * 4000, [1] * 4000)
    drawn = scenario_of_requests(many, 4, cycles=1.0, seed=0)
    quarter = drawn[875:1125]  # around a quarter of the way, where scenario 1 has its turn
    assert abs((quarter == 1).mean() - cyclic_mixture(np.array([0.25]), 4)[0, 1]) < 0.05


def test_prompts_fill_iterations_by_hand():
    # 3 + 5 tokens of scenario 0 and 1, then from the first again: 4 tokens an iteration.
    given = iteration_mixture(arrivals_of([3, 5], [1, 1]), np.array([0, 1]), "prefill", 3, 4)
    np.testing.assert_allclose(given, [[0.75, 0.25], [0, 1], [0.75, 0.25]])


def test_answers_keep_their_places_by_hand():
    # Two places. The first request begins in its place at 0, the second met one token before its end of two.
    given = iteration_mixture(arrivals_of([1] * 3, [3, 2, 4]), np.array([0, 1, 0]), "decode", 4, 2)
    np.testing.assert_allclose(given, [[0.5, 0.5], [1, 0], [1, 0], [1, 0]])


@given(st.integers(0, 10**6), st.sampled_from(["prefill", "decode", "hybrid"]))
def test_parts_sum_to_one_and_need_their_requests(seed, phase):
    rng = np.random.default_rng(seed)
    some = arrivals_of(rng.integers(1, 9, 20), rng.integers(1, 9, 20))
    scenario = np.r_[0, 2, rng.choice([0, 2], 18)]
    parts = iteration_mixture(some, scenario, phase, 30, 6)
    np.testing.assert_allclose(parts.sum(axis=1), 1)
    assert (parts >= 0).all()
    assert (parts[:, 1] == 0).all()


def test_prefill_against_token_by_token():
    rng = np.random.default_rng(3)
    prompt, scenario = rng.integers(0, 7, 15), rng.integers(0, 3, 15)
    tokens = np.tile(np.repeat(scenario, prompt), 9)[: 40 * 5].reshape(40, 5)
    expected = np.stack([(tokens == index).mean(axis=1) for index in range(scenario.max() + 1)], axis=1)
    given = iteration_mixture(arrivals_of(prompt, prompt), scenario, "prefill", 40, 5)
    np.testing.assert_allclose(given, expected, atol=1e-12)


def test_counts_have_the_shares_of_their_mixture():
    shares = np.array([[[0.9, 0.1, 0.0]], [[0.0, 0.5, 0.5]]])
    counts = drawn_counts(shares, np.array([[1.0, 0], [0, 1], [0.5, 0.5]]), 40000, seed=1)
    np.testing.assert_array_equal(counts.sum(axis=2), 40000)
    np.testing.assert_allclose(counts[:, 0] / 40000, [[0.9, 0.1, 0], [0, 0.5, 0.5], [0.45, 0.3, 0.25]], atol=0.02)
    assert counts[0, 0, 2] == 0


def test_topics_differ_and_each_is_that_of_a_trace(process):
    shares = scenario_shares(process, [0, 1], 4096, seed=0)
    np.testing.assert_allclose(shares.sum(axis=2), 1)
    again = scenario_shares(process, [0], 4096, seed=7)[0]
    same, other = np.abs(shares[0] - again).sum(), np.abs(shares[0] - shares[1]).sum()
    assert other > 2 * same


def test_merged_services_are_in_order():
    both = merged_arrivals([arrivals_of([1, 2], [3, 4]), Arrivals(np.array([0.5]), np.array([9]), np.array([8]))])
    np.testing.assert_array_equal(both.prompt, [1, 9, 2])


def test_recorded_arrivals(shared):
    known = read_arrivals(shared / "traces" / "arrivals" / "azure_llm_2023_conv.npz")
    assert len(known.seconds) == 19366
    assert abs(known.prompt.mean() - 1155) < 1


def test_wrong_input(process, tmp_path):
    with pytest.raises(TraceError, match="topic is 99, expected 0 to 15"):
        only_topic(process, 99)
    with pytest.raises(TraceError, match="in order of time"):
        Arrivals(np.array([1.0, 0.0]), np.array([1, 1]), np.array([1, 1]))
    with pytest.raises(TraceError, match="expected at least one of each"):
        iteration_mixture(arrivals_of([1], [1]), np.array([0]), "decode", 0, 4)
    np.savez(tmp_path / "a.npz", arrival_s=np.zeros(1))
    with pytest.raises(TraceError, match="has no context_tokens, generated_tokens"):
        read_arrivals(tmp_path / "a.npz")
