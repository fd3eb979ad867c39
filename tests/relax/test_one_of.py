"""A node by its number and by a distribution with one 1 are the same choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion, Flows
from jaxmoe.network.loads import flow_loads, link_loads
from jaxmoe.relax import HardMax, as_weights, look_up, sums_of_rows

NODES = jnp.asarray([3, 0, 3, 5])
SHAPE = (2, 3)


weights_of = jax.jit(lambda nodes: as_weights(nodes, 6, jnp.float32))


def mesh(routing: str = "xy") -> Mesh:
    rng = np.random.default_rng(1)
    links = num_links(SHAPE)
    bandwidth, latency = (jnp.asarray(rng.uniform(1, 2, links), jnp.float32) for _ in range(2))
    return Mesh(bandwidth, latency, shape=SHAPE, routing=routing)


LOOK_UP = jax.jit(look_up)


def test_weights_of_numbers_by_hand():
    expected = np.zeros((4, 6))
    expected[[0, 1, 2, 3], [3, 0, 3, 5]] = 1
    np.testing.assert_array_equal(weights_of(NODES), expected)
    np.testing.assert_array_equal(weights_of(jnp.asarray(expected, jnp.float32)), expected)


def test_rows_are_those_of_the_table_to_the_last_bit():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)) * 1e-9, jnp.float32)
    found = LOOK_UP(NODES, table)
    np.testing.assert_array_equal(found, np.asarray(table)[np.asarray(NODES)])
    np.testing.assert_allclose(LOOK_UP(weights_of(NODES), table), found, rtol=1e-6)


def test_a_tables_gradient_is_how_often_a_row_was_looked_up():
    gradient = jax.jit(jax.grad(lambda table: look_up(NODES, table).sum()))(np.zeros((6, 2), np.float32))
    np.testing.assert_array_equal(np.asarray(gradient)[:, 0], [1, 0, 0, 2, 0, 1])


CHOSEN = jnp.asarray([[3, 0], [5, -1], [3, 5], [-1, -1]])  # -1: none


def test_sums_of_rows_by_hand():
    table = jnp.asarray(10.0 ** np.arange(6)[:, None])
    found = jax.jit(sums_of_rows)(table, CHOSEN)
    np.testing.assert_array_equal(found[:, 0], [1001, 100000, 101000, 0])


def test_sums_of_rows_and_their_derivative_are_those_of_a_product():
    """Over many tables, and over many choices from one."""
    rng = np.random.default_rng(3)
    tables, change = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 6, 5), (3, 4, 5)))
    chosen = jnp.stack([CHOSEN, CHOSEN[::-1], CHOSEN])

    def product(table, chosen):
        return jax.nn.one_hot(chosen, 6).sum(axis=1) @ table

    def with_derivative(function, over_tables, over_choices):
        def both(table, chosen, change):
            found, back = jax.vjp(lambda table: function(table, chosen), table)
            return found, *back(change)

        return jax.jit(jax.vmap(both, in_axes=(over_tables, over_choices, 0)))

    for over_tables, over_choices in ((0, None), (None, 0), (0, 0)):
        given = (tables if over_tables == 0 else tables[0], chosen if over_choices == 0 else CHOSEN, change)
        found, expected = (with_derivative(each, over_tables, over_choices)(*given) for each in (sums_of_rows, product))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("routing", ["xy", "yx"])
def test_loads_of_flows_to_many_nodes_have_the_derivative_of_their_messages(routing):
    topology, rng = mesh(routing), np.random.default_rng(4)
    source, towards = (jnp.asarray(rng.random((5, 6)), jnp.float32) for _ in range(2))
    weight = jnp.asarray(rng.random(num_links(SHAPE)), jnp.float32)

    def busy(source, towards):
        return weight @ flow_loads(topology, source, towards)

    def of_messages(source, towards):
        return weight @ link_loads(topology, source.T @ towards)

    (value, slopes), (expected, expected_slopes) = (
        jax.jit(jax.value_and_grad(each, argnums=(0, 1)))(source, towards) for each in (busy, of_messages)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for slope, other in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("routing", ["xy", "yx"])
def test_flows_to_numbered_nodes_load_links_and_take_time_as_those_to_weights(routing):
    topology = mesh(routing)
    source = jnp.asarray(np.random.default_rng(2).integers(0, 3, (4, 6)), jnp.float32)

    @jax.jit
    def loads_and_times(to):
        flows = Flows(source, to, jnp.ones(()))
        models = (Congestion(jnp.asarray(1.0)), Congestion(jnp.asarray(0.0), cut_through=True))
        times = [model.of_flows(topology, flows, jnp.asarray(4.0)).total(HardMax()) for model in models]
        return flow_loads(topology, source, to), times

    (loads, times), (loads_of_weights, times_of_weights) = map(loads_and_times, (NODES, weights_of(NODES)))
    np.testing.assert_allclose(loads, loads_of_weights, rtol=1e-6)
    np.testing.assert_allclose(times, times_of_weights, rtol=1e-6)
