"""The gate's bias by gradient: what is routed, its derivative, and that descent gains what a small case has to give."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.compilations import compilations

from jaxmoe.engine import gating
from jaxmoe.hardware import fully_connected
from jaxmoe.methods.camoe.bias_descent import (
    Bias,
    GateLimits,
    GateSettings,
    RelaxedPlacement,
    descend,
    relaxed_objective,
    rounded,
    start,
    tuned_bias,
    within,
)
from jaxmoe.methods.camoe.gate import GateProblem, divergence, evaluate_gate, on_experts
from jaxmoe.network import AlphaBeta
from jaxmoe.network.pairwise import AllToAll, same_models
from jaxmoe.traces.statistics.concentration import avg_layer_kl

LAYERS, TOKENS, EXPERTS, NODES, TOP_K = 2, 768, 8, 4, 2
SHARE = jnp.asarray(np.broadcast_to(np.repeat(np.eye(NODES, dtype=np.float32), 2, axis=0), (LAYERS, EXPERTS, NODES)))


def problem(seed: int = 0) -> GateProblem:
    """All ways to and from node 0 are ten times as slow as the others."""
    rng = np.random.default_rng(seed)
    beta = np.full((NODES, NODES), 1e-9)
    beta[0], beta[:, 0] = 1e-8, 1e-8
    model = AlphaBeta(*jax.device_put((np.full((NODES, NODES), 1e-6, np.float32), beta.astype(np.float32))))
    return GateProblem(
        exchange=AllToAll(same_models(model), *(jnp.asarray(size) for size in (8.0, 4100.0, 4096.0))),
        topology=fully_connected(NODES, 1e9, 0.0),
        logits=jax.device_put(rng.normal(size=(LAYERS, TOKENS, EXPERTS)).astype(np.float32)),
        source=jax.device_put((np.arange(TOKENS) * NODES // TOKENS).astype(np.int32)),
        share=SHARE,
        weight=jnp.asarray(2.0),
        top_k=TOP_K,
    )


total = eqx.filter_jit(lambda given, copies: given.exchange.total(given.topology, copies))


def test_a_biased_pass_is_that_of_a_plain_loop():
    given, rng = problem(), np.random.default_rng(1)
    table = rng.normal(scale=0.5, size=(LAYERS, NODES, EXPERTS)).astype(np.float32)
    found = evaluate_gate(given, jnp.asarray(table))
    for layer in range(LAYERS):
        loads, copies, mass, kept, same = np.zeros(EXPERTS), np.zeros((NODES, NODES)), 0.0, 0.0, 0
        for token, logits in enumerate(np.asarray(given.logits[layer])):
            at = int(given.source[token])
            gate = np.exp(logits) / np.exp(logits).sum()
            before = set(np.argsort(-logits)[:TOP_K].tolist())
            after = set(np.argsort(-(logits + table[layer, at]))[:TOP_K].tolist())
            mass, kept, same = mass + gate[[*before]].sum(), kept + gate[[*after]].sum(), same + len(before & after)
            for expert in after:
                loads[expert] += 2
                copies[at, expert // 2] += 2
        np.testing.assert_allclose(found.loads[layer], loads)
        assert float(found.retained[layer]) == pytest.approx(kept / mass, rel=1e-5)
        assert float(found.changed[layer]) == pytest.approx(1 - same / (TOKENS * TOP_K), abs=1e-6)
        expected = float(total(given, copies.astype(np.float32)))
        assert float(found.seconds[layer]) == pytest.approx(expected, rel=1e-5)


def test_divergence_is_that_of_the_statistics():
    base, other = np.random.default_rng(0).integers(0, 50, (2, 3, 6))
    found = jax.jit(divergence)(base.astype(np.float32), other.astype(np.float32))
    assert float(found.mean()) == pytest.approx(avg_layer_kl(base, other), rel=1e-4)


def test_the_derivative_is_that_of_finite_differences():
    # Of a placement; choices are exact on the way forward, and their relaxation has a test of its own.
    with jax.enable_x64(True):
        given = jax.tree.map(lambda leaf: leaf.astype(float) if eqx.is_inexact_array(leaf) else leaf, problem())
        settings = GateSettings(temperature=0.5, max_temperature=(0.2, 0.2), place_temperature=(0.5, 0.5))
        base = evaluate_gate(given, jnp.zeros((LAYERS, NODES, EXPERTS)))
        logits = np.asarray(SHARE) + np.random.default_rng(2).normal(size=SHARE.shape)
        place = RelaxedPlacement(jnp.asarray(logits, jnp.float32))
        direction = jnp.asarray(np.random.default_rng(3).normal(size=SHARE.shape))

        @jax.jit
        @jax.value_and_grad
        def of(step):
            moved = eqx.tree_at(lambda p: p.logits, place, place.logits + step * direction)
            prices = jnp.asarray([1.0, 1.0])
            return relaxed_objective((None, moved), given, base, settings, prices, jnp.asarray(0.5))[0]

        found, expected = float(of(0.0)[1]), float((of(1e-5)[0] - of(-1e-5)[0]) / 2e-5)
        assert found == pytest.approx(expected, rel=1e-4)
        assert abs(found) > 1e-6


@pytest.mark.parametrize("form", ["scalar", "table"])
def test_the_derivative_of_a_bias_is_that_of_relaxed_choices(form, monkeypatch):
    monkeypatch.setattr(gating, "straight_through", lambda exact, smooth: smooth)
    with jax.enable_x64(True):
        given = jax.tree.map(lambda leaf: leaf.astype(float) if eqx.is_inexact_array(leaf) else leaf, problem())
        given = eqx.tree_at(lambda p: (p.logits, p.source), given, (given.logits[:, ::8], given.source[::8]))
        settings = GateSettings(temperature=0.5, max_temperature=(0.2, 0.2))
        base = evaluate_gate(given, jnp.zeros((LAYERS, NODES, EXPERTS)))
        scores = jnp.asarray(np.random.default_rng(5).normal(size=(LAYERS, NODES, NODES)))
        bias = start(form, scores, 0.2)
        where = (lambda b: b.table) if form == "table" else (lambda b: b.scale)
        direction = jnp.asarray(np.random.default_rng(6).normal(size=where(bias).shape))

        @jax.jit
        @jax.value_and_grad
        def of(step):
            moved = eqx.tree_at(where, bias, where(bias) + step * direction)
            prices = jnp.asarray([3.0, 2.0])
            return relaxed_objective((moved, None), given, base, settings, prices, jnp.asarray(0.5))[0]

        found, expected = float(of(0.0)[1]), float((of(1e-5)[0] - of(-1e-5)[0]) / 2e-5)
        assert found == pytest.approx(expected, rel=1e-4)
        assert abs(found) > 1e-6


@pytest.mark.parametrize("form", ["scalar", "layer", "source", "table"])
def test_all_forms_start_as_lambda_does(form):
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, NODES, NODES)), jnp.float32)
    bias = start(form, scores, 0.2)
    assert isinstance(bias, Bias)
    np.testing.assert_allclose(np.broadcast_to(bias.nodes(), scores.shape), -0.2 * np.asarray(scores), rtol=1e-5)


def test_a_table_saves_more_than_lambda_with_no_more_lost():
    given = problem()
    scores = jnp.asarray(np.where(np.eye(NODES), -1.0, 0.3), jnp.float32)[None].repeat(LAYERS, axis=0)
    none = jnp.zeros((LAYERS, NODES, EXPERTS))
    rule = evaluate_gate(given, on_experts(-0.3 * scores, SHARE))
    limits = GateLimits(
        1 - float(rule.retained.mean()), float(divergence(evaluate_gate(given, none).loads, rule.loads).mean())
    )
    found = descend([given], limits, GateSettings(steps=60), start("table", scores, 0.3))
    kept = within([given], limits, found.bias, found.share)
    best = evaluate_gate(given, on_experts(jnp.asarray(kept), SHARE))
    assert 1 - float(best.retained.mean()) <= limits.lost
    assert float(divergence(evaluate_gate(given, none).loads, best.loads).mean()) <= limits.avg_layer_kl
    assert float(best.seconds.mean()) < 0.97 * float(rule.seconds.mean())
    np.testing.assert_array_equal(found.share, SHARE)


@pytest.mark.slow
def test_what_is_learnt_by_heart_is_not_kept():
    """Descent on 24 tokens makes other tokens slower; a tuned bias is never slower on held tokens than its start."""
    whole = problem()
    few, held = (
        eqx.tree_at(lambda p: (p.logits, p.source), whole, (whole.logits[:, part], whole.source[part]))
        for part in (slice(0, None, 32), slice(1, None, 2))
    )
    scores = jnp.asarray(np.where(np.eye(NODES), -1.0, 0.3), jnp.float32)[None].repeat(LAYERS, axis=0)
    begin, limits, settings = (
        start("table", scores, 0.3),
        GateLimits(0.02),
        GateSettings(steps=60, learning_rate=0.1),
    )

    def seconds(given, bias):
        return float(evaluate_gate(given, on_experts(jnp.asarray(bias), SHARE)).seconds.mean())

    first = within([few], limits, np.asarray(begin.nodes()), np.asarray(SHARE))
    heart = within([few], limits, descend([few], limits, settings, begin).bias, np.asarray(SHARE))
    assert seconds(few, heart) < seconds(few, first)
    assert seconds(held, heart) > seconds(held, first)
    assert seconds(held, tuned_bias([few], [held], limits, settings, begin).bias) <= seconds(held, first)


def test_no_number_of_the_settings_compiles_a_step_anew():
    given = problem()
    begin = start("table", jnp.ones((LAYERS, NODES, NODES)), 0.1)
    descend([given], GateLimits(0.01), GateSettings(steps=1), begin)
    other = GateSettings(2, 0.1, 0.5, (0.1, 0.01), (0.3, 0.1), 10.0, 0.2)
    with compilations() as compiled:
        descend([given], GateLimits(0.02, 0.1), other, begin)
    assert compiled == []


def test_placement_descends_to_whole_experts_as_many_on_each_node():
    # The experts that are chosen most have to leave the node whose ways are slow.
    given = problem()
    popular = jnp.asarray([2.0, 2, 0, 0, 0, 0, 0, 0])
    given = eqx.tree_at(lambda p: p.logits, given, given.logits + popular)
    found = descend([given], GateLimits(1.0), GateSettings(steps=80, learning_rate=0.1), place=RelaxedPlacement(SHARE))
    assert set(np.unique(found.share)) == {0, 1}
    np.testing.assert_array_equal(found.share.sum(axis=1), 2)
    none = jnp.zeros((LAYERS, NODES, EXPERTS))
    before, after = evaluate_gate(given, none), evaluate_gate(given, none, jnp.asarray(found.share))
    assert float(after.seconds.mean()) < 0.85 * float(before.seconds.mean())
    assert float(after.retained.min()) == 1


def test_rounding_takes_the_assignment_of_the_largest_sum():
    share = np.zeros((1, 4, 2))
    share[0] = [[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]
    np.testing.assert_array_equal(rounded(jnp.asarray(share))[0].argmax(axis=1), [1, 0, 0, 1])
