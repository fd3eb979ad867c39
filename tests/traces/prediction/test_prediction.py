"""Predictors against plain loops, cases worked by hand, and what holds for any of them."""

import dataclasses
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import prediction as oracle
from oracles.arrays import full

from jaxmoe.traces import GatingTrace, TraceError, synthetic_trace
from jaxmoe.traces.prediction import (
    Frequency,
    NextToken,
    Perfect,
    Random,
    RunningWindow,
    TokenHistory,
    advance,
    conditional_rows,
    fit,
    history,
    ranks,
    recall,
    scores,
    split_sequences,
)
from jaxmoe.traces.prediction.predictor import PrefillHeatmap, PrefillLoad

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "studies" / "data_movement"))
from load_scoring import batch_loads, load_error, set_recall, top_of_rows, window_loads

sys.path.pop(0)

TOKENS, LAYERS, EXPERTS, TOP_K, PREFILL = 24, 3, 5, 2, 4
RATE, WINDOW, PRIOR, PREFILL_PRIOR = 0.25, 3, 2.0, 5.0
NAMES = tuple(fit(synthetic_trace(8, [0], 4, 2, 0.0, 0.0, 0.0, seed=0)))
LOOKING_BACK = tuple(name for name in NAMES if name != "perfect")


EVEN = full((LAYERS, EXPERTS), 1 / EXPERTS)


