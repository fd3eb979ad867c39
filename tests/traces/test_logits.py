"""Logits: those drawn with a process choose what was drawn, and those reconstructed keep to what weights tell."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.synthesis import random_process, same_requests

from jaxmoe.traces import GatingTrace, TraceError, read_trace
from jaxmoe.traces.logits import reconstruct_logits, recorded_logits
from jaxmoe.traces.synthesis import sample_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture(scope="module")
def process():
    return random_process(3, layers=2, experts=12, top_k=3, requests=same_requests(6, 40))


def test_the_largest_logits_of_a_drawn_trace_are_its_choices_in_their_order(process):
    trace = sample_trace(process, 240, seed=1, logits=1.5)
    _, largest = jax.lax.top_k(jnp.asarray(trace.logits), 3)
    np.testing.assert_array_equal(largest, trace.experts)
    assert "synthetic" in trace.facts["logit_source"]


def test_to_have_logits_changes_no_choice_and_their_scale_is_as_asked(process):
    plain, one, two = (sample_trace(process, 240, seed=1, logits=scale) for scale in (None, 1.0, 2.0))
    assert plain.logits is None
    np.testing.assert_array_equal(plain.experts, one.experts)
    np.testing.assert_allclose(two.logits, 2 * one.logits)


def test_without_relations_logits_are_log_odds_with_gumbel_noise():
    # The softmax of expected log-weights is the chance to be chosen first, so is the share of first places.
    process = random_process(5, layers=1, experts=6, top_k=1, requests=same_requests(100, 100), strength=0.0)
    logits = sample_trace(process, 10_000, seed=0, logits=1.0).logits[:, 0]
    # Of a standard Gumbel variable: Euler's constant, and pi over the square root of 6.
    assert (logits - logits.mean(axis=1, keepdims=True)).std() == pytest.approx(np.pi / np.sqrt(6 * 6 / 5), rel=0.02)


def of_weights(weights: np.ndarray, experts: np.ndarray) -> GatingTrace:
    return GatingTrace(experts, 8, np.array([0]), np.array([0]), None, {}, weights=weights)


LOGITS = np.random.default_rng(0).normal(scale=1.5, size=(300, 1, 8))
ORDER = np.argsort(-LOGITS, axis=2)[..., :3]
SOFTMAX = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=2, keepdims=True)
CHOSEN = np.take_along_axis(SOFTMAX, ORDER, axis=2)


@pytest.mark.parametrize("whole", [False, True])
def test_reconstructed_logits_keep_to_what_is_known(whole):
    weights = CHOSEN / CHOSEN.sum(axis=2, keepdims=True) if whole else CHOSEN
    found = reconstruct_logits(of_weights(weights, ORDER))
    logits = found.trace.logits
    assert found.known_mass != whole
    _, largest = jax.lax.top_k(jnp.asarray(logits), 3)
    np.testing.assert_array_equal(largest, ORDER)
    expected = np.take_along_axis(LOGITS, ORDER, axis=2)
    np.testing.assert_allclose(np.take_along_axis(logits, ORDER, axis=2), expected - expected[..., -1:], atol=1e-4)
    assert (logits <= found.most + 1e-6).all()
    # A bias of nothing, compiled, leaves choices as they are: no difference is so small that it is flushed to 0.
    again = jax.jit(lambda logits, bias: jax.lax.top_k(logits + bias, 3)[1])
    np.testing.assert_array_equal(again(jnp.asarray(found.most), full(8, 0.0)), ORDER)
    np.testing.assert_array_equal(again(jnp.asarray(logits), full(8, 0.25)), ORDER)
    true = LOGITS - np.take_along_axis(LOGITS, ORDER, axis=2)[..., -1:]
    assert (true <= found.most + 1e-6).all()
    if not whole:
        mass = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
        np.testing.assert_allclose(np.take_along_axis(mass, ORDER, axis=2), CHOSEN, rtol=2e-3)


def test_a_trace_without_logits_or_weights_says_what_to_do():
    trace = GatingTrace(ORDER, 8, np.array([0]), np.array([0]), None, {})
    with pytest.raises(TraceError, match=r"no logits.*record them"):
        recorded_logits(trace)
    with pytest.raises(TraceError, match="no gate weights"):
        reconstruct_logits(trace)


def test_weights_that_are_no_softmax_have_no_logits():
    # As sigmoids are, or a softmax that was scaled.
    with pytest.raises(TraceError, match=r"sum to 2\.5, more than 1"):
        reconstruct_logits(of_weights(2.5 * CHOSEN / CHOSEN.sum(axis=2, keepdims=True), ORDER))


@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces beside the project")
@pytest.mark.parametrize(("name", "known"), [("deepseek-v2-lite/intent", True), ("gpt-oss-20b/tulu3_polyglot", False)])
def test_recorded_weights_tell_what_they_are_of(name, known):
    trace = read_trace(TRACES / f"{name}.npz").select_layers([3]).select_tokens(np.arange(500))
    found = reconstruct_logits(trace)
    assert found.known_mass == known
    _, largest = jax.lax.top_k(jnp.asarray(found.trace.logits), trace.top_k)
    same = np.sort(largest, axis=2) == np.sort(trace.experts, axis=2)
    assert same.all()
