"""Replays of token layouts: worked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.des import fabric_of
from jaxmoe.des.token_communication import exchange_traffic, reduce_steps, replay_communication
from jaxmoe.hardware import Mesh, clusters
from jaxmoe.hardware.networks import num_links
from jaxmoe.placement.token_layout import successive_layout, token_layout

BANDWIDTH, LATENCY = 50e9, 1e-6


def mesh_of(shape):
    links = num_links(shape)
    return Mesh(jnp.full(links, BANDWIDTH), jnp.full(links, LATENCY), shape=shape)


def visiting(nodes, *visits):
    """Tokens that visit these nodes, bool [token, node]."""
    visited = np.zeros((len(visits), nodes), bool)
    for token, where in enumerate(visits):
        visited[token, list(where)] = True
    return visited


def test_one_token_of_each_exchange():
    fabric, visited, group = fabric_of(mesh_of((4, 4)), None), visiting(16, (5, 10)), np.array([0])
    (er,) = exchange_traffic(fabric, token_layout("er", (4, 4), 4), visited, group)
    # Group 0 has nodes 0, 2, 8 and 10: node 5 is in the domain of 0, and 10 has the token itself.
    assert er[5, 0] == er[10, 10] == 1
    assert er.sum() == 2
    (scattered,) = exchange_traffic(fabric, token_layout("er", (4, 4), 4, all_gather=False), visited, group)
    assert scattered[5, [0, 2, 8, 10]].tolist() == [0.25] * 4
    assert scattered.sum() == 2


def test_one_token_over_clusters():
    # Two clusters of four, groups of two: the second token of group 0 lives at node 1, and its relay there is node 5.
    layout, network = successive_layout(2, 4, 2), clusters(2, 4, 1.0, 0.0, 1.0, 0.0)
    visited = visiting(8, (), (0, 2, 6, 7))
    inside, between = exchange_traffic(fabric_of(network, None), layout, visited, np.array([0, 0]))
    assert np.argwhere(inside).tolist() == [[2, 1], [6, 5], [7, 5]]
    assert np.argwhere(between).tolist() == [[1, 1], [5, 1]]


def test_slices_go_round_their_domain():
    layout = token_layout("esp", (4, 4), 4)
    # One token of the first device's group visits its domain, of four devices: three steps of half a part either way.
    domain = np.flatnonzero(layout.domain == 0)
    visited = visiting(16, domain)
    steps = exchange_traffic(fabric_of(mesh_of((4, 4)), None), layout, visited, np.array([0]))
    *around, back = steps
    assert len(around) == 3
    assert all(step.sum() == 1 for step in around)
    # In the last step it arrives at the device of its group.
    home = next(node for node in domain if layout.group[node] == 0)
    assert around[-1][:, home].sum() == 1
    assert not back.any()


def test_slices_of_neighbours_return_parts_to_the_groups():
    layout = token_layout("baseline_esp", (4, 4), 4)
    assert layout.slices.reshape(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    visited = visiting(16, np.flatnonzero(layout.slices == 1))
    *around, back = exchange_traffic(fabric_of(mesh_of((4, 4)), None), layout, visited, np.array([0]))
    assert all(step.sum() == 1 for step in around)
    # Each of four devices has a quarter, and returns it to the member of its own domain.
    assert [(node, home) for node, home in np.argwhere(back).tolist()] == [(2, 0), (3, 1), (6, 4), (7, 5)]
    assert set(back[back > 0]) == {0.25}


@pytest.mark.parametrize(("name", "steps"), [("baseline", 6), ("er", 6), ("her", 3 + 1)])
def test_steps_of_the_all_reduce(name, steps):
    layout = token_layout(name, (8, 4) if name == "her" else (4, 4), 4, (4, 4))
    sent = list(reduce_steps(layout, 8.0))
    assert len(sent) == steps
    assert all(step.sum() == layout.num_nodes * 2.0 for step in sent)


def test_a_step_waits_for_all_rings():
    # Whole messages over two hops; two share every link between domains, one after the other.
    layout = token_layout("er", (4, 4), 4)
    seen = replay_communication(fabric_of(mesh_of((4, 4)), None), layout, visiting(16, ()), np.array([0]), 8e6)
    part = 8e6 / 4 / 4 / 2 / BANDWIDTH  # a quarter of a token on average, in four parts, half of each either way
    assert seen["all_reduce"].seconds == pytest.approx(6 * 2 * (part + LATENCY), rel=1e-6)
    assert seen["dispatch"].seconds == seen["combine"].seconds == 0
