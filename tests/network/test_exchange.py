"""Gathering and ring reduction of one batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import layer as oracle

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.mesh import hop_counts, num_links
from jaxmoe.network import Visits, block_rings, congestion, replicated_visits, sharded_visits
from jaxmoe.relax import HardMax, HardSupport

VISITS = {"sharded": sharded_visits, "replicated": replicated_visits}


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("rule", ["lowest", "fewest"])
def test_visits_and_messages_equal_the_loops(mode, rule):
    rng = np.random.default_rng(5)
    machine = cases.random_machine(rng, (3, 4))
    share, tokens = cases.random_share(rng, 8, 12), cases.random_tokens(rng, 20, 8, 3, missing=True)
    visits = VISITS[mode](jnp.asarray(share, float), cases.batch(tokens), HardSupport())
    for token in range(20):
        reached = {n for hosts in oracle.visited_nodes(share, tokens, token, mode) for n in hosts}
        assert set(np.flatnonzero(visits.visited[token])) == reached
    flows = cases.RULES[rule]()(machine.shape, visits)
    expected = oracle.gather_messages(machine, share, tokens, mode, rule)
    np.testing.assert_allclose(flows.source.T @ flows.destination, expected, rtol=1e-6)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="slices are (cumsum - share, cumsum): rounding leaves gaps and overlaps"
)
def test_every_token_is_served_once_per_expert_even_on_the_edge_of_a_slice():
    """Slices of the replicas must leave no gap and no overlap for a draw to fall into."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.ones(8), size=400).astype(np.float32)
    edges = np.cumsum(share, axis=1)[:, 1:7]
    tokens = oracle.Tokens(
        experts=np.repeat(np.arange(400), edges.shape[1])[:, None],
        gather_slot=np.zeros(edges.size, int),
        draw=edges.reshape(-1, 1),
        weight=np.ones(edges.size),
    )
    visits = replicated_visits(jnp.asarray(share), cases.batch(tokens), HardSupport())
    np.testing.assert_array_equal(visits.home.sum(axis=1), 1)


def everywhere(tokens: int, nodes: int) -> Visits:
    """Tokens that visit every node and have node 0 as home."""
    home = jnp.zeros((1, nodes)).at[0, 0].set(1)
    return Visits(jnp.ones((tokens, nodes)), jnp.ones((tokens, 1)), home, jnp.ones(nodes), jnp.ones(tokens))


@pytest.mark.parametrize(("shape", "rings"), [((2, 2), 1), ((4, 4), 1), ((4, 8), 1), ((4, 8), 2), ((3, 4), 1)])
def test_ring_reduce_takes_the_textbook_time(shape, rings):
    # Dispatch and combine of B vectors of 2 h bytes: 4 B h (R-1)/R / BW, which hd_moe Eq. 4 takes for many nodes.
    tokens, hidden, bandwidth = 64, 4096, 50e9
    exchange = block_rings(shape, rings)
    links = num_links(shape)
    mesh = Mesh(shape, jnp.full(links, bandwidth), jnp.zeros(links))
    flows = exchange(shape, everywhere(tokens, shape[0] * shape[1]))
    stage = jax.jit(congestion)(mesh, flows, jnp.asarray(2.0 * hidden), jnp.asarray(0.0))
    size = shape[0] * shape[1] // rings
    expected = 4 * tokens * hidden * (size - 1) / size / bandwidth
    assert 2 * float(stage.total(HardMax())) == pytest.approx(expected, rel=1e-5)


def test_block_rings_stay_inside_their_block_and_step_to_neighbours():
    rings = block_rings((4, 8), 4)
    block, successor = np.asarray(rings.block), np.asarray(rings.successor)
    assert (block[successor] == block).all()
    assert (hop_counts((4, 8))[np.arange(32), successor] == 1).all()
    assert sorted(successor) == list(range(32))
    assert rings((4, 8), everywhere(3, 32)).rounds == 7
