"""Numbering, paths, rectangles and rings of the mesh."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.paths import xy_path

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.cuts import blocks, ring_order
from jaxmoe.hardware.networks import hop_counts, link_ends, num_links, reverse_links

shapes = st.tuples(st.integers(1, 5), st.integers(1, 6))


def test_links_are_numbered_in_four_blocks():
    assert link_ends((2, 3)).tolist() == [
        [0, 3], [1, 4], [2, 5],  # +x
        [3, 0], [4, 1], [5, 2],  # -x
        [0, 1], [1, 2], [3, 4], [4, 5],  # +y
        [1, 0], [2, 1], [4, 3], [5, 4],  # -y
    ]  # fmt: skip


@given(shapes)
def test_links_join_each_pair_of_neighbours_once_each_way(shape):
    ends = link_ends(shape)
    assert len(ends) == num_links(shape) == len({tuple(pair) for pair in ends.tolist()})
    assert (hop_counts(shape)[ends[:, 0], ends[:, 1]] == 1).all()
    assert len(ends) == (hop_counts(shape) == 1).sum()


@given(shapes)
def test_reverse_links_swaps_the_ends_and_undoes_itself(shape):
    back = reverse_links(shape)
    assert (link_ends(shape)[back] == link_ends(shape)[:, ::-1]).all()
    assert (back[back] == np.arange(num_links(shape))).all()


@given(shapes)
def test_xy_path_is_unbroken_shortest_and_goes_along_x_first(shape):
    ends = link_ends(shape)
    for source, destination in itertools.product(range(shape[0] * shape[1]), repeat=2):
        path = xy_path(shape, source, destination)
        stops = [source, *(int(ends[link, 1]) for link in path)]
        assert [int(ends[link, 0]) for link in path] == stops[:-1]
        assert stops[-1] == destination
        assert len(path) == hop_counts(shape)[source, destination]
        along_x = [link < 2 * (shape[0] - 1) * shape[1] for link in path]
        assert along_x == sorted(along_x, reverse=True)


def test_reversed_mesh_carries_the_numbers_of_the_opposite_links_and_ports():
    links = np.arange(num_links((2, 3)), dtype=np.float32)
    mesh = Mesh(jnp.asarray(links), jnp.asarray(links / 10), jnp.arange(6.0), jnp.arange(6.0) + 10, shape=(2, 3))
    back = mesh.reversed()
    for link, (start, stop) in enumerate(link_ends((2, 3)).tolist()):
        opposite = link_ends((2, 3)).tolist().index([stop, start])
        assert back.link_bandwidth[link] == opposite
        assert back.link_latency[link] == np.float32(opposite / 10)
    assert (back.injection_bandwidth == mesh.ejection_bandwidth).all()
    assert (back.ejection_bandwidth == mesh.injection_bandwidth).all()


@pytest.mark.parametrize(
    ("shape", "count"), [((4, 8), 1), ((4, 8), 2), ((4, 8), 4), ((4, 8), 8), ((4, 8), 32), ((3, 4), 6), ((1, 6), 3)]
)
def test_blocks_are_equal_full_rectangles(shape, count):
    block = blocks(shape, count).reshape(shape)
    assert sorted(set(block.ravel())) == list(range(count))
    for index in range(count):
        x, y = np.nonzero(block == index)
        assert x.size == block.size // count == (np.ptp(x) + 1) * (np.ptp(y) + 1)


def test_blocks_are_as_square_as_they_come():
    x, y = np.nonzero(blocks((4, 8), 2).reshape(4, 8) == 0)
    assert (np.ptp(x) + 1, np.ptp(y) + 1) == (4, 4)


def test_blocks_refuses_a_cut_that_does_not_exist():
    with pytest.raises(ValueError, match="3x5 mesh cannot be cut into 4"):
        blocks((3, 5), 4)


@pytest.mark.parametrize("size", list(itertools.product(range(1, 6), repeat=2)))
def test_ring_order_is_a_cycle_of_neighbours_where_there_is_one(size):
    shape = (size[0] + 1, size[1] + 2)  # a rectangle inside a larger mesh
    nodes = np.array([(x + 1) * shape[1] + y + 1 for x in range(size[0]) for y in range(size[1])])
    ring = ring_order(shape, nodes)
    assert sorted(ring) == sorted(nodes)
    steps = hop_counts(shape)[ring, np.roll(ring, -1)]
    assert (steps[:-1] == 1).all()
    if min(size) >= 2 and (size[0] % 2 == 0 or size[1] % 2 == 0):
        assert steps[-1] == 1