def random_trace(seed: int, missing: float = 0.1, starts=(0, 9, 10), phase=None) -> GatingTrace:
    """Random choices, some missing, in sequences of 9, 1 and 14 tokens."""
    rng = np.random.default_rng(seed)
    experts = rng.random((TOKENS, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.int16)
    experts[rng.random(experts.shape) < missing] = -1
    return GatingTrace(experts, EXPERTS, np.arange(LAYERS), np.array(starts), None, {}, phase=phase)


def trace_of(choices, num_experts: int, starts=(0,)) -> GatingTrace:
    """One layer, from a list of choices."""
    experts = np.array(choices, np.int16)[:, None]
    return GatingTrace(experts, num_experts, np.array([0]), np.array(starts), None, {})


def fitted(trace: GatingTrace):
    return fit(trace, rate=RATE, window=WINDOW, prior=PRIOR, prefill_prior=PREFILL_PRIOR)


def told_by_loops(name: str, trace: GatingTrace, tokens: GatingTrace) -> np.ndarray:
    """Scores [token, layer, expert] in plain loops, of a predictor fitted to `trace`."""
    learned, experts = trace.experts.tolist(), tokens.experts.tolist()
    of_learned, of_tokens = (
        (np.searchsorted(some.seq_start, np.arange(some.num_tokens), side="right")).tolist() for some in (trace, tokens)
    )
    prefill = [len(oracle.before(of_tokens, t)) < PREFILL for t in range(tokens.num_tokens)]
    frequency = oracle.frequencies(learned, EXPERTS)
    relation = "token" if "token" in name else "layer"
    told = np.zeros((tokens.num_tokens, LAYERS, EXPERTS))
    for layer in range(LAYERS):
        steps = oracle.token_steps(learned, of_learned, layer) if relation == "token" else None
        rows = oracle.rows(steps or oracle.layer_steps(learned, layer), frequency[layer], PRIOR)
        for t in range(tokens.num_tokens):
            past = oracle.before(of_tokens, t)
            looked_up = oracle.given_choices(experts, of_tokens, t, layer, relation)
            match name:
                case "frequency":
                    told[t, layer] = frequency[layer]
                case "repeat last" | "running window":
                    recent = past[-1:] if name == "repeat last" else past[-WINDOW:]
                    told[t, layer] = oracle.counted(experts, recent, layer, EXPERTS) + frequency[layer] / 2
                case "exponential average":
                    told[t, layer] = oracle.averaged(experts, of_tokens, t, layer, frequency[layer], RATE)
                case "prefill load":
                    seen = [s for s in past if prefill[s]]
                    told[t, layer] = oracle.counted(experts, seen, layer, EXPERTS) + PREFILL_PRIOR * frequency[layer]
                case "next token" | "next layer":
                    told[t, layer] = sum(rows[one] for one in looked_up)
                case "prefill next token" | "prefill next layer":
                    where = (experts, of_tokens, prefill, t, layer)
                    told[t, layer] = sum(
                        oracle.prefill_row(*where, one, relation, rows[one], PREFILL_PRIOR) for one in looked_up
                    )
                case "perfect":
                    told[t, layer] = oracle.counted(experts, [t], layer, EXPERTS)
    return told


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
@given(seed=st.integers(0, 2**16))
def test_scores_are_those_of_plain_loops(name, seed):
    trace, tokens = random_trace(seed), random_trace(seed + 1, starts=(0, 14, 20))
    told = scores(fitted(trace)[name], history(tokens, PREFILL))
    np.testing.assert_allclose(told, told_by_loops(name, trace, tokens), rtol=2e-5, atol=1e-6)


@given(seed=st.integers(0, 2**16), n=st.integers(1, EXPERTS))
def test_recall_is_that_of_plain_loops(seed, n):
    tokens = random_trace(seed)
    predictor, past = RunningWindow(EVEN, WINDOW), history(tokens, PREFILL)
    told, found = scores(predictor, past), recall(ranks(predictor, past), n)
    expected = [oracle.recall(np.asarray(told), tokens.experts.tolist(), layer, n) for layer in range(LAYERS)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@given(seed=st.integers(0, 2**16))
def test_batch_and_window_loads_are_those_of_plain_loops(seed):
    tokens = random_trace(seed)
    experts, past = tokens.experts.tolist(), history(tokens, PREFILL)
    predictor = fitted(tokens)["next token"]
    told = np.asarray(scores(predictor, past), float)
    batch = np.random.default_rng(seed).integers(-1, 3, TOKENS)
    predicted, real = np.zeros((2, 3, LAYERS, EXPERTS))
    for t in range(TOKENS):
        for layer in range(LAYERS) if batch[t] >= 0 else ():
            chosen = oracle.known(experts[t][layer])
            predicted[batch[t], layer] += told[t, layer] / told[t, layer].sum() * len(chosen)
            real[batch[t], layer] += oracle.counted(experts, [t], layer, EXPERTS)
    loads = batch_loads(predictor, past, jnp.asarray(batch), 3)
    np.testing.assert_allclose(loads[0], predicted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loads[1], real)
    expected = [oracle.load_error(predicted, real, layer) for layer in range(LAYERS)]
    np.testing.assert_allclose(load_error(*loads), expected, rtol=1e-4)

    predicted, real = window_loads(predictor, past, 4)
    for window, first in enumerate(range(0, TOKENS, 4)):
        for layer in range(LAYERS):
            load = oracle.counted(experts, range(first, first + 4), layer, EXPERTS)
            load *= not any(start in range(first + 1, first + 4) for start in tokens.seq_start)
            np.testing.assert_allclose(real[window, layer], load)
            share = told[first, layer] / told[first, layer].sum()
            np.testing.assert_allclose(predicted[window, layer], share * load.sum(), rtol=1e-4, atol=1e-6)


# The paper's example, Fig. 10(b): experts 1 and 4 are chosen; their rows name the experts of the next token.
PAIRS = np.zeros((1, 6, 6), np.float32)
PAIRS[0, 1, [2, 4, 0]], PAIRS[0, 4, [4, 5, 3]] = [8, 6, 1], [7, 5, 2]
EXAMPLE = NextToken(conditional_rows(jnp.asarray(PAIRS), full((1, 6), 1 / 6), 1e-6))
NOW = TokenHistory(jnp.array([[[1, 4]], [[2, 5]]]), jnp.array([True, False]), jnp.array([False, False]))


def test_the_rows_of_the_chosen_experts_name_the_next():
    named = np.asarray(scores(top_of_rows(EXAMPLE, 2), NOW))[1, 0]
    assert named.tolist() == [0, 0, 1, 0, 2, 1]  # 2 and 4 of row 1, 4 and 5 of row 4
    assert np.asarray(scores(top_of_rows(EXAMPLE, 1), NOW))[1, 0].tolist() == [0, 0, 1, 0, 1, 0]
    ranked = np.asarray(scores(EXAMPLE, NOW))[1, 0]
    np.testing.assert_allclose(ranked, [1 / 15, 0, 8 / 15, 2 / 14, 6 / 15 + 7 / 14, 5 / 14], atol=1e-6)


def test_recall_and_size_of_a_predicted_set():
    later = eqx.tree_at(lambda tokens: tokens.start, NOW, jnp.array([True, False]))
    named = top_of_rows(EXAMPLE, 2)
    # Nothing is known of the first token: all shares are equal, and experts 0 and 1 are named; it chose 1 and 4.
    hits, size = set_recall(named, later)
    np.testing.assert_allclose(hits, [(1 + 2) / 4])
    np.testing.assert_allclose(size, [(2 + 3) / 2])


def test_ranks_of_equal_scores_are_by_number_and_missing_choices_have_none():
    even = Frequency(full((1, 4), 0.25))
    tokens = history(trace_of([[3, -1], [0, 2]], 4), 0)
    assert ranks(even, tokens).tolist() == [[[3, -1]], [[0, 2]]]
    assert recall(ranks(even, tokens), 1).tolist() == pytest.approx([1 / 3])
    assert recall(ranks(even, tokens), 3, jnp.array([False, True])).tolist() == [1]


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("next token", [[0, 1], [2, 3], [4, 5]] * 8),
        ("repeat last", [[0, 1]] * 24),
        ("running window", [[0, 1]] * 24),
        ("exponential average", [[0, 1]] * 24),
        ("frequency", [[0, 1]] * 24),
    ],
)
def test_a_periodic_trace_is_predicted_perfectly(name, choices):
    trace = trace_of(choices, 6)
    rank = ranks(fit(trace)[name], history(trace, 0))
    assert recall(rank, 2, jnp.asarray(np.arange(24) > 0)).tolist() == [1]


