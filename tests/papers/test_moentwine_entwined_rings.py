"""moentwine IV-B: what it says of entwined rings, held against our rounds and the event simulator."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.des import GraphBuilder, add_sends, fabric_of, simulate
from jaxmoe.des import schedules as des
from jaxmoe.hardware import Mesh, wafers
from jaxmoe.hardware.networks import link_ends, num_links
from jaxmoe.network import (
    Congestion,
    Uncongested,
    alpha_beta,
    collective_time,
    entwined_ring_all_reduce,
    hierarchical_entwined_rings,
    link_loads,
    ring_all_reduce,
)
from jaxmoe.relax import HardMax

SIZE, BANDWIDTH, LATENCY = 1.2e6, 50e9, 1e-6
MESH = Mesh(jnp.full(num_links((4, 4)), BANDWIDTH), jnp.full(num_links((4, 4)), LATENCY), shape=(4, 4))
WHOLE = Congestion(jnp.asarray(0.0))


def seconds(topology, rounds, model=WHOLE):
    return float(eqx.filter_jit(collective_time)(model, topology, rounds, HardMax()))


def replay(sends):
    """Seconds that the event simulator takes over a schedule on the mesh."""
    fabric = fabric_of(MESH, None)
    graph = GraphBuilder(fabric.num_links, 0)
    add_sends(graph, sends, fabric.paths, [()] * 16)
    return simulate(graph.build(), fabric.rate, fabric.latency).makespan


def step(members, ways=1):
    """A part of the buffer over one hop, s."""
    return SIZE / members / ways / BANDWIDTH + LATENCY


@pytest.mark.parametrize("model", [WHOLE, Congestion(jnp.asarray(512.0)), Uncongested(), alpha_beta(MESH)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_two_hop_rings_take_twice_the_time_of_one_hop_rings(model, bidirectional):
    # IV-B2. Four groups of four on a 4x4 mesh: as blocks in the corners, and with domains of 2x2.
    blocks = np.asarray(des.block_rings((4, 4), 4))
    plain = seconds(MESH, ring_all_reduce(blocks, SIZE, 16, bidirectional), model)
    entwined = seconds(MESH, entwined_ring_all_reduce((4, 4), (2, 2), SIZE, bidirectional), model)
    assert plain == pytest.approx(6 * step(4, 1 + bidirectional), rel=1e-6)
    assert entwined == pytest.approx(2 * plain, rel=1e-6)


def test_intersections_do_not_worsen_the_time():
    # IV-B2. In the simulator, where nothing keeps rounds apart, one group alone takes as long as all four of them.
    ring = des.ring_all_reduce_sends(des.entwined_rings((4, 4), (2, 2))[0], SIZE, bidirectional=True)
    assert replay(des.forwarded_sends((4, 4), ring)) == pytest.approx(12 * step(4, ways=2), rel=1e-6)
    assert replay(des.entwined_ring_sends((4, 4), (2, 2), SIZE)) == pytest.approx(12 * step(4, ways=2), rel=1e-6)


def test_messages_of_two_hops_at_once_share_links_and_take_as_long():
    # Sent straight through instead of in rounds of single hops, two messages meet on every link between domains.
    rounds = ring_all_reduce(np.array(des.entwined_rings((4, 4), (2, 2))), SIZE, 16, bidirectional=True)
    cut_through = Congestion(jnp.asarray(0.0), cut_through=True)
    assert seconds(MESH, rounds, cut_through) == pytest.approx(12 * step(4, ways=2), rel=1e-6)
    # Stored and forwarded whole, every message would also wait to be there whole.
    assert seconds(MESH, rounds) == pytest.approx(6 * (3 * step(4, ways=2) - LATENCY), rel=1e-6)


def test_links_between_domains_are_always_busy_and_the_others_half_of_the_time():
    # V-A: links at intersections are always active, the others for one cycle of two, and all hot links
    # lie between domains. Nodes (x, y) and (x, y) + one step are of one domain where their halves are the same.
    rounds = entwined_ring_all_reduce((4, 4), (2, 2), SIZE)
    loads = np.asarray(jax.vmap(lambda traffic: link_loads(MESH, traffic))(rounds.traffic))
    x, y = np.unravel_index(link_ends((4, 4)), (4, 4))
    inside = (x[:, 0] // 2 == x[:, 1] // 2) & (y[:, 0] // 2 == y[:, 1] // 2)
    np.testing.assert_array_equal((loads > 0).sum(axis=0), np.where(inside, 1, 2))


def test_hierarchical_rings_scatter_inside_wafers_and_gather_across():
    # IV-B4: 2x2 wafers of 4x4 with domains of 2x2. Inside, groups of 4 take 3 steps of two hops; across,
    # 4 wafers take 3 steps of four hops, of which one is over the border at half the bandwidth.
    network = wafers((4, 4), (2, 2), BANDWIDTH, LATENCY, BANDWIDTH / 2, 2 * LATENCY)
    rounds = hierarchical_entwined_rings((8, 8), (4, 4), (2, 2), SIZE)
    inside = 3 * 2 * step(4, ways=2)
    # In each of its four rounds some message crosses a border.
    across = 3 * 4 * 2 * step(4, ways=2)
    assert seconds(network, rounds) == pytest.approx(inside + across, rel=1e-6)
    assert float(rounds.total_traffic().sum()) == pytest.approx(64 * (3 * 2 + 3 * 4) * SIZE / 4, rel=1e-6)
