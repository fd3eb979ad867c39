"""Batches drawn from a trace, and merged ones."""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import full

import jaxmoe.traces.batches as batches_module
from jaxmoe.engine import evaluate
from jaxmoe.traces import (
    Batch,
    GatingTrace,
    TraceError,
    expert_counts,
    merge_tokens,
    over_batches,
    sample_batches,
    successive_batches,
    synthetic_trace,
)

LAYERS, TOKENS = 2, 40


@pytest.fixture
def numbered() -> GatingTrace:
    """A trace whose tokens can be told from their choices: token t chose t and 100 + t, in every layer."""
    token = np.arange(TOKENS)
    experts = np.stack([token, 100 + token], axis=-1)[:, None].repeat(LAYERS, axis=1)
    return GatingTrace(experts, 200, np.arange(LAYERS), np.array([0]), None, {})


# Compiled whole, not operation by operation.
gather_slots = jax.jit(lambda batch: batch.gather_slot)
gathered_experts = jax.jit(lambda batch: batch.gather_expert)
choices = jax.jit(lambda batch, experts: batch.choices(experts), static_argnums=1)


def tokens_of(batches: Batch) -> np.ndarray:
    """Numbers of the drawn tokens, [layer, batch, token]."""
    experts = np.asarray(batches.experts)
    np.testing.assert_array_equal(experts[..., 1], experts[..., 0] + 100)
    return experts[..., 0]


def differ(one: Batch, other: Batch) -> list[bool]:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return [not np.array_equal(a, b) for a, b in leaves]


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_seed_names_its_batches(numbered, consecutive):
    one, same, other = (sample_batches(numbered, 8, 5, seed, consecutive) for seed in (3, 3, 4))
    assert not any(differ(one, same))
    assert differ(one, other) == [True, True, True, False]  # all but the weights


def test_a_batch_is_of_different_tokens_from_the_whole_trace_alike_in_all_layers(numbered):
    drawn = tokens_of(sample_batches(numbered, 10, 60, seed=0))
    assert drawn.shape == (LAYERS, 60, 10)
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert all(len(set(batch)) == 10 for batch in drawn[0].tolist())
    assert set(drawn.ravel()) == set(range(TOKENS))
    assert not (np.diff(drawn[0], axis=1) > 0).all(axis=1).any()  # in random order


def test_consecutive_tokens_follow_each_other_from_anywhere_in_the_trace(numbered):
    drawn = tokens_of(sample_batches(numbered, TOKENS - 2, 60, seed=0, consecutive=True))
    assert (np.diff(drawn, axis=2) == 1).all()
    assert set(drawn[0, :, 0]) == {0, 1, 2}
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_random_choices_are_drawn_for_every_layer_and_token(numbered):
    batches = sample_batches(numbered, 20, 30, seed=0)
    slot, draw = np.asarray(gather_slots(batches)), np.asarray(batches.draw)
    assert set(slot.ravel()) == {0, 1}
    assert abs(slot.mean() - 0.5) < 0.1
    assert (slot[0] != slot[1]).any()
    assert 0 <= draw.min() < 0.01
    assert 0.99 < draw.max() < 1
    assert draw.shape == batches.experts.shape
    assert len(np.unique(draw)) > 0.9 * draw.size
    assert (np.asarray(batches.weight) == 1).all()