def test_layers_that_follow_each_other_are_predicted_perfectly():
    first = np.random.default_rng(0).integers(6, size=(50, 1, 1))
    trace = GatingTrace((first + np.array([[0], [2], [5]])) % 6, 6, np.arange(3), np.array([0]), None, {})
    found = np.asarray(recall(ranks(fit(trace)["next layer"], history(trace, 0)), 1))
    assert found[1:].tolist() == [1, 1]
    assert found[0] < 0.6


def test_a_request_with_loads_of_its_own_is_predicted_from_its_prefill():
    usual, special = [[0, 1], [1, 2]] * 10, [[4, 5], [5, 3]] * 10
    learned, tokens = fit(trace_of(usual, 6), prefill_prior=1.0), history(trace_of(special, 6), 6)
    decode = jnp.asarray(~np.asarray(tokens.prefill))
    assert recall(ranks(learned["frequency"], tokens), 3, decode).tolist() == [0]
    assert recall(ranks(learned["prefill load"], tokens), 3, decode).tolist() == [1]
    assert recall(ranks(learned["prefill next token"], tokens), 2, decode).tolist() == [1]


def test_rows_never_seen_and_starts_fall_back_to_frequency():
    trace = trace_of([[0], [1], [0], [1], [1]], 4)
    learned, tokens = fit(trace), history(trace_of([[3], [2]], 4), 0)
    for name in LOOKING_BACK[1:]:
        told = np.asarray(scores(learned[name], tokens))
        share = told / told.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(share[0, 0], [0.4, 0.6, 0, 0], atol=1e-6, err_msg=name)
    np.testing.assert_allclose(np.asarray(scores(learned["next token"], tokens))[1, 0], [0.4, 0.6, 0, 0], atol=1e-6)


