"""What every token passes beside the routed experts, against figures worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.engine import EvenPart, EvenParts
from jaxmoe.hardware import Die, Machine, fully_connected, node_memory
from jaxmoe.models.moe import GroupedQueryAttention, LatentAttention


def part(flops: float, weights: float = 0.0, per_token: float = 0.0) -> EvenPart:
    return EvenPart(*(jnp.asarray(number) for number in (flops, weights, per_token)))


def machine(flops, bandwidth=None) -> Machine:
    memory = node_memory(None if bandwidth is None else jnp.asarray(bandwidth))
    return Machine(fully_connected(len(flops), 1.0, 0.0), Die(jnp.asarray(flops)), memory)


def test_the_slowest_node_takes_its_even_part():
    # 8 tokens x 100 FLOP over 4 nodes: 200 FLOP each, the slowest at 50 FLOP/s.
    assert float(part(100.0).seconds(machine([100.0, 50.0, 200.0, 400.0]), jnp.asarray(8.0))) == pytest.approx(4.0)


def test_memory_counts_where_it_is_slower():
    # Of 400 B of weights and 8 x 50 B of context each node reads 200 B at 10 B/s; 8 x 100 / 4 FLOP take 2 s.
    limited = machine([100.0] * 4, [10.0] * 4)
    assert float(part(100.0, 400.0, 50.0).seconds(limited, jnp.asarray(8.0))) == pytest.approx(20.0)
    assert float(part(100.0, 400.0, 50.0).seconds(machine([100.0] * 4), jnp.asarray(8.0))) == pytest.approx(2.0)


def test_parts_add_up_and_have_gradients():
    parts = EvenParts(machine([10.0, 10.0]), part(4.0), part(2.0), part(6.0))
    beside = parts(jnp.asarray(5.0))
    np.testing.assert_allclose([beside.attention, beside.dense, beside.shared], [1.0, 0.5, 1.5], rtol=1e-6)
    assert float(beside.total) == pytest.approx(3.0)
    assert float(jax.grad(lambda tokens: parts(tokens).total)(jnp.asarray(5.0))) == pytest.approx(0.6)


def test_products_with_the_context():
    # 4 heads of 8: a score takes 8 products a head, the sum of values as many; 2 key-value heads are kept.
    grouped = GroupedQueryAttention(heads=4, kv_heads=2, head_size=8)
    assert (grouped.context_products, grouped.cache_elements) == (64, 32)
    # Scores over 16 + 4 elements a head, values of 16.
    latent = LatentAttention(heads=4, q_rank=None, kv_rank=16, nope_size=8, rope_size=4, value_size=8)
    assert (latent.context_products, latent.cache_elements) == (144, 20)
