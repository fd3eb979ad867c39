"""The simulator's own counts of bytes and FLOPs, and so energies, are those of the model."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

from jaxmoe.des import LayerDescription, Memory, fabric_of, replay_layer
from jaxmoe.engine import Layer, LayerCosts, Pipelined
from jaxmoe.hardware import Die, Energy, Machine, MemoryLevel, Mesh, clusters, wafers
from jaxmoe.hardware.networks import border_links
from jaxmoe.network import Congestion, build_exchange
from jaxmoe.placement.exchange import exchange_of
from jaxmoe.traces import Batch

EXPERTS, TOKENS, NODES = 6, 12, 8
COSTS = (700.0, 1100.0, 3e4, 2e5)  # combine, dispatch, expert: B; FLOPs of a token and expert
NETWORKS = {
    "mesh": (lambda: Mesh(full(20, 2e9), full(20, 1e-8), shape=(2, 4)), np.arange(20) < 5),
    "wafers": (lambda: wafers((2, 2), (1, 2), 2e9, 1e-8, 1e9, 3e-8), border_links((2, 2), (1, 2))),
    "clusters": (lambda: clusters(2, 4, 2e9, 1e-8, 1e9, 3e-8), np.arange(20) >= 16),
}
CASES = [
    pytest.param("mesh", "lowest_host", "sharded", 1, marks=pytest.mark.slow),
    ("mesh", "corner_host_split_tree", "sharded", 1),
    ("mesh", "rings_2x2_both_ways", "replicated", 1),
    ("wafers", "least_loaded", "sharded", 3),
    pytest.param("wafers", "reduce_scatter", "replicated", 1, marks=pytest.mark.slow),
    pytest.param("wafers", "random_host_tree", "sharded", 1, marks=pytest.mark.slow),
    ("clusters", "token_home_tree", "sharded", 1),
]


@pytest.mark.parametrize(("network", "exchange", "mode", "parts"), CASES)
def test_bytes_flops_and_energies_are_borne_out(network, exchange, mode, parts):
    make, special = NETWORKS[network]
    topology, rng = make(), np.random.default_rng(3)
    share = np.zeros((EXPERTS, NODES), np.float32)
    for row in share:
        row[rng.choice(NODES, 2, replace=False)] = 0.25, 0.75
    batch = Batch(
        experts=jnp.asarray(np.stack([rng.choice(EXPERTS, 2, replace=False) for _ in range(TOKENS)]), jnp.int32),
        token_draw=jnp.asarray((rng.integers(2, size=TOKENS) + 0.5) / 2, jnp.float32),
        draw=jnp.asarray(rng.random((TOKENS, 2)), jnp.float32),
        weight=full(TOKENS, 1.0),
    )
    # A cache of each node and a memory that pairs of nodes share.
    caches, shared = np.arange(NODES), np.arange(NODES) // 2
    layer = LayerDescription(
        fabric_of(topology, 256.0),
        np.full(NODES, 1e12),
        *(COSTS[1], COSTS[0], COSTS[2], COSTS[3]),
        mode=mode,
        exchange=exchange_of(exchange),
        memory=tuple(Memory(np.full(max(at) + 1, 1e10), np.zeros(max(at) + 1), at) for at in (caches, shared)),
        micro_batches=parts,
    )
    seen = replay_layer(layer, share, batch)

    levels = tuple(
        MemoryLevel(full(max(at) + 1, 1e10), full(max(at) + 1, 0.0), None, jnp.asarray(at, jnp.int32), name)
        for at, name in ((caches, "cache"), (shared, "ddr"))
    )
    each = np.where(special, 0, rng.uniform(1, 9, topology.num_links)), np.where(special, 30.0, 0)
    energy = Energy(
        jnp.asarray(0.5),
        {"cache": jnp.asarray(2.0), "ddr": jnp.asarray(40.0)},
        {"link": jnp.asarray(each[0]), "border": jnp.asarray(each[1])},
    )
    model = Layer(
        Machine(topology, Die(full(NODES, 1e12)), levels, energy),
        LayerCosts(*map(jnp.asarray, (*COSTS, 1.0, 1.0))),
        Congestion(jnp.asarray(256.0)),
        build_exchange(exchange, topology),
        mode,
        *([Pipelined(parts)] if parts > 1 else []),
    )
    told = eqx.filter_jit(model)(jnp.asarray(share), batch).energy
    expected = {
        "compute": 0.5 * seen.flops.sum(),
        "memory_cache": 2 * seen.memory_bytes[0].sum(),
        "memory_ddr": 40 * seen.memory_bytes[1].sum(),
        "link": each[0] @ seen.link_bytes,
        "border": each[1] @ seen.link_bytes,
    }
    assert min(expected.values()) > 0
    assert {name: float(joules) for name, joules in told.items()} == pytest.approx(expected, rel=1e-5)


def test_counts_by_hand():
    """One token from node 0 to its only expert on node 2 of a line: two hops there, two back."""
    line = Mesh(full(4, 10.0), full(4, 0.0), shape=(1, 3))
    memory = (Memory(np.full(3, 1.0), np.zeros(3), np.arange(3)),)
    layer = LayerDescription(
        fabric_of(line, None), np.ones(3), 8.0, 6.0, 100.0, 50.0, "sharded", exchange_of("token_home"), memory
    )
    batch = Batch(jnp.array([[0]]), full(1, 0.0), full((1, 1), 0.0), full(1, 1.0), jnp.zeros(1, jnp.int32))
    seen = replay_layer(layer, np.array([[0.0, 0.0, 1.0]]), batch)
    assert seen.link_bytes.tolist() == [8, 8, 6, 6]  # up the line, then down
    assert seen.flops.tolist() == [0, 0, 50]
    assert seen.memory_bytes.tolist() == [[0, 0, 100 + 8 + 6]]