def test_perfect_is_right_and_random_is_right_as_often_as_chance():
    trace = synthetic_trace(2000, [0, 1], 16, 2, skew=1.0, coactivation=0.5, reuse=0.3, seed=0)
    tokens = history(trace, 0)
    assert recall(ranks(Perfect(16), tokens), 2).tolist() == [1, 1]
    assert load_error(*batch_loads(Perfect(16), tokens, jnp.asarray(np.arange(2000) // 64), 32)).tolist() == [0, 0]
    rank = ranks(Random(jax.random.key(3), 16), tokens)
    for n in (1, 4, 12):
        deviation = np.sqrt(n / 16 * (1 - n / 16) / 4000)
        np.testing.assert_allclose(recall(rank, n), n / 16, atol=5 * deviation)


def test_repeating_the_last_choice_finds_what_neighbours_share():
    trace = synthetic_trace(2000, [0], 64, 2, skew=0.0, coactivation=0.0, reuse=0.6, seed=1)
    found = np.asarray(recall(ranks(fit(trace)["repeat last"], history(trace, 0)), 2))
    chosen = trace.experts[:, 0]
    shared = (chosen[1:, :, None] == chosen[:-1, None]).any(axis=-1)[np.arange(1, 2000) % 512 != 0]
    assert float(found[0]) == pytest.approx(shared.mean(), abs=2e-3)  # starts are told by frequency


@pytest.mark.parametrize("name", LOOKING_BACK)
def test_no_predictor_looks_ahead(name):
    trace = random_trace(5)
    predictor, other = fitted(trace)[name], trace.experts.copy()
    other[12, 1] = (trace.experts[12, 1] + 1) % EXPERTS
    other[13:] = random_trace(6).experts[13:]
    told, changed = (
        np.asarray(scores(predictor, history(dataclasses.replace(trace, experts=experts), PREFILL)))
        for experts in (trace.experts, other)
    )
    np.testing.assert_array_equal(told[:12], changed[:12])
    np.testing.assert_array_equal(told[12, :2], changed[12, :2])  # of token 12, layer 1 changed


@pytest.mark.parametrize("name", NAMES)
def test_steps_by_hand_and_side_by_side_are_those_of_the_scan(name):
    trace = random_trace(7, starts=(0, 12))
    predictor, tokens = fitted(trace)[name], history(trace, PREFILL)
    expected = np.asarray(scores(predictor, tokens))
    state, tokens = predictor.init(TOP_K), jax.device_get(tokens)
    for t in range(3):
        state, told = one_step(predictor, state, jax.tree.map(lambda leaf, t=t: jnp.asarray(leaf[t]), tokens))
        np.testing.assert_allclose(told, expected[t], rtol=1e-6)
    requests = jax.tree.map(lambda leaf: jnp.asarray(leaf.reshape(2, 12, *leaf.shape[1:])), tokens)
    beside = np.asarray(side_by_side(predictor, requests))
    np.testing.assert_allclose(beside.reshape(expected.shape), expected, rtol=1e-6)


one_step = eqx.filter_jit(advance)
side_by_side = eqx.filter_jit(eqx.filter_vmap(scores, in_axes=(None, 0)))


def test_prefill_is_what_the_trace_states_else_the_first_tokens_of_each_request():
    assert np.flatnonzero(history(random_trace(0), 2).prefill).tolist() == [0, 1, 9, 10, 11]
    stated = random_trace(0, phase=np.arange(TOKENS) % 2)
    assert history(stated, 2).prefill.tolist() == (np.arange(TOKENS) % 2 == 0).tolist()


@given(seed=st.integers(0, 99), share=st.sampled_from([0.01, 0.5, 0.99]))
def test_sequences_are_split_whole(seed, share):
    trace = random_trace(seed)
    parts = split_sequences(trace, share, seed)
    assert sum(len(part.seq_start) for part in parts) == 3
    lengths = np.concatenate([np.diff(part.seq_start, append=part.num_tokens) for part in parts])
    assert sorted(lengths) == [1, 9, 14]
    tokens = np.concatenate([part.experts for part in parts])
    assert sorted(tokens.tolist()) == sorted(trace.experts.tolist())


def test_what_cannot_be_split_or_windowed_is_refused():
    with pytest.raises(TraceError, match="one sequence cannot be split"):
        split_sequences(random_trace(0, starts=(0,)), 0.5, 0)
    with pytest.raises(TraceError, match="24 tokens make no window of 25"):
        window_loads(Perfect(EXPERTS), history(random_trace(0), 0), 25)


@pytest.mark.parametrize("name", ["random", "running window", "next layer", "prefill next token"])
def test_one_layer_and_every_expert_chosen(name):
    trace = trace_of([[0]] * 6, 1)
    assert recall(ranks(fit(trace)[name], history(trace, 2)), 1).tolist() == [1]


def test_rates_and_rows_can_be_differentiated():
    trace = random_trace(3)

    def loss(predictor):
        return (scores(predictor, history(trace, PREFILL)) ** 2).sum()

    learned = fitted(trace)
    slope = eqx.filter_jit(eqx.filter_grad(loss))
    assert float(slope(learned["exponential average"]).rate) != 0
    assert np.isfinite(slope(learned["prefill next token"]).heatmap.rows).all()


@pytest.mark.parametrize("kind", [PrefillLoad, PrefillHeatmap])
def test_another_prior_compiles_nothing(kind):
    traced = []

    @eqx.filter_jit
    def first_scores(predictor, tokens):
        traced.append(predictor)
        return scores(predictor, tokens)

    trace = random_trace(0)
    seen = fitted(trace)["next token"] if kind is PrefillHeatmap else EVEN
    found = [first_scores(kind(seen, prior), history(trace, PREFILL)) for prior in (5.0, 50.0)]
    assert len(traced) == 1
    assert not np.allclose(*found)
