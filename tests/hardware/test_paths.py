"""Networks of a user's own class: what follows from link_ends and paths, and what is refused."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.own_topologies import Dragonfly, PlainMesh

from jaxmoe.hardware import AbstractTopology, Mesh, TopologyError
from jaxmoe.hardware.networks import link_ends, mesh_link_order
from jaxmoe.network.loads import link_loads

LINE = ((0, 1), (1, 2), (1, 0), (2, 1))
PATHS = (((), (0,), (0, 1)), ((2,), (), (1,)), ((3, 2), (3,), ()))


class Given(AbstractTopology):
    """Links and paths as they are given."""

    ends: tuple = eqx.field(static=True, kw_only=True, default=LINE)
    ways: tuple = eqx.field(static=True, kw_only=True, default=PATHS)

    @property
    def link_ends(self):
        return np.array(self.ends)

    def paths(self):
        return self.ways


def given(**fields) -> Given:
    return Given.uniform(1.0, 0.0, **fields)


def test_all_of_a_line_follows_from_its_links_and_paths():
    line = given()
    assert (line.num_nodes, line.num_links) == (3, 4)
    assert line.reverse_links.tolist() == [2, 3, 0, 1]
    assert line.hops().link.tolist() == [0, 0, 1, 2, 1, 3, 2, 3]
    assert line.hops().pair.tolist() == [1, 2, 2, 3, 5, 6, 6, 7]
    assert line.hop_counts().tolist() == [[0, 1, 2], [1, 0, 1], [2, 1, 0]]
    assert line.corners.tolist() == [0, 1, 2]
    assert line.grid is None
    assert line.crossed() is None


def test_a_dragonfly_has_the_hops_of_its_levels():
    dragonfly = Dragonfly.uniform(1.0, 0.0, groups=4, routers=3, terminals=2)
    hops = dragonfly.hop_counts()
    assert (dragonfly.num_nodes, dragonfly.num_links) == (24, 2 * (24 + 4 * 3 + 6))
    assert len(dragonfly.positions()) == 24 + 12
    router, group = np.arange(24) // 2, np.arange(24) // 6
    for a, b in itertools.combinations(range(24), 2):
        if router[a] == router[b]:
            assert hops[a, b] == 2
        elif group[a] == group[b]:
            assert hops[a, b] == 3
        else:
            assert 3 <= hops[a, b] <= 5


def with_path(source: int, destination: int, path: tuple) -> tuple:
    rows = [list(row) for row in PATHS]
    rows[source][destination] = path
    return tuple(map(tuple, rows))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ends": LINE[:3]}, "there is a link from 1 to 2 but none back; add a link from 2 to 1"),
        ({"ends": (*LINE, (0, 1))}, "two links from 0 to 1; merge them"),
        ({"ends": (*LINE, (2, 2))}, "link 4 runs from 2 to 2; name two of the vertices 0..2"),
        ({"ends": (*LINE, (-1, 0))}, "link 4 runs from -1 to 0"),
        ({"ends": ((0.0, 1.0), (1.0, 0.0))}, r"link_ends is float64 \[2, 2\], expected a NumPy array of whole numbers"),
        ({"ends": (0, 1)}, r"link_ends is int64 \[2\]"),
        ({"ways": ()}, r"paths\(\) is empty"),
        ({"ways": PATHS[:2]}, r"paths\(\)\[0\] has 3 paths, expected one to each of 2 nodes"),
        ({"ways": with_path(0, 2, (0, 4))}, "path from 0 to 2 uses link 4, but links are 0..3"),
        ({"ways": with_path(0, 2, (-1,))}, "path from 0 to 2 uses link -1"),
        ({"ways": with_path(0, 2, (1, 0))}, "path from 0 to 2 takes link 1 from 1 to 2, but has come to 0"),
        ({"ways": with_path(0, 2, (0, 3))}, "path from 0 to 2 takes link 3 from 2 to 1, but has come to 1"),
        ({"ways": with_path(0, 2, (0,))}, "path from 0 to 2 stops at 1, after link 0"),
        ({"ways": with_path(0, 2, ())}, "path from 0 to 2 has no links; the network must be connected"),
        ({"ways": with_path(0, 0, (0, 2))}, "path from 0 to 0 passes vertex 0 twice"),
        ({"ways": with_path(0, 2, (0, 1, 3, 1))}, "path from 0 to 2 passes vertex [12] twice"),
    ],
)
def test_links_and_paths_that_make_no_network_are_refused(fields, message):
    with pytest.raises(TopologyError, match=message):
        given(**fields).hops()


def test_a_wrong_number_of_links_nodes_or_sides_is_refused():
    with pytest.raises(TopologyError, match="Given has 4 links, but 3 bandwidths; give one for each link"):
        Given(full(3, 1.0), full(4, 0.0)).hop_counts()
    with pytest.raises(TopologyError, match="Given has 4 links, but 5 latencies"):
        Given(full(4, 1.0), full(5, 0.0)).hop_counts()

    class Square(Given):
        grid = (2, 2)

    with pytest.raises(TopologyError, match="grid is 2x2, but there are 3 nodes and 4 links"):
        Square.uniform(1.0, 0.0).hops()

    class Bent(PlainMesh):
        grid = (3, 1)

        def paths(self):
            return [[(), (0, 2), (0,)], [(3, 1), (), (3,)], [(1,), (2,), ()]]

    with pytest.raises(TopologyError, match="grid is 3x1, but the link from 0 to 2 is not between neighbours"):
        Bent.uniform(1.0, 0.0, sides=(3, 1), ends=((0, 2), (2, 0), (2, 1), (1, 2))).hops()

    class Larger(Given):
        num_nodes = 4

    with pytest.raises(TopologyError, match=r"num_nodes is 4, but paths\(\) has 3 rows"):
        Larger.uniform(1.0, 0.0).hops()


def test_paths_that_ask_for_what_is_derived_from_them_are_refused():
    class Circular(Given):
        def paths(self):
            return [[()] * self.num_nodes] * self.num_nodes

    with pytest.raises(TopologyError, match="paths of Circular ask for what is derived from them; state its num_nodes"):
        Circular.uniform(1.0, 0.0).hops()


@pytest.mark.parametrize("read", [lambda values: values.shape, lambda values: values[0], np.asarray, float])
def test_paths_that_depend_on_numbers_are_refused(read):
    class Adaptive(Given):
        def paths(self):
            read(self.link_bandwidth)
            return self.ways

    with pytest.raises(TopologyError, match="depend on a number of their network; let them depend on static fields"):
        Adaptive.uniform(1.0, 0.0).hops()


def test_paths_are_worked_out_once_for_all_numbers_and_under_every_transformation():
    asked = []

    class Counted(Given):
        def paths(self):
            asked.append(self)
            return self.ways

    def loads(bandwidth, traffic):
        line = Counted(bandwidth, jnp.zeros(4))
        return link_loads(line, traffic) / line.link_rate + line.reversed().link_rate + line.hop_counts()[0, 2]

    many = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (5, 4)), jnp.float32)
    traffic = jnp.ones((3, 3))
    together = jax.jit(jax.vmap(loads, in_axes=(0, None)))(many, traffic)
    np.testing.assert_allclose(together, np.stack([loads(row, traffic) for row in many]), rtol=1e-6)
    slopes = jax.jacrev(loads)(many[0], traffic)
    assert np.isfinite(slopes).all()
    assert slopes.any()
    assert len(asked) == 1
    assert Counted(many[0], many[0], ways=tuple(PATHS)).num_nodes == 3
    assert len(asked) == 1


def test_a_mesh_by_its_paths_has_what_a_mesh_has():
    shape = (3, 4)
    order = np.random.default_rng(0).permutation(len(link_ends(shape)))
    mesh = Mesh.uniform(1.0, 0.0, shape=shape)
    plain = PlainMesh.uniform(1.0, 0.0, sides=shape, ends=tuple(map(tuple, mesh.link_ends[order].tolist())))
    number = mesh_link_order(shape, plain.link_ends)
    assert order[number].tolist() == list(range(mesh.num_links))
    np.testing.assert_array_equal(plain.hop_counts(), mesh.hop_counts())
    np.testing.assert_array_equal(number[mesh.reverse_links], plain.reverse_links[number])
    assert plain.corners.tolist() == mesh.corners.tolist()
    for one, other in ((plain, mesh), (plain.crossed(), mesh.crossed())):
        assert number[other.hops().link].tolist() == one.hops().link.tolist()
        assert other.hops().pair.tolist() == one.hops().pair.tolist()
