"""Link loads by running sums against the dense incidence matrix."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import network as oracle
from oracles.arrays import full

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import hop_counts, num_links
from jaxmoe.network.loads import link_loads, path_maxima, path_sums
from jaxmoe.network.xy import prefix_sums, running_maxima

SHAPES = [(1, 2), (2, 1), (1, 6), (5, 1), (2, 2), (3, 4), (5, 6)]


def on_mesh(function):
    """The function with a mesh of a shape in place of the topology."""

    def call(shape, values):
        links = full(num_links(shape), 1.0)
        return function(Mesh(links, links, shape=shape), values)

    return jax.jit(call, static_argnums=0)


loads, sums, maxima = on_mesh(link_loads), on_mesh(path_sums), on_mesh(path_maxima)
mesh_shapes = st.sampled_from([*SHAPES, (1, 3), (4, 1), (2, 3), (4, 2), (3, 3), (5, 5)])


def random_traffic(shape, seed):
    rng = np.random.default_rng(seed)
    nodes = shape[0] * shape[1]
    return (rng.random((nodes, nodes)) * (rng.random((nodes, nodes)) < 0.6)).astype(np.float32)


@given(mesh_shapes, st.integers(0, 2**32 - 1))
def test_loads_equal_the_incidence_matrix(shape, seed):
    traffic = random_traffic(shape, seed)
    np.testing.assert_allclose(loads(shape, traffic), oracle.link_loads(shape, traffic), rtol=1e-4, atol=1e-4)


@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_loads_sum_to_traffic_times_hops(shape, seed):
    traffic = random_traffic(shape, seed)
    np.testing.assert_allclose(loads(shape, traffic).sum(), (traffic * hop_counts(shape)).sum(), rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_traffic_of_a_node_to_itself_is_free(shape):
    assert (loads(shape, np.eye(shape[0] * shape[1], dtype=np.float32)) == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("function", "combine"), [(sums, sum), (maxima, max)])
def test_path_values_equal_walking_the_paths(shape, function, combine):
    per_link = np.random.default_rng(1).random(num_links(shape)).astype(np.float32)
    np.testing.assert_allclose(function(shape, per_link), oracle.path_values(shape, per_link, combine), rtol=1e-5)


def test_many_traffics_at_once_equal_one_by_one():
    traffic = np.stack([random_traffic((3, 4), seed) for seed in range(3)])
    together = jax.vmap(partial(loads, (3, 4)))(traffic)
    for one, row in zip(together, traffic, strict=True):
        np.testing.assert_allclose(one, loads((3, 4), row), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32, 64, 65, 67, 100, 256])
def test_prefix_sums_are_running_sums(size):
    values = np.random.default_rng(size).random((3, size)).astype(np.float32)
    np.testing.assert_allclose(prefix_sums(jnp.asarray(values)), values.cumsum(axis=-1), rtol=1e-5)


@given(st.sampled_from([1, 2, 5, 8]), st.booleans(), st.integers(0, 2**32 - 1))
def test_running_maxima_and_their_derivative_are_those_of_one_position_after_the_other(positions, ties, seed):
    rng = np.random.default_rng(seed)
    values = rng.random((positions, 3, 4)).astype(np.float32)
    values = jnp.asarray(np.round(values) if ties else values)
    pull = jnp.asarray(rng.normal(size=values.shape), jnp.float32)

    def plain(values):
        return jnp.stack(list(itertools.accumulate(values, jnp.maximum)))

    np.testing.assert_array_equal(running_maxima(values), np.maximum.accumulate(values))
    found, expected = (jax.vjp(function, values)[1](pull)[0] for function in (running_maxima, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
