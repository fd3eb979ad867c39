"""That drawn traces follow the process, and that nothing but the process and the seed tells in them."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import synthesis as oracle

from jaxmoe.traces.synthesis import GatingProcess, RequestDeck, sample_parts, sample_trace, sampling
from jaxmoe.traces.trace import DECODE, PREFILL

LENGTH, PROMPT, TOKENS = 4, 2, 120_000


@pytest.fixture(scope="module")
def tiny():
    """One choice of three experts in two layers; requests of topics 0 and 1 by turns, half of them prompt."""
    requests = oracle.same_requests(TOKENS // LENGTH, LENGTH, PROMPT, topics=(0, 1))
    return oracle.random_process(0, layers=2, experts=3, top_k=1, requests=requests, strength=0.4)


@pytest.fixture(scope="module")
def trace(tiny):
    return sample_trace(tiny, TOKENS, seed=1)


def assert_softmax(chosen, log_weights):
    """Experts chosen, int [event], are as frequent as their weights are large, within five standard errors."""
    expected = np.exp(log_weights) / np.exp(log_weights).sum()
    measured = np.bincount(chosen, minlength=len(expected)) / len(chosen)
    assert len(chosen) > 100
    assert (np.abs(measured - expected) < 5 * np.sqrt(expected * (1 - expected) / len(chosen))).all()


def cases(trace, phase):
    """bool [token] by (topic, layer, expert of the layer below) for one phase."""
    chosen, topic = trace.experts[:, :, 0], np.arange(TOKENS) // LENGTH % 2
    for t, layer, below in itertools.product(range(2), range(2), range(3)):
        yield (t, layer, below), (topic == t) & (trace.phase == phase) & (chosen[:, 0] == below if layer else True)


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_choices_follow_the_token_before_and_the_layer_below(tiny, trace, phase):
    chosen = trace.experts[:, :, 0]
    follows = np.arange(TOKENS) % LENGTH > 0
    for (topic, layer, below), here in cases(trace, phase):
        for before in range(3):
            events = here & follows & (np.roll(chosen[:, layer], 1) == before)
            weights = oracle.log_weights(tiny.preferences, layer, topic, phase, [before], [below])
            assert_softmax(chosen[events, layer], weights)


def test_the_first_token_of_a_request_follows_usual_tokens(tiny, trace):
    opens = np.arange(TOKENS) % LENGTH == 0
    for (topic, layer, below), here in cases(trace, PREFILL):
        weights = oracle.log_weights(tiny.preferences, layer, topic, PREFILL, None, [below])
        assert_softmax(trace.experts[here & opens, layer, 0], weights)


def test_several_choices_follow_several():
    # Requests of one token, so that nothing varies but the choices of the layer below.
    process = oracle.random_process(2, 2, 4, 2, oracle.same_requests(30_000, 1), strength=0.5)
    experts = sample_trace(process, 30_000, seed=0).experts
    for below in itertools.permutations(range(4), 2):
        events = experts[(experts[:, 0] == below).all(axis=1), 1]
        weights = oracle.log_weights(process.preferences, 1, 0, PREFILL, None, below)
        for order, probability in oracle.orders(weights, process.preferences.together[1], 2).items():
            error = np.sqrt(probability * (1 - probability) / len(events))
            assert (events == order).all(axis=1).mean() == pytest.approx(probability, abs=5 * error + 1e-9)


def test_phases_and_starts_are_those_of_the_requests(trace):
    np.testing.assert_array_equal(trace.seq_start, np.arange(0, TOKENS, LENGTH))
    np.testing.assert_array_equal(trace.phase, np.arange(TOKENS) % LENGTH >= PROMPT)
    assert trace.layer_ids.tolist() == [3, 5]


@pytest.fixture(scope="module")
def small() -> GatingProcess:
    """Requests of many lengths, with prompts and a topic that changes within them."""
    rng = np.random.default_rng(0)
    length = rng.integers(1, 40, 24)
    topics = rng.integers(3, size=(24, 5))
    requests = RequestDeck(length, rng.integers(length + 1), topics, window=8, drift=0.0)
    return oracle.random_process(1, layers=2, experts=5, top_k=2, requests=requests)


def test_same_seed_same_trace(small):
    made, again, other = (sample_trace(small, 300, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(made.experts, again.experts)
    np.testing.assert_array_equal(made.seq_start, again.seq_start)
    assert (made.experts != other.experts).any()
    assert made.facts == small.facts


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_a_shorter_trace_is_the_beginning_of_a_longer_one(small, drift):
    process = replace(small, requests=replace(small.requests, drift=drift))
    long, short = sample_trace(process, 600, seed=3), sample_trace(process, 150, seed=3)
    np.testing.assert_array_equal(long.experts[:150], short.experts)
    np.testing.assert_array_equal(long.phase[:150], short.phase)


@pytest.mark.parametrize(("name", "value"), [("LANES", 4), ("SEGMENT", 8), ("WAVE_TOKENS", 64)])
def test_how_tokens_are_laid_out_does_not_tell(small, monkeypatch, name, value):
    made = sample_trace(small, 400, seed=4)
    monkeypatch.setattr(sampling, name, value)
    np.testing.assert_array_equal(sample_trace(small, 400, seed=4).experts, made.experts)


def test_parts_make_the_whole_and_progress_reaches_its_end(small, monkeypatch):
    monkeypatch.setattr(sampling, "WAVE_TOKENS", 128)
    seen = []
    parts = list(sample_parts(small, small.requests.deal(400, 4), 4, lambda *done: seen.append(done)))
    assert len(parts) == 4
    experts, logits = (np.concatenate(each) for each in zip(*parts, strict=True))
    np.testing.assert_array_equal(experts, sample_trace(small, 400, seed=4).experts)
    assert logits.shape[2] == 0
    drawn = [done for done, _ in seen]
    assert {total for _, total in seen} == {400}
    assert (drawn, drawn[-1]) == (sorted(drawn), 400)


def test_one_token_is_a_trace(small):
    assert sample_trace(small, 1, seed=0).experts.shape == (1, 2, 2)


def test_no_number_compiles_the_sampler_anew(small):
    sample_trace(small, 300, seed=0)
    compiled = sampling._advance._cache_size()
    other = replace(small, preferences=oracle.random_preferences(9, 2, 5, topics=3))
    sample_trace(other, 320, seed=5)
    assert sampling._advance._cache_size() == compiled


def test_extreme_preferences_give_legal_traces(small):
    # GatingTrace refuses an expert chosen twice. The second shift leaves every probability as it is.
    extreme = jax.tree.map(lambda table: 300 * jnp.sign(table), small.preferences)
    sample_trace(replace(small, preferences=extreme), 300, seed=0)


def test_a_shift_of_all_log_weights_changes_nothing(small):
    shifted = replace(small.preferences, popularity=small.preferences.popularity + 128)
    made, again = sample_trace(small, 300, 0), sample_trace(replace(small, preferences=shifted), 300, 0)
    assert (made.experts == again.experts).mean() > 0.99  # a few may differ where rounding decides


def test_groups_are_kept_to(small):
    preferences = oracle.random_preferences(3, layers=2, experts=8, topics=3)
    limited = replace(small, preferences=preferences, top_k=3, expert_groups=4, groups_per_token=2)
    experts = sample_trace(limited, 500, seed=0).experts
    groups = (experts[..., None] // 2 == np.arange(4)).any(axis=2).sum(axis=2)
    assert groups.max() == 2


def test_layers_above_those_wanted_may_be_left_out():
    requests = oracle.same_requests(20, LENGTH, PROMPT, topics=(0, 1))
    process = oracle.random_process(3, layers=4, experts=5, top_k=2, requests=requests, strength=0.4)
    process = replace(process, layer_ids=(3, 5, 7, 9))
    whole, part = sample_trace(process, 80, seed=2), sample_trace(process.up_to([5, 3]), 80, seed=2)
    np.testing.assert_array_equal(part.layer_ids, [3, 5])
    np.testing.assert_array_equal(part.experts, whole.experts[:, :2])
    assert process.up_to([3, 4]).layer_ids == (3, 5, 7, 9)