@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 7, 8, 16])
def test_a_token_draw_names_its_slot_whatever_the_rounding(top_k):
    # The slots as they were drawn before they were part of a draw: seeds still name the same batches.
    experts = np.broadcast_to(np.arange(top_k), (500, 1, top_k))
    batches = sample_batches(GatingTrace(experts, top_k, np.arange(1), np.array([0]), None, {}), 500, 4, seed=1)
    rng = np.random.default_rng(1)
    for _ in range(4):
        rng.choice(500, 500, replace=False)
    np.testing.assert_array_equal(gather_slots(batches), rng.integers(top_k, size=(1, 4, 500)))
    edges = np.array([0.0, 1 - 2**-24], np.float32)
    numbers = (np.zeros((2, top_k), np.int32), edges, np.zeros((2, top_k), np.float32), np.ones(2, np.float32))
    assert gather_slots(Batch(*map(jnp.asarray, numbers))).tolist() == [0, top_k - 1]


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_batch_may_be_the_whole_trace_but_no_more(numbered, consecutive):
    drawn = tokens_of(sample_batches(numbered, TOKENS, 2, 0, consecutive))
    np.testing.assert_array_equal(np.sort(drawn[0, 0]), np.arange(TOKENS))
    with pytest.raises(TraceError, match="a batch of 41 tokens cannot be drawn from a trace of 40"):
        sample_batches(numbered, TOKENS + 1, 2, 0, consecutive)


@pytest.fixture(scope="module")
def few_experts() -> Batch:
    """Batches of 32 tokens that chose 2 of 5 experts: 20 kinds of token, some never drawn."""
    trace = synthetic_trace(400, range(LAYERS), 5, 2, skew=1.5, coactivation=0.0, reuse=0.0, seed=0)
    return sample_batches(trace, 32, 6, seed=1)


def with_weight(batch: Batch, weight: jax.Array) -> Batch:
    return eqx.tree_at(lambda b: b.weight, batch, weight)


@pytest.mark.parametrize("rule", ["lowest_host", "fewest_hops"])
def test_merged_batches_take_exactly_as_long(few_experts, rule):
    merged = merge_tokens(few_experts, 5)
    assert merged.experts.shape == (LAYERS, 20, 2)
    assert merged.weight.shape == (LAYERS, 6, 20)
    rng = np.random.default_rng(2)
    model = cases.layer_model(cases.random_machine(rng, (2, 3), ports=True, memory=True), rule=rule)
    share = np.stack([cases.random_share(rng, 5, 6) for _ in range(LAYERS)]).astype(np.float32)

    @jax.jit
    def apart(share, batches):
        return jax.vmap(jax.vmap(model, (None, 0)))(share, batches)

    @jax.jit
    def together(share, rows):
        def layer(share, rows):
            return jax.vmap(lambda weight: model(share, with_weight(rows, weight)))(rows.weight)

        return jax.vmap(layer)(share, rows)

    one, other = apart(share, few_experts), together(share, merged)
    for stage in ("compute", "dispatch", "combine"):
        np.testing.assert_allclose(getattr(other, stage), getattr(one, stage), rtol=1e-5)
    np.testing.assert_allclose(other.node_time, one.node_time, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(other.dispatch_link_time, one.dispatch_link_time, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(other.combine_link_time, one.combine_link_time, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 3), (3, 3)])
def test_tokens_merged_by_corner_take_exactly_as_long(few_experts, shape):
    rng = np.random.default_rng(3)
    nodes = shape[0] * shape[1]
    model = cases.layer_model(cases.random_machine(rng, shape, ports=True), rule="corner_host_tree")
    share = np.stack([cases.random_share(rng, 5, nodes) for _ in range(LAYERS)]).astype(np.float32)
    merged = model.merged(few_experts, 5)
    assert merged.experts.shape == (LAYERS, 10 * min(nodes - 1, 4), 2)  # ten kinds, two or four corners
    apart, together = (evaluate(model, jnp.asarray(share), given) for given in (few_experts, merged))
    np.testing.assert_allclose(together.total, apart.total, rtol=1e-5)
    for stage in ("dispatch", "combine"):
        np.testing.assert_allclose(together.busy[stage]["link"], apart.busy[stage]["link"], rtol=1e-5, atol=1e-12)


