"""How long nodes compute: memory levels that nodes share, and products whose times are given."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.des import Memory, replay_layer
from jaxmoe.placement.exchange import Gather

from .test_layer import BATCH, LAYER, SERVED, SHARE, make_batch, own_memory

# Visits of the batch: [2, 2, 1, 2]. Weights read of 100 B: [0.5, 1, 0.25, 1.25].
HALVES = np.array([0, 0, 1, 1])


def test_a_channel_serves_all_that_nodes_ask_of_it():
    shared = Memory(np.array([10.0, 20.0]), np.array([3.0, 0.0]), HALVES)
    layer = replace(LAYER, dispatch_bytes=8.0, combine_bytes=4.0, memory=(shared,))
    # 150 B and 4 visits of 12 B, at 10 B/s after 3 s; 150 B and 3 visits, at 20 B/s.
    np.testing.assert_allclose(replay_layer(layer, SHARE, BATCH).node_busy, [22.8, 22.8, 9.3, 9.3])


def test_dies_that_do_not_overlap_add_products_to_memory():
    """Products alone, and memory alone, whose dies multiply in no time."""
    shared = Memory(np.array([10.0, 20.0]), np.array([3.0, 0.0]), HALVES)
    products = replay_layer(LAYER, SHARE, BATCH).node_busy
    waited = replay_layer(replace(LAYER, flops=np.full(4, np.inf), memory=(shared,)), SHARE, BATCH).node_busy
    seen = replay_layer(replace(LAYER, memory=(shared,), overlap=False), SHARE, BATCH).node_busy
    assert min(products.min(), waited.min()) > 0
    np.testing.assert_allclose(seen, products + waited)


def test_vectors_stay_in_the_nearest_level_and_weights_pass_all():
    far = Memory(np.array([10.0, 10.0]), np.array([1.0, 1.0]), HALVES)
    near = own_memory([1e9, 1e9, 1e9, 8.0])
    seen = replay_layer(replace(LAYER, memory=(*near, far)), SHARE, BATCH)
    # Far: 150 B each. Near: node 3 reads 125 B and moves 2 * 16 B, at 8 B/s.
    np.testing.assert_allclose(seen.node_busy, [16, 16, 16, 157 / 8])


def test_a_channel_that_no_one_uses_takes_no_time():
    shared = Memory(np.array([10.0, 20.0]), np.array([3.0, 5.0]), HALVES)
    seen = replay_layer(replace(LAYER, memory=(shared,)), SHARE, make_batch([[1]], [0], [[0.0]]))
    np.testing.assert_allclose(seen.node_busy, [3 + 11.6, 3 + 11.6, 0, 0])


def test_memory_must_be_of_the_nodes():
    with pytest.raises(ValueError, match="channels of 3 nodes"):
        replace(LAYER, memory=own_memory([1.0, 1.0, 1.0]))


def seconds(node, tokens, part):
    """Tokens in pairs, a second for each at a whole expert; node 3 takes ten times as long."""
    return np.ceil(tokens / 2) * part * np.where(node == 3, 10, 1)


def test_products_are_one_after_the_other_on_a_node():
    # Expert 0 has tokens 0 and 1, in halves on 0 and 3; 1 tokens 0 and 2, on 1; 2 token 1, on 2 and 3.
    seen = replay_layer(replace(LAYER, gemm=seconds), SHARE, BATCH)
    assert seen.node_busy.tolist() == [0.5, 1.0, 0.25, 5 + 7.5]
    # Replicated: expert 0 once on 3 and once on 0, whole.
    whole = replay_layer(replace(LAYER, mode="replicated", gemm=seconds), SHARE, BATCH)
    assert whole.node_busy.tolist() == [1.0, 1.0, 1.0, 10.0]


def test_a_copy_that_serves_is_a_product_of_its_own():
    # Node 1: expert 1 for two tokens and a copy of 0 for one. Node 2: a quarter of expert 2, and a copy of 0.
    seen = replay_layer(replace(LAYER, gemm=seconds), SHARE, BATCH, SERVED)
    assert seen.node_busy.tolist() == [0, 1 + 1, 0.25 + 1, 7.5]
    # A copy beside a part of the same expert: a token each, and neither makes a pair.
    both = replay_layer(
        replace(LAYER, gemm=seconds), SHARE, make_batch([[0], [0]], [0, 0], np.zeros((2, 1))), np.array([[0], [-1]])
    )
    assert both.node_busy.tolist() == [1 + 0.5, 0, 0, 5]


def test_a_source_must_be_a_node():
    living = replace(BATCH, source=jnp.array([0, 4, 1]))
    with pytest.raises(ValueError, match=r"live at nodes 0\.\.4, expected source to name 0\.\.3"):
        replay_layer(replace(LAYER, exchange=Gather("token_home")), SHARE, living)
