"""Stages beside the experts: worked by hand on a line of four nodes."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import full

from jaxmoe.engine import GroupedAttention, Metadata, grouped_attention, schedule_of
from jaxmoe.hardware import Die, Machine, Mesh, node_memory
from jaxmoe.models import MoEModel
from jaxmoe.models.moe import GroupedQueryAttention, LatentAttention
from jaxmoe.network.collectives import ring_all_reduce

RATE, FLOPS, MEMORY, VECTOR, TOKENS = 10.0, 100.0, 50.0, 8.0, 12


def model_of(schedule="serial", extras=(), latency=0.0):
    """Four nodes in a row, two groups of two neighbours."""
    mesh = Mesh(jnp.full(6, RATE), jnp.full(6, latency), shape=(1, 4))
    machine = Machine(mesh, Die(jnp.full(4, FLOPS)), node_memory(jnp.full(4, MEMORY)))
    plain = cases.model_on(machine, "sharded", "token_home", schedule=schedule_of(schedule))
    return replace(plain, extras=extras)


def attention(closing=False):
    rounds = ring_all_reduce(np.array([[0, 1], [2, 3]]), 1.0, 4)
    numbers = (30.0, 400.0, 70.0, VECTOR, 2.0)
    return GroupedAttention(*map(jnp.asarray, numbers), rounds, rounds if closing else None)


@eqx.filter_jit
def timed(model, share, batch):
    return model(share, batch)


def timed_on_a_batch(model):
    rng = np.random.default_rng(0)
    batch = replace(cases.batch(cases.random_tokens(rng, TOKENS, 4, 2)), weight=full(TOKENS, 1.0))
    return timed(model, jnp.asarray(cases.random_share(rng, 4, 4)), batch)


def test_attention_and_its_all_reduce_by_hand():
    alone, times = timed_on_a_batch(model_of()), timed_on_a_batch(model_of(extras=(attention(closing=True),)))
    # Six tokens a group: 180 FLOPs in 1.8 s; memory moves 400 + 6 * 70 + 2 * 6 * 8 = 916 B in 18.32 s.
    assert float(times.stages["attention"]) == pytest.approx(18.32)
    # 48 B of partial sums: half of them each way, twice. Both directions have links of their own.
    assert float(times.stages["all_reduce"]) == pytest.approx(2 * 24 / RATE)
    assert float(times.stages["closing"]) == pytest.approx(2 * 24 / RATE)
    np.testing.assert_allclose(times.busy["all_reduce"]["link"], [4.8, 0, 4.8, 4.8, 0, 4.8], rtol=1e-6)
    assert float(times.total) == pytest.approx(float(alone.total) + 18.32 + 9.6)
    assert float(times.compute) == float(alone.compute)


def test_metadata_goes_from_everyone_to_everyone():
    times = timed_on_a_batch(model_of(extras=(Metadata(jnp.asarray(5.0)),), latency=0.25))
    # The middle link carries four messages each way; the longest path has three hops, of which the chunk waits at two.
    assert float(times.stages["metadata"]) == pytest.approx(4 * 5 / RATE + 3 * 0.25 + 2 * 5 / RATE)


def test_micro_batches_hide_the_all_reduce():
    parts = timed_on_a_batch(model_of("pipelined(2)", (attention(),)))
    # Weights are read for every part: attention takes 2 * (400 + 210 + 48) / 50 s, and hides the first all-reduce.
    first = 2 * 658 / MEMORY + 2.4
    assert float(parts.total) == pytest.approx(
        first + float(timed_on_a_batch(model_of("pipelined(2)")).total), rel=1e-6
    )
    assert float(parts.stages["all_reduce"]) == pytest.approx(4.8)


def test_gradients_reach_the_numbers():
    def total(context):
        stage = attention()
        return timed_on_a_batch(model_of(extras=(replace(stage, context_bytes=context),))).total

    slope = jax.jit(jax.grad(total))(jnp.asarray(70.0))
    assert float(slope) == pytest.approx(6 / MEMORY, rel=1e-4)


@pytest.mark.parametrize(("copies", "size"), [(2, 2), (4, 4), (4, 8)])
def test_grouped_queries_share_keys_up_to_their_number(copies, size):
    heads = GroupedQueryAttention(heads=8, kv_heads=4, head_size=16)
    moe = MoEModel("m", 64, 32, 4, 2, (0,), 1, attention=heads)
    made = grouped_attention(
        moe, size, 3, 100.0, attention().all_reduce, bytes_per_element=2.0, weight_bytes_per_element=1.0
    )
    projections = 64 * 16 * 8 * 2 + 64 * 16 * 4 * 2
    assert float(made.flops_per_token) == pytest.approx((2 * projections + 2 * 2 * 8 * 16 * 100) / size)
    assert float(made.weight_bytes) == pytest.approx(projections / size)
    assert float(made.context_bytes) == pytest.approx(2 * 4 * 16 * 100 * 2 / copies)


def test_every_node_of_a_group_reads_short_vectors_whole_and_fast_products_take_less():
    latent = LatentAttention(heads=4, q_rank=None, kv_rank=8, nope_size=4, rope_size=2, value_size=4)
    moe = MoEModel("m", 16, 32, 4, 2, (0,), 1, attention=latent)
    given = (moe, 4, 1, 10.0, attention().all_reduce)
    made = grouped_attention(*given, bytes_per_element=2.0, weight_bytes_per_element=1.0)
    fast = grouped_attention(*given, bytes_per_element=2.0, weight_bytes_per_element=1.0, linear_speedup=2.0)
    assert float(made.context_bytes) == (8 + 2) * 10 * 2
    saved = float(made.flops_per_token) - float(fast.flops_per_token)
    assert saved == pytest.approx(latent.parameters(16) / 4, rel=1e-6)