def test_merging_keeps_every_count(few_experts):
    merged = merge_tokens(few_experts, 5)
    chosen = np.asarray(choices(few_experts, 5)).sum(axis=2)  # [layer, batch, expert]
    np.testing.assert_array_equal(np.einsum("lbr,lre->lbe", merged.weight, choices(merged, 5)), chosen)
    np.testing.assert_array_equal(expert_counts(few_experts, 5), chosen)
    np.testing.assert_array_equal(expert_counts(merged, 5), chosen)
    gathered = (np.asarray(gathered_experts(few_experts))[..., None] == np.arange(5)).sum(axis=2)
    named = np.asarray(gathered_experts(merged))[..., None] == np.arange(5)
    np.testing.assert_array_equal(np.einsum("lbr,lre->lbe", merged.weight, named), gathered)


def test_batches_are_merged_only_where_there_are_few_kinds_of_token():
    # 4 experts of which 2 are chosen make 6 choices, 12 with the gather slot.
    trace = synthetic_trace(100, [0], 4, 2, skew=0.5, coactivation=0.0, reuse=0.0, seed=0)
    too_few, enough = (sample_batches(trace, tokens, 3, seed=0) for tokens in (11, 12))
    assert merge_tokens(too_few, 4) is too_few
    assert merge_tokens(enough, 4).experts.shape == (1, 12, 2)
    assert merge_tokens(too_few, 4, by_slot=False).experts.shape == (1, 6, 2)
    assert merge_tokens(too_few, 4, rows_per_token=2).experts.shape == (1, 12, 2)


def test_merged_batches_stay_as_they_are(few_experts):
    merged = merge_tokens(few_experts, 5)
    assert merge_tokens(merged, 5) is merged


@pytest.mark.parametrize("at_once", [1, 4, 5])
def test_batches_go_a_few_at_a_time_where_they_are_large(few_experts, at_once, monkeypatch):
    both = few_experts, merge_tokens(few_experts, 5)
    layer, merged = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), jax.device_get(both))  # 6 batches of 32 tokens

    def measured(batch: Batch) -> tuple[jax.Array, jax.Array]:
        return batch.weight @ batch.choices(5), full(0, 0.0)  # such as ports that are not there

    for given in (layer, merged):
        whole = jax.jit(partial(over_batches, measured))(given)
        monkeypatch.setattr(batches_module, "LARGEST_CHUNK", at_once * given.weight.shape[1])
        parts = jax.jit(partial(over_batches, measured))(given)
        monkeypatch.undo()
        np.testing.assert_allclose(parts[0], whole[0])
        assert parts[1].shape == whole[1].shape == (6, 0)


def test_merged_rows_keep_the_place_of_their_tokens_in_the_batch(few_experts):
    turns = 4
    merged = merge_tokens(few_experts, 5, by_slot=False, turns=turns, rows_per_token=2)
    assert merged.experts.shape == (LAYERS, 10 * turns, 2)
    sets = np.sort(np.asarray(few_experts.experts), axis=-1)  # [layer, batch, token, top_k]
    for row, kind in enumerate(np.asarray(merged.experts)[0]):
        there = (sets[:, :, row % turns :: turns] == np.sort(kind)).all(axis=-1).sum(axis=-1)
        np.testing.assert_array_equal(np.asarray(merged.weight)[:, :, row], there)


def test_merging_adds_up_weights(few_experts):
    heavy = with_weight(few_experts, jnp.asarray(3 * np.asarray(few_experts.weight)))
    expected = 3 * np.asarray(merge_tokens(few_experts, 5).weight)
    np.testing.assert_array_equal(merge_tokens(heavy, 5).weight, expected)


def test_batches_of_many_experts_stay_as_they_are(numbered):
    batches = sample_batches(numbered, TOKENS, 3, seed=0)
    assert merge_tokens(batches, 200) is batches


