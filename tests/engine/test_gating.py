"""A biased gate: choices by hand, what they lose, and the slope of a layer's time in the bias."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases
from oracles.arrays import floats, full

from jaxmoe.engine import Decisions
from jaxmoe.engine.gating import GateBias, biased_choices, chosen_experts, retained_mass
from jaxmoe.network import replicated_visits
from jaxmoe.relax import HardSupport, soft_top_k
from jaxmoe.traces import Batch, TraceError, sample_batches, synthetic_trace

SHAPE, NODES, EXPERTS, TOP_K, TOKENS = (2, 2), 4, 6, 2, 8


def batch_of(logits) -> Batch:
    """Tokens that choose the largest logits."""
    logits = np.asarray(logits, np.float32)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K].astype(np.int32)
    numbers = (np.full(len(logits), 0.25), np.full(experts.shape, 0.5), np.ones(len(logits)))
    draws, draw, weight = (jnp.asarray(number, jnp.float32) for number in numbers)
    return Batch(jnp.asarray(experts), draws, draw, weight, logits=jnp.asarray(logits))


gated = eqx.filter_jit(lambda gate, batch: (gate(batch), gate.lost(batch)))


def some_batch(seed: int) -> Batch:
    return batch_of(np.random.default_rng(seed).normal(size=(TOKENS, EXPERTS)))


def test_choices_by_hand():
    """Tokens 0 to 3 live on node 0, the others on node 1, whose bias turns expert 0 down."""
    batch = batch_of(np.tile([3.0, 2.0, 1.0, 0.0, -1.0, -2.0], (TOKENS, 1)))
    table = np.zeros((2, EXPERTS), np.float32)
    table[1, 0] = -2.5
    after, lost = gated(GateBias(jnp.asarray(table)), batch)
    assert after.experts.tolist() == [[0, 1]] * 4 + [[1, 2]] * 4
    mass = np.exp([3, 2, 1]) / np.exp([3, 2, 1, 0, -1, -2]).sum()
    expected = 1 - (4 * (mass[0] + mass[1]) + 4 * (mass[1] + mass[2])) / (8 * (mass[0] + mass[1]))
    assert float(lost) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31))
def test_no_bias_changes_nothing_and_a_bias_of_all_experts_neither(seed):
    batch = some_batch(seed)
    for value in (0.0, 1.5):
        after, lost = gated(GateBias(jnp.asarray(np.full((NODES, EXPERTS), value, np.float32))), batch)
        np.testing.assert_array_equal(after.experts, batch.experts)
        assert float(lost) == pytest.approx(0, abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31))
def test_soft_choices_have_the_values_of_the_exact_ones(seed):
    rng = np.random.default_rng(seed)
    batch, table = some_batch(seed), jnp.asarray(rng.normal(size=(NODES, EXPERTS)), jnp.float32)
    (exact, loss), (soft, soft_loss) = gated(GateBias(table), batch), gated(GateBias(table, jnp.asarray(0.3)), batch)
    np.testing.assert_array_equal(exact.experts, soft.experts)
    np.testing.assert_allclose(choices(soft), choices(exact), atol=1e-5)
    assert 0 <= float(loss) < 1
    assert float(soft_loss) == pytest.approx(float(loss), abs=1e-5)


choices = jax.jit(lambda batch: batch.choices(EXPERTS))


def test_a_loop_over_tokens_finds_the_same_mass():
    batch, table = some_batch(3), np.random.default_rng(4).normal(size=(NODES, EXPERTS)).astype(np.float32)
    kept = whole = 0.0
    for token, logits in enumerate(np.asarray(batch.logits, float)):
        mass = np.exp(logits) / np.exp(logits).sum()
        biased = logits + table[token * NODES // TOKENS]
        kept += mass[np.argsort(-biased)[:TOP_K]].sum()
        whole += mass[np.argsort(-logits)[:TOP_K]].sum()
    assert float(gated(GateBias(jnp.asarray(table)), batch)[1]) == pytest.approx(1 - kept / whole, abs=1e-6)


def test_the_slope_of_the_kept_mass_is_that_of_soft_choices():
    """Through the straight-through estimate, against finite differences of the soft choices themselves."""
    logits = some_batch(5).logits

    def kept(bias, temperature):
        return retained_mass(logits, biased_choices(logits + bias, TOP_K, temperature), chosen_experts(logits, TOP_K))

    @jax.jit
    def soft(bias):
        return retained_mass(logits, soft_top_k(logits + bias, TOP_K, 0.5), chosen_experts(logits, TOP_K))

    bias = np.random.default_rng(6).normal(size=EXPERTS).astype(np.float32)
    slope = np.asarray(jax.jit(jax.grad(kept))(bias, 0.5))
    for expert in range(EXPERTS):
        step = 0.02 * np.eye(EXPERTS, dtype=np.float32)[expert]
        assert float(slope[expert]) == pytest.approx(float(soft(bias + step) - soft(bias - step)) / 0.04, abs=2e-3)


def test_a_bias_against_the_busiest_expert_shortens_the_layer_and_the_slope_says_so():
    """Dies compute alike and messages are tiny; all tokens like expert 0, alone on its die, and narrowly so."""
    machine = cases.random_machine(np.random.default_rng(0), SHAPE)
    machine.flops[:] = 1e12
    model = cases.layer_model(machine, costs=cases.Costs(1.0, 1e3, 1e9, 1.0, dispatch_bytes=1.0))
    logits = np.random.default_rng(1).normal(scale=0.1, size=(TOKENS, EXPERTS)) + np.array([0.5, 0, 0, 0, 0, 0])
    batch, share = batch_of(logits), jnp.asarray(np.eye(NODES, dtype=np.float32)[[0, 1, 2, 3, 1, 2]])

    @eqx.filter_jit
    def seconds(table, temperature=None):
        return model.time(Decisions(share, gate=GateBias(table, temperature)), batch).total

    none = np.zeros((NODES, EXPERTS), np.float32)
    biased = np.where(np.arange(EXPERTS) == 0, np.float32(-0.7), none)
    unbiased = float(seconds(jnp.asarray(none)))
    assert unbiased == pytest.approx(float(eqx.filter_jit(model)(share, batch).total))
    assert float(seconds(jnp.asarray(biased))) < 0.9 * unbiased
    slope = np.asarray(jax.jit(jax.grad(lambda table: seconds(table, jnp.asarray(0.3))))(jnp.asarray(none)))
    assert np.isfinite(slope).all()
    assert slope[:, 0].sum() > 0 > slope[:, 1:].sum()


def test_logits_come_with_the_tokens_that_are_drawn():
    trace = synthetic_trace(60, range(2), EXPERTS, TOP_K, 0.5, 0.0, 0.0, seed=0)
    logits = np.random.default_rng(0).normal(size=(60, 2, EXPERTS)).astype(np.float32)
    drawn = sample_batches(replace(trace, logits=logits), 5, 3, seed=1, numbered=True, logits=True)
    assert drawn.logits.shape == (2, 3, 5, EXPERTS)
    for layer in range(2):
        np.testing.assert_array_equal(drawn.logits[layer], logits[np.asarray(drawn.row[layer]), layer])
    with pytest.raises(TraceError, match="no logits, which a biased gate needs"):
        sample_batches(trace, 5, 3, seed=1, logits=True)
    with pytest.raises(ValueError, match="draw it with logits"):
        GateBias(full((NODES, EXPERTS), 0.0))(sample_batches(trace, 5, 1, seed=1))


def test_traffic_has_a_slope_in_the_bias_as_well_where_few_tokens_choose():
    """Dies compute in no time; a choice that moves to another die changes what links carry."""
    machine = cases.random_machine(np.random.default_rng(0), SHAPE)
    model = cases.layer_model(machine, costs=cases.Costs(1e6, 1e3, 1.0, 64.0, dispatch_bytes=1e6))
    batch, share = some_batch(7), jnp.asarray(np.eye(NODES, dtype=np.float32)[[0, 1, 2, 3, 1, 2]])

    @jax.jit
    @jax.value_and_grad
    def seconds(table):
        gate = GateBias(table, jnp.asarray(0.3))
        return model.time(Decisions(share, gate=gate), batch).stages["combine"]

    told, slope = seconds(np.zeros((NODES, EXPERTS), np.float32))
    assert np.abs(slope).max() > 0.01 * float(told)


def test_choices_of_experts_with_copies_pass_their_derivative_on_to_the_hosts():
    """Expert 0 is on nodes 0 and 1 in parts of 1/4 and 3/4, expert 1 on node 2 alone; one token has chosen expert 1."""
    share = floats([[0.25, 0.75, 0, 0], [0, 0, 1, 0]])
    batch = Batch(jnp.asarray([[1]]), full(1, 0.0), full((1, 1), 0.0), floats([2.0]))

    @jax.jit
    def visits(chosen):
        made = replicated_visits(share, replace(batch, chosen=chosen), HardSupport())
        return made.work, made.visited[0]

    chosen = floats([[0.0, 1.0]])
    exact, work = jax.jit(replicated_visits)(share, batch, HardSupport()), visits(chosen)
    np.testing.assert_array_equal(work[0], exact.work)
    np.testing.assert_array_equal(work[1], exact.visited[0])
    of_work, of_visits = jax.jit(jax.jacobian(visits))(chosen)
    np.testing.assert_allclose(of_work[:, 0], 2 * share.T)
    np.testing.assert_allclose(of_visits[:2, 0, 0], [0.25, 0.75])  # a node that is not visited yet
