"""The gate and its bias: against plain loops, and what must not change."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.arrays import full

from jaxmoe.engine import all_to_all, gating
from jaxmoe.methods.camoe import gate
from jaxmoe.methods.camoe.gate import time_proxy
from jaxmoe.network import AlphaBeta, Congestion
from jaxmoe.network.pairwise import AllToAll, same_models

NODES, EXPERTS, TOP_K, TOKENS = 4, 16, 3, 40
SHARE = np.repeat(np.eye(NODES, dtype=np.float32), EXPERTS // NODES, axis=0)
seeds = st.integers(0, 2**31)

# Compiled whole: step by step, every step of every shape is compiled by itself.
assignment_copies, node_copies, biased = (
    jax.jit(all_to_all.assignment_copies),
    jax.jit(all_to_all.node_copies),
    jax.jit(gating.biased),
)
choose, chosen_experts = (jax.jit(each, static_argnums=(1, 2)) for each in (gate.choose, gating.chosen_experts))
gate_bias, standard_scores = eqx.filter_jit(gate.gate_bias), eqx.filter_jit(gate.standard_scores)


def exchange_of(alpha, beta) -> AllToAll:
    model = AlphaBeta(jnp.asarray(alpha, jnp.float32), jnp.asarray(beta, jnp.float32))
    return AllToAll(same_models(model), *(jnp.asarray(size) for size in (512.0, 4160.0, 4096.0)))


def random_exchange(seed: int) -> AllToAll:
    rng = np.random.default_rng(seed)
    return exchange_of(rng.uniform(1e-4, 1e-3, (NODES, NODES)), 1 / rng.uniform(1e8, 1e9, (NODES, NODES)))


def tokens(seed: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.standard_normal((TOKENS, EXPERTS)), jnp.float32),
        jnp.asarray(rng.integers(0, NODES, TOKENS), jnp.int32),
    )


def chosen(experts) -> jnp.ndarray:
    return jnp.asarray(np.eye(EXPERTS, dtype=np.float32)[np.asarray(experts)].sum(axis=1))


def test_the_gate_is_that_of_the_equations():
    logits = np.random.default_rng(0).standard_normal((2, 6))
    found = choose(jnp.asarray(logits, jnp.float32), 2)
    for token in range(2):
        order = np.argsort(-logits[token])[:2]
        weight = np.exp(logits[token, order])
        np.testing.assert_array_equal(found.experts[token], order)
        np.testing.assert_allclose(found.weights[token], weight / weight.sum(), rtol=1e-4)


def test_of_equal_logits_as_many_are_chosen_as_of_others():
    # As logits of bfloat16 are, and reconstructed ones: more experts than K may share the K-th largest.
    logits = jnp.asarray([[1.0, 0.0, 0.0, 0.0, -1.0], [0.0] * 5])
    found = np.asarray(chosen_experts(logits, 2))
    np.testing.assert_array_equal(found, [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(found, jax.nn.one_hot(choose(logits, 2).experts, 5).sum(axis=1))


def test_a_full_expert_gives_its_place_to_the_next_best():
    # All three tokens want experts 0 and 1, which take two tokens each: the last has to go on.
    logits = jnp.asarray([[4.0, 3.0, 2.0, 1.0]] * 2 + [[3.0, 4.0, 1.0, 2.0]])
    np.testing.assert_array_equal(choose(logits, 2, 2).experts, [[0, 1], [0, 1], [3, 2]])
    # With room for one each, the second takes what is left, and the third finds no room anywhere.
    np.testing.assert_array_equal(choose(logits, 2, 1).experts, [[0, 1], [2, 3], [1, 0]])


@pytest.mark.parametrize(
    ("factor", "tokens", "most"),
    [(1.1, 100, 11), (1.0, 100, 10), (1.25, 100, 13), (0.7, 100, 7), (2.2, 50, 11), (None, 100, None)],
)
def test_a_capacity_is_the_factor_times_the_mean_in_whole_tokens(factor, tokens, most):
    """One of ten experts each, so a mean of a tenth; 1.1 x 10 and 0.7 x 10 are whole, though not as floats."""
    assert gate.capacity_of(factor, tokens, 1, 10) == most


@settings(deadline=None, max_examples=15)
@given(seeds)
def test_choices_within_a_capacity_are_those_of_a_loop(seed):
    logits = tokens(seed)[0] + jnp.arange(EXPERTS) / 4  # some experts are popular
    capacity = gate.capacity_of(1.5, TOKENS, TOP_K, EXPERTS)
    assert capacity == 12  # 1.5 times 40 x 3 / 16, in whole tokens
    load, expected = np.zeros(EXPERTS, int), []
    for row in np.asarray(logits):
        best = [expert for expert in np.argsort(-row, kind="stable") if load[expert] < capacity][:TOP_K]
        load[best] += 1
        expected.append(best)
    np.testing.assert_array_equal(choose(logits, TOP_K, capacity).experts, expected)
    assert load.max() <= capacity
    np.testing.assert_array_equal(choose(logits, TOP_K, TOKENS).experts, choose(logits, TOP_K).experts)


@settings(deadline=None, max_examples=15)
@given(seeds)
def test_copies_are_counted_choice_by_choice_or_node_by_node(seed):
    logits, source = tokens(seed)
    experts = np.asarray(choose(logits, TOP_K).experts)
    by_choice, by_node = np.zeros((NODES, NODES)), np.zeros((NODES, NODES))
    for token, at in enumerate(np.asarray(source)):
        for expert in experts[token]:
            by_choice[at, expert // (EXPERTS // NODES)] += 1
        for node in {expert // (EXPERTS // NODES) for expert in experts[token].tolist()}:
            by_node[at, node] += 1
    np.testing.assert_allclose(assignment_copies(chosen(experts), source, jnp.asarray(SHARE)), by_choice)
    np.testing.assert_allclose(node_copies(chosen(experts), source, jnp.asarray(SHARE)), by_node)


@settings(deadline=None, max_examples=15)
@given(seeds)
def test_the_bias_is_that_of_the_equations(seed):
    exchange, copies = random_exchange(seed), np.random.default_rng(seed).uniform(1, 100, (NODES, NODES))
    alpha, beta = (
        np.asarray(table, float) for table in (exchange.models["dispatch"].alpha, exchange.models["dispatch"].beta)
    )
    expected = np.zeros((NODES, EXPERTS))
    for u in range(NODES):
        cost = [
            0.0
            if u == v
            else alpha[u, v] + beta[u, v] * 4160 * copies[u, v] + alpha[v, u] + beta[v, u] * 4096 * copies[u, v]
            for v in range(NODES)
        ]
        score = (np.array(cost) - np.mean(cost)) / np.std(cost)
        expected[u] = -0.2 * score[np.arange(EXPERTS) // (EXPERTS // NODES)]
    found = gate_bias(exchange, jnp.asarray(copies, jnp.float32), jnp.asarray(SHARE), 0.2)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)


@settings(deadline=None, max_examples=15)
@given(seeds)
def test_without_strength_nothing_changes_bit_for_bit(seed):
    logits, source = tokens(seed)
    copies = assignment_copies(chosen(choose(logits, TOP_K).experts), source, jnp.asarray(SHARE))
    bias = gate_bias(random_exchange(seed), copies, jnp.asarray(SHARE), 0.0)
    after = biased(logits, bias, source)
    assert np.asarray(after).tobytes() == np.asarray(logits).tobytes()
    for before, now in zip(choose(logits, TOP_K), choose(after, TOP_K), strict=True):
        assert np.asarray(before).tobytes() == np.asarray(now).tobytes()


@pytest.mark.parametrize("nodes", [3, 7, 10])
@pytest.mark.parametrize("own", ["counted", "left_out", "alone"])
def test_equal_entries_have_no_scores_and_a_finite_derivative(nodes, own):
    cost = np.full((nodes, nodes), 0.1, np.float32)
    if own == "left_out":
        cost = cost * (1 - np.eye(nodes, dtype=np.float32))
    cost = jnp.asarray(cost)
    assert not np.asarray(standard_scores(cost, own)).any()
    assert np.isfinite(jax.jit(jax.grad(lambda c: standard_scores(c, own).sum()))(cost)).all()


def test_the_own_node_is_favoured_on_a_uniform_network_unless_left_out():
    uniform = exchange_of(np.full((NODES, NODES), 1e-3), np.full((NODES, NODES), 1e-8))
    cost = time_proxy(uniform, full((NODES, NODES), 10.0))
    counted, without, alone = (np.asarray(standard_scores(cost, own)) for own in ("counted", "left_out", "alone"))
    # One entry of four is 0 and three are c: scores are -3 and 1, over the square root of 3.
    np.testing.assert_allclose(np.diag(counted), -np.sqrt(3), rtol=1e-5)
    np.testing.assert_allclose(counted[0, 1:], 1 / np.sqrt(3), rtol=1e-5)
    np.testing.assert_allclose(alone, counted, rtol=1e-5)
    assert not without.any()


@settings(deadline=None, max_examples=15)
@given(seeds)
def test_rows_of_scores_have_mean_0_and_deviation_1(seed):
    cost = np.random.default_rng(seed).uniform(0.1, 1, (5, 5)) * (1 - np.eye(5))
    score = np.asarray(standard_scores(jnp.asarray(cost, jnp.float32)))
    np.testing.assert_allclose(score.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(score.std(axis=1), 1, rtol=1e-4)
    others = np.asarray(standard_scores(jnp.asarray(cost, jnp.float32), "left_out"))
    away = ~np.eye(5, dtype=bool)
    assert not np.diag(others).any()
    np.testing.assert_allclose(others[away].reshape(5, 4).std(axis=1), 1, rtol=1e-4)


def test_the_bias_needs_alpha_and_beta():
    model = AllToAll(same_models(Congestion(jnp.asarray(0.0))), *(jnp.asarray(size) for size in (1.0, 1.0, 1.0)))
    with pytest.raises(TypeError, match="AlphaBeta"):
        time_proxy(model, full((NODES, NODES), 1.0))
