"""Homes of tokens, against the plainest loops over tokens and nodes."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

from jaxmoe.des.description import homes_of, token_sources
from jaxmoe.hardware.networks import hop_counts
from jaxmoe.placement.exchange import LOAD_WEIGHT
from jaxmoe.traces import Batch

SHAPE, NODES, TOKENS, TOP_K = (3, 4), 12, 40, 3
HOPS = hop_counts(SHAPE)


def case(seed: int):
    """A batch, and the hosts of the choices of its tokens."""
    rng = np.random.default_rng(seed)
    batch = Batch(
        experts=jnp.zeros((TOKENS, TOP_K), jnp.int32),
        token_draw=jnp.asarray(rng.random(TOKENS), jnp.float32),
        draw=full((TOKENS, TOP_K), 0.0),
        weight=full(TOKENS, 1.0),
    )
    hosts = rng.random((TOKENS, TOP_K, NODES)) < 0.15
    hosts[np.arange(TOKENS), :, rng.integers(NODES, size=TOKENS)] = True
    return batch, hosts


def visited_nodes(hosts: np.ndarray) -> list[int]:
    return [node for node in range(NODES) if any(host[node] for host in hosts)]


@pytest.mark.parametrize("seed", range(3))
def test_homes_that_tokens_choose_on_their_own(seed):
    batch, hosts = case(seed)
    found = {name: homes_of(name, batch, hosts, HOPS) for name in ("lowest_host", "random_host", "fewest_hops")}
    for token, draw in enumerate(np.asarray(batch.token_draw).tolist()):
        nodes = visited_nodes(hosts[token])
        slot = int(draw * TOP_K)
        assert found["lowest_host"][token] == min(node for node in nodes if hosts[token, slot, node])
        assert found["random_host"][token] == nodes[int(draw * len(nodes))]
        away = {node: sum(HOPS[other, node] for other in nodes) for node in nodes}
        assert found["fewest_hops"][token] == min(nodes, key=lambda node, away=away: (away[node], node))


@pytest.mark.parametrize("seed", range(3))
def test_the_least_loaded_home_counts_tokens_that_came_before(seed):
    batch, hosts = case(seed)
    hosts[7] = False  # visits nothing, and is at home nowhere
    found, count = homes_of("least_loaded", batch, hosts, HOPS), dict.fromkeys(range(NODES), 0)
    for token in range(TOKENS):
        costs = {}
        nodes = visited_nodes(hosts[token])
        for node in nodes:
            away = sum(HOPS[other, node] for other in nodes)
            costs[node] = away * TOKENS + LOAD_WEIGHT * NODES * count[node]
        if costs:
            assert found[token] == min(nodes, key=lambda node, costs=costs: (costs[node], node))
            count[found[token]] += 1
    assert sum(count.values()) == TOKENS - 1


def test_a_load_weighs_as_many_hops_as_said():
    # All visit both ends of a row: one hop away either is. The first goes to the lower, the second to the other.
    batch, _ = case(0)
    hosts = np.zeros((TOKENS, TOP_K, NODES), bool)
    hosts[:, :, [0, 1]] = True
    assert homes_of("least_loaded", batch, hosts, HOPS).tolist() == [0, 1] * (TOKENS // 2)


def test_tokens_live_where_the_batch_says_or_in_equal_runs():
    batch, hosts = case(0)
    runs = homes_of("token_home", batch, hosts, HOPS)
    assert runs.tolist() == [token * NODES // TOKENS for token in range(TOKENS)]
    living = Batch(batch.experts, batch.token_draw, batch.draw, batch.weight, source=jnp.full(TOKENS, 5))
    assert token_sources(living, NODES).tolist() == [5] * TOKENS


def test_corners_take_tokens_in_turn():
    # Tokens 0 to 3 of a 2x3 mesh aim at nodes 0, 2, 3, 5, token 4 at node 0 again; all visit nodes 1 and 4.
    hosts = np.zeros((5, 1, 6), bool)
    hosts[:, :, [1, 4]] = True
    hops = np.array([[abs(a // 3 - b // 3) + abs(a % 3 - b % 3) for b in range(6)] for a in range(6)])
    batch = Batch(jnp.zeros((5, 1), int), full(5, 0.0), full((5, 1), 0.0), full(5, 1.0))
    assert homes_of("corner_host", batch, hosts, hops, (2, 3)).tolist() == [1, 1, 4, 4, 1]
    # Without corners every node has its turn: 0, 1, 2, 3, 4.
    assert homes_of("corner_host", batch, hosts, hops).tolist() == [1, 1, 1, 4, 4]