def test_batches_with_missing_choices_stay_as_they_are(few_experts):
    experts = np.array(few_experts.experts)
    experts[0, 0, 0, 1] = -1
    lacking = eqx.tree_at(lambda b: b.experts, few_experts, jnp.asarray(experts))
    assert merge_tokens(lacking, 5) is lacking
    np.testing.assert_array_equal(expert_counts(lacking, 5), np.asarray(choices(lacking, 5)).sum(axis=2))


def test_successive_batches_are_the_last_tokens_in_their_order(numbered):
    batches = successive_batches(numbered, tokens=8, batches=3, seed=0)
    expected = np.broadcast_to(np.arange(16, 40).reshape(3, 8), (LAYERS, 3, 8))
    np.testing.assert_array_equal(tokens_of(batches), expected)
    assert batches.draw.shape == (LAYERS, 3, 8, 2)
    assert (np.asarray(batches.weight) == 1).all()
    assert len(np.unique(np.asarray(batches.token_draw))) > 40  # layers have draws of their own
    assert successive_batches(numbered, tokens=8, batches=5, seed=0) is not None
    assert successive_batches(numbered, tokens=8, batches=6, seed=0) is None


def trace_of_requests(lengths: tuple[int, ...]) -> GatingTrace:
    """A trace of one layer whose sequences choose an expert each, that of their number."""
    number = np.repeat(np.arange(len(lengths)), lengths)
    trace = synthetic_trace(sum(lengths), [0], len(lengths) + 1, 1, skew=0.0, coactivation=0.0, reuse=0.0, seed=0)
    starts = np.cumsum([0, *lengths[:-1]])
    return replace(trace, experts=number[:, None, None].astype(trace.experts.dtype), seq_start=starts)


def parts_of(batches: Batch, sequences: int) -> np.ndarray:
    """Part of every sequence in every batch, [batch, sequence]."""
    experts = np.asarray(batches.experts)[0, :, :, 0]
    return np.stack([np.bincount(each, minlength=sequences) for each in experts]) / experts.shape[1]


def test_resampled_batches_mix_requests_as_the_bayesian_bootstrap_does():
    # Uniform over all mixtures of four requests, a part of one has mean 1/4 and variance 3/80; that of 40 tokens drawn
    # is larger by that of the draw, and smaller as tokens are not drawn twice.
    trace = trace_of_requests((4000,) * 4)
    parts = parts_of(sample_batches(trace, 40, 2000, seed=0, resampled=True), 4)
    np.testing.assert_allclose(parts.mean(axis=0), 0.25, atol=0.015)
    drawn = 3 / 80 + (1 / 4 - (1 / 16 + 3 / 80)) / 40
    np.testing.assert_allclose(parts.var(axis=0), drawn, rtol=0.1)
    plain = parts_of(sample_batches(trace, 40, 2000, seed=0), 4)
    np.testing.assert_allclose(plain.var(axis=0), 3 / 16 / 40, rtol=0.1)


def test_longer_requests_have_more_of_a_resampled_batch():
    parts = parts_of(sample_batches(trace_of_requests((3000, 1000)), 20, 2000, seed=1, resampled=True), 2)
    assert 0.6 < parts[:, 0].mean() < 0.75  # the mean of 3 a / (3 a + b) over exponential a and b is 0.676


def test_a_resampled_batch_is_of_different_tokens_and_named_by_its_seed():
    trace = trace_of_requests((30, 20, 10))
    batches = sample_batches(trace, 50, 8, seed=2, numbered=True, resampled=True)
    rows = np.asarray(batches.row)[0]
    assert all(len(set(row.tolist())) == 50 for row in rows)
    again = sample_batches(trace, 50, 8, seed=2, numbered=True, resampled=True)
    np.testing.assert_array_equal(again.row, batches.row)


def test_a_single_request_has_one_mixture():
    trace = trace_of_requests((60,))
    for one, other in zip(
        jax.tree.leaves(sample_batches(trace, 20, 3, seed=0, resampled=True)),
        jax.tree.leaves(sample_batches(trace, 20, 3, seed=0)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
