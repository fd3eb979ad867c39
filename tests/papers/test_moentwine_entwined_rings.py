"""moentwine IV-B: what it says of entwined rings, held against our rounds and the event simulator."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import schedules as des

from jaxmoe.des import GraphBuilder, add_sends, fabric_of, simulate
from jaxmoe.hardware import Mesh, wafers
from jaxmoe.hardware.networks import link_ends, num_links
from jaxmoe.network import (
    Congestion,
    Uncongested,
    alpha_beta,
    link_loads,
    price_rounds,
)
from jaxmoe.network.token_communication import all_reduce_rounds, scaled
from jaxmoe.placement.token_layout import links_inside_domains, token_layout
from jaxmoe.relax import HardMax

SIZE, BANDWIDTH, LATENCY = 1.2e6, 50e9, 1e-6
MESH = Mesh(jnp.full(num_links((4, 4)), BANDWIDTH), jnp.full(num_links((4, 4)), LATENCY), shape=(4, 4))
WHOLE, STRAIGHT = Congestion(jnp.asarray(0.0)), Congestion(jnp.asarray(0.0), cut_through=True)
ER = token_layout("er", (4, 4), 4)


def seconds(topology, rounds, model=WHOLE):
    return float(eqx.filter_jit(price_rounds)(model, topology, rounds, HardMax()).seconds)


def replay(sends):
    """Seconds that the event simulator takes over a schedule on the mesh."""
    fabric = fabric_of(MESH, None)
    graph = GraphBuilder(fabric.num_links, 0)
    add_sends(graph, sends, fabric.paths, [()] * 16)
    return simulate(graph.build(), fabric.rate, fabric.latency).makespan


def step(members, ways=1):
    """A part of the buffer over one hop, s."""
    return SIZE / members / ways / BANDWIDTH + LATENCY


@pytest.mark.parametrize("model", [STRAIGHT, Congestion(jnp.asarray(512.0)), Uncongested(), alpha_beta(MESH)])
@pytest.mark.parametrize("both_ways", [False, True])
def test_two_hop_rings_take_twice_the_time_of_one_hop_rings(model, both_ways):
    # IV-B2. Four groups of four on a 4x4 mesh: as blocks in the corners, and with domains of 2x2.
    plain, entwined = (
        seconds(MESH, scaled(all_reduce_rounds(token_layout(name, (4, 4), 4), both_ways), SIZE), model)
        for name in ("baseline", "er")
    )
    assert plain == pytest.approx(6 * step(4, 1 + both_ways), rel=1e-6)
    # Stored and forwarded in chunks, a message is late by one chunk at the node that it passes.
    late = 6 * 512 / BANDWIDTH if isinstance(model, Congestion) and not model.cut_through else 0
    assert entwined == pytest.approx(2 * plain + late, rel=1e-6)


def test_intersections_do_not_worsen_the_time():
    # IV-B2. In the simulator, where nothing keeps rounds apart, one group alone takes as long as all four of them.
    ring = des.ring_all_reduce_sends(des.entwined_rings((4, 4), (2, 2))[0], SIZE, bidirectional=True)
    assert replay(des.forwarded_sends((4, 4), ring)) == pytest.approx(12 * step(4, ways=2), rel=1e-6)
    assert replay(des.entwined_ring_sends((4, 4), (2, 2), SIZE)) == pytest.approx(12 * step(4, ways=2), rel=1e-6)


def test_messages_of_two_hops_at_once_share_links_and_take_as_long():
    # Sent straight through instead of in rounds of single hops, two messages meet on every link between domains.
    rounds = scaled(all_reduce_rounds(ER), SIZE)
    assert seconds(MESH, rounds, STRAIGHT) == pytest.approx(12 * step(4, ways=2), rel=1e-6)
    # Stored and forwarded whole, every message would also wait to be there whole.
    assert seconds(MESH, rounds) == pytest.approx(6 * (3 * step(4, ways=2) - LATENCY), rel=1e-6)


def test_links_between_domains_are_always_busy_and_the_others_half_of_the_time():
    # V-A: links at intersections are always active, the others for one cycle of two, and all hot links
    # lie between domains.
    loads = np.asarray(link_loads(MESH, all_reduce_rounds(ER).traffic[0]))
    inside = links_inside_domains(ER, link_ends((4, 4)))
    np.testing.assert_allclose(loads, np.where(inside, 1, 2) / 8)  # of a part, half of it each way


def test_hierarchical_rings_scatter_inside_wafers_and_gather_across():
    # IV-B4: 2x2 wafers of 4x4 with domains of 2x2. Inside, groups of 4 take 3 steps of two hops; across, 4 wafers take
    # 3 steps in which the four nodes of a line share the border link, at half the bandwidth and twice the latency.
    network = wafers((4, 4), (2, 2), BANDWIDTH, LATENCY, BANDWIDTH / 2, 2 * LATENCY)
    rounds = scaled(all_reduce_rounds(token_layout("her", (8, 8), 4, (4, 4))), SIZE)
    inside = 3 * 2 * step(4, ways=2)
    across = 3 * (4 * SIZE / 8 / (BANDWIDTH / 2) + 5 * LATENCY)
    assert seconds(network, rounds, STRAIGHT) == pytest.approx(inside + across, rel=1e-6)
    assert float(des.total_traffic(rounds).sum()) == pytest.approx(64 * (3 + 3) * SIZE / 4, rel=1e-6)
