"""The bound by minimum trees, against true minimum trees, every exchange, and cases worked out by hand."""

import dataclasses
import itertools
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases

from jaxmoe.engine import Layer
from jaxmoe.network import AbstractExchange, Uncongested, build_exchange
from jaxmoe.traces import Batch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "placement_tuning"))
from exchange_bound import exchange_bound
from tree_bound import balanced_trees, tree_bound
from trees import ascend, grow, links_of

sys.path.pop(0)

EXPERTS, TOP_K, TOKENS = 6, 3, 12
NAMES = ("token_home", "least_loaded_tree", "reduce_scatter")  # all others are in test_bounds.py, on a smaller mesh


def minimum_tree(ends: np.ndarray, length: np.ndarray, visited: np.ndarray) -> float:
    """The shortest tree to any home, by dynamic programming over subsets (Dreyfus and Wagner)."""
    vertices, begin = len(visited), np.flatnonzero(visited)
    path = np.full((vertices, vertices), np.inf)
    np.fill_diagonal(path, 0)
    path[ends[:, 0], ends[:, 1]] = length
    for via in range(vertices):
        path = np.minimum(path, path[:, via : via + 1] + path[via])
    least = {1 << i: path[node] for i, node in enumerate(begin)}  # of a subset, by where its tree ends
    for subset in range(1, 1 << len(begin)):
        if subset in least:
            continue
        parts = (part for part in range(1, subset) if part & subset == part)
        joined = np.min([least[part] + least[subset - part] for part in parts], axis=0)
        least[subset] = (joined[:, None] + path).min(axis=0)
    return float(least[(1 << len(begin)) - 1].min())


def tree_of(ends: np.ndarray, visited: np.ndarray, length: np.ndarray) -> tuple[float, np.ndarray, float]:
    """The bound on a tree, the ends of the links of a tree found, and its length. `length` is by given link."""
    links, order = links_of(ends)
    length, tree = length[order], np.empty(len(visited), np.int64)
    left, cover = np.empty(len(length)), np.empty(len(visited))
    bound = ascend(links, visited, length, left, cover)
    count, longest = grow(links, visited, length, left, cover, np.ones(len(length)), tree)
    found = tree[:count]
    assert longest <= count
    return bound, np.stack([links.tail[found], links.head[found]], axis=1), float(length[found].sum())


def test_the_bound_on_a_tree_is_near_the_minimum_and_the_tree_found_is_one():
    rng, ratios = np.random.default_rng(0), []
    ends = np.asarray(cases.random_machine(rng, (3, 3)).topology.link_ends)
    for _ in range(40):
        visited = np.isin(np.arange(9), rng.choice(9, rng.integers(2, 6), replace=False))
        length = rng.uniform(0.1, 1, len(ends)) / len(ends)
        bound, tree, total = tree_of(ends, visited, length)
        exact = minimum_tree(ends, length, visited)
        assert bound <= exact * (1 + 1e-9) <= total * (1 + 2e-9)
        ratios.append((bound / exact, total / exact))
        (home,) = set(tree.ravel()) - set(tree[:, 0])
        onward = dict(tree.tolist())
        assert len(onward) == len(tree)  # every vertex sends once
        for node in np.flatnonzero(visited):
            while node != home:
                node = onward[node]
    low, high = np.mean(ratios, axis=0)
    assert low > 0.97
    assert high < 1.05


@eqx.filter_jit
def communication(model: Layer, share: jax.Array, batch: Batch, exchange: AbstractExchange) -> jax.Array:
    return model(share, batch, exchange).communication


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_no_exchange_is_faster_than_the_bound(seed, hosts):
    rng = np.random.default_rng(seed)
    model = cases.layer_model(cases.random_machine(rng, (2, 3)))
    share = cases.random_share(rng, EXPERTS, 6, hosts)
    batch = cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K, missing=True))
    batches = jax.tree.map(lambda leaf: leaf[None], batch)
    (bound,), (balanced,) = tree_bound(model, share, batches), balanced_trees(model, share, batches)
    assert bound <= balanced * (1 + 1e-6)
    for name in NAMES:
        exchange = build_exchange(name, model.machine.topology)
        seconds = communication(model, jnp.asarray(share, jnp.float32), batch, exchange)
        assert bound <= seconds * (1 + 1e-5)


def even_line(nodes: int) -> Layer:
    machine = cases.random_machine(np.random.default_rng(0), (1, nodes))
    machine.link_bandwidth[:] = 1e9
    machine.link_latency[:] = 0
    return cases.layer_model(machine)


def alike(experts: list[list[int]], times: int) -> Batch:
    rows = jnp.asarray(list(itertools.chain(*([row] * times for row in experts))), jnp.int32)[None]
    return Batch(rows, jnp.zeros(rows.shape[:2]), jnp.zeros(rows.shape), jnp.ones(rows.shape[:2]))


def test_all_tokens_pass_the_middle_of_a_line():
    # Node 0 with 5, 1 with 4, 2 with 3: each of 3 x 20 tokens crosses the middle, at best every other one each way.
    model, batches = even_line(6), alike([[0, 5], [1, 4], [2, 3]], 20)
    seconds = 30 * (float(model.costs.combine_bytes) + float(model.costs.dispatch_bytes)) / 1e9
    (bound,) = tree_bound(model, np.eye(6), batches)
    assert 0.97 * seconds < bound <= seconds * (1 + 1e-9)
    # Single nodes send over two links: they know nothing of the others that want the same one.
    assert exchange_bound(model, np.eye(6), batches)[0] < 0.7 * seconds
    (balanced,) = balanced_trees(model, np.eye(6), batches)
    vector = max(float(model.costs.combine_bytes), float(model.costs.dispatch_bytes))
    assert seconds <= balanced <= seconds + 2 * 5 * vector / 1e9  # at most five links one after the other


def test_tokens_that_stay_at_one_node_send_nothing_and_merged_ones_count_by_weight():
    model = even_line(4)
    assert tree_bound(model, np.eye(4), alike([[2, 2]], 3)) == 0
    assert balanced_trees(model, np.eye(4), alike([[2, 2]], 3)) == 0
    drawn = alike([[0, 3], [1, 2]], 4)
    merged = dataclasses.replace(alike([[0, 3], [1, 2]], 1), weight=jnp.full((1, 2), 4.0))
    np.testing.assert_allclose(tree_bound(model, np.eye(4), merged), tree_bound(model, np.eye(4), drawn))


def test_what_trees_do_not_suit_is_refused():
    model, batches = even_line(4), alike([[0, 3]], 1)
    for other in (
        dataclasses.replace(model, mode="replicated"),
        dataclasses.replace(model, time_model=Uncongested()),
    ):
        with pytest.raises(ValueError, match="sharded plans under the congestion model"):
            tree_bound(other, np.eye(4), batches)
    limited = cases.layer_model(cases.random_machine(np.random.default_rng(0), (1, 4), ports=True))
    with pytest.raises(ValueError, match="ports"):
        balanced_trees(limited, np.eye(4), batches)
