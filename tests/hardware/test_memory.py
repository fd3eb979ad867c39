"""Memory channels that nodes share, worked by hand."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.engine import Work
from jaxmoe.hardware import Die, Machine, MemoryLevel, fully_connected, node_memory


def level(bandwidth, latency, capacity, channel) -> MemoryLevel:
    numbers = (None if values is None else jnp.asarray(values, float) for values in (bandwidth, latency, capacity))
    return MemoryLevel(*numbers, channel=jnp.asarray(channel, jnp.int32))


# Four nodes; 0, 1 and 3 share the first DDR channel, node 2 has the other alone.
DDR = level([10.0, 20.0], [0.5, 0.25], [90.0, 80.0], [0, 0, 1, 0])
CACHE = level([100.0] * 4, [0.0] * 4, [1.0] * 4, [0, 1, 2, 3])


def machine(*memory: MemoryLevel) -> Machine:
    return Machine(fully_connected(4, 1.0, 0.0), Die(jnp.ones(4)), memory)


def node_seconds(machine: Machine, flops, weights, vectors):
    """Dies compute one FLOP in a second."""
    return Work(flops, weights, vectors).busy(machine)["node"]


def test_a_channel_moves_what_all_its_nodes_ask_for():
    seconds = eqx.filter_jit(DDR.seconds)(jnp.asarray([10.0, 20.0, 40.0, 0.0]))
    assert seconds.tolist() == [0.5 + 30 / 10, 0.25 + 40 / 20]


def test_a_channel_that_nobody_uses_takes_no_latency():
    assert DDR.seconds(jnp.asarray([0.0, 0.0, 40.0, 0.0])).tolist() == [0.0, 2.25]


def test_every_node_waits_for_its_channel_even_for_the_bytes_of_others():
    seconds, weights, none = jnp.zeros(4), jnp.asarray([10.0, 20.0, 40.0, 0.0]), jnp.zeros(4)
    assert node_seconds(machine(DDR), seconds, weights, none).tolist() == [3.5, 3.5, 2.25, 3.5]


def test_weights_pass_every_level_and_vectors_the_nearest_alone():
    compute, weights, vectors = jnp.asarray([0.1, 9.0, 0.1, 0.1]), jnp.asarray([10.0, 0, 0, 0]), jnp.full(4, 300.0)
    # Through the caches 310 and 300 B at 100 B/s; through DDR 10 B and the latency, for the three of a channel.
    measured = node_seconds(machine(CACHE, DDR), compute, weights, vectors)
    np.testing.assert_allclose(measured, [3.1, 9.0, 3.0, 3.0], rtol=1e-6)
    # With slow DDR, its channel is what counts, but only for weights.
    slow = eqx.tree_at(lambda m: m.bandwidth, DDR, jnp.asarray([1.0, 1.0]))
    measured = node_seconds(machine(CACHE, slow), compute, weights, vectors)
    np.testing.assert_allclose(measured, [10.5, 10.5, 3.0, 10.5], rtol=1e-6)


def test_without_memory_levels_compute_is_all():
    assert node_seconds(machine(), jnp.asarray([1.0, 2, 3, 4]), jnp.ones(4), jnp.ones(4)).tolist() == [1, 2, 3, 4]


def test_capacity_is_the_even_part_of_a_channel_of_the_last_level():
    assert machine(CACHE, DDR).capacity.tolist() == [30.0, 30.0, 80.0, 30.0]
    assert machine(DDR, CACHE).capacity.tolist() == [1.0] * 4
    assert machine().capacity is None
    assert machine(CACHE, level([1.0], [0.0], None, [0] * 4)).capacity is None


@pytest.mark.parametrize("capacity", [None, [5.0, 6.0]])
def test_memory_of_nodes_has_a_channel_for_each(capacity):
    (own,) = node_memory(jnp.asarray([2.0, 4.0]), None if capacity is None else jnp.asarray(capacity))
    assert own.channel.tolist() == [0, 1]
    assert own.seconds(jnp.asarray([8.0, 8.0])).tolist() == [4.0, 2.0]
    assert (None if own.capacity is None else own.capacity.tolist()) == capacity


def test_memory_of_a_capacity_alone_takes_no_time():
    (own,) = node_memory(None, jnp.asarray([5.0, 6.0]))
    assert own.seconds(jnp.asarray([8.0, 8.0])).tolist() == [0.0, 0.0]
    assert node_memory(None) == ()
