"""A fault of XLA's CPU compiler that the delays of paths stay clear of."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.topologies import mesh

from jaxmoe.network import Congestion, Flows
from jaxmoe.network.time_models import never_constant
from jaxmoe.relax import HardMax

SIDE = 32  # rows and columns; a small matrix is multiplied right
ROWS = jnp.asarray(np.random.default_rng(0).random((4 * SIDE, SIDE)), jnp.float32)
MESH = mesh((4, 8), latency=0.0)


def largest_products(matrix: np.ndarray) -> jax.Array:
    """Of every row, with a matrix that is a constant to the compiler."""
    return jax.jit(lambda rows: jnp.max(rows @ jnp.asarray(matrix), axis=1))(ROWS)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a fault of the CPU compiler")
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(0.0, marks=pytest.mark.xfail(reason="jaxlib 0.10: wrong or right by what memory held before")),
        pytest.param(
            1.0,
            marks=pytest.mark.xfail(
                strict=True, reason="jaxlib 0.10; where this passes, `never_constant` can go, and the README's note"
            ),
        ),
    ],
)
def test_products_with_a_constant_matrix_of_equal_entries_are_right(entry):
    expected = ROWS.sum(axis=1) * entry
    np.testing.assert_allclose(largest_products(np.full((SIDE, SIDE), entry, np.float32)), expected, rtol=1e-5)


def test_products_with_a_matrix_that_is_never_constant_are_right():
    @jax.jit
    def largest(rows):
        return jnp.max(rows @ never_constant(full((SIDE, SIDE), 0.0), MESH), axis=1)

    assert 0 < float(jnp.max(largest(ROWS))) < 1e-25  # 32 entries below 1 times 10 hops


@pytest.mark.parametrize("cut_through", [False, True])
def test_constant_networks_without_latency_have_the_time_of_others(cut_through):
    """Whether the network is an argument or a constant to the compiler."""
    rng = np.random.default_rng(1)
    home = jnp.asarray(np.eye(SIDE)[rng.integers(SIDE, size=4 * SIDE)], jnp.float32)
    source = jnp.asarray(rng.random((4 * SIDE, SIDE)) < 0.3, jnp.float32)
    model = Congestion(jnp.asarray(1.0), cut_through)

    def time(topology, source):
        return model.of_flows(topology, Flows(source, home, full((), 1.0)), jnp.asarray(4.0)).total(HardMax())

    given = float(eqx.filter_jit(time)(MESH, source))
    assert float(eqx.filter_jit(lambda source: time(MESH, source))(source)) == pytest.approx(given, rel=1e-6)
    loaded = dataclasses.replace(MESH, link_latency=MESH.link_latency + 1e-3)
    assert given < float(eqx.filter_jit(time)(loaded, source)) < given + 11e-3
