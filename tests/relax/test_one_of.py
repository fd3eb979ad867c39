"""A node by its number and by a distribution with one 1 are the same choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion, Flows
from jaxmoe.network.loads import flow_loads
from jaxmoe.relax import HardMax, as_weights, look_up

NODES = jnp.asarray([3, 0, 3, 5])
SHAPE = (2, 3)


def mesh(routing: str = "xy") -> Mesh:
    rng = np.random.default_rng(1)
    links = num_links(SHAPE)
    bandwidth, latency = (jnp.asarray(rng.uniform(1, 2, links), jnp.float32) for _ in range(2))
    return Mesh(bandwidth, latency, shape=SHAPE, routing=routing)


def test_weights_of_numbers_by_hand():
    expected = np.zeros((4, 6))
    expected[[0, 1, 2, 3], [3, 0, 3, 5]] = 1
    np.testing.assert_array_equal(as_weights(NODES, 6, jnp.float32), expected)
    np.testing.assert_array_equal(as_weights(jnp.asarray(expected), 6, jnp.float32), expected)


def test_rows_are_those_of_the_table_to_the_last_bit():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)) * 1e-9, jnp.float32)
    found = jax.jit(look_up)(NODES, table)
    np.testing.assert_array_equal(found, np.asarray(table)[np.asarray(NODES)])
    np.testing.assert_allclose(look_up(as_weights(NODES, 6, jnp.float32), table), found, rtol=1e-6)


def test_a_tables_gradient_is_how_often_a_row_was_looked_up():
    gradient = jax.grad(lambda table: look_up(NODES, table).sum())(jnp.zeros((6, 2)))
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 0, 2, 0, 1])


@pytest.mark.parametrize("routing", ["xy", "yx"])
def test_flows_to_numbered_nodes_load_links_and_take_time_as_those_to_weights(routing):
    topology = mesh(routing)
    source = jnp.asarray(np.random.default_rng(2).integers(0, 3, (4, 6)), jnp.float32)
    weights = as_weights(NODES, 6, jnp.float32)
    np.testing.assert_allclose(flow_loads(topology, source, NODES), flow_loads(topology, source, weights), rtol=1e-6)
    for model in (Congestion(jnp.asarray(1.0)), Congestion(jnp.asarray(0.0), cut_through=True)):
        numbered, weighted = (
            model.of_flows(topology, Flows(source, to, jnp.ones(())), jnp.asarray(4.0)).total(HardMax())
            for to in (NODES, weights)
        )
        np.testing.assert_allclose(numbered, weighted, rtol=1e-6)
