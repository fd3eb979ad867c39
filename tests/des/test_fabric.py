"""The network in the simulator's terms: paths with their ports, and paths that retrace each other."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

from jaxmoe.des import fabric_of
from jaxmoe.hardware import Mesh, clusters, ring, torus
from jaxmoe.hardware.networks import num_links


def mesh_of(shape, **numbers):
    links = num_links(shape)
    return Mesh(jnp.arange(1.0, links + 1), full(links, 0.5), shape=shape, **numbers)


@pytest.mark.parametrize(
    "topology",
    [mesh_of((2, 3)), mesh_of((1, 5)), torus((3, 4), 1.0, 0.0), ring(5, 1.0, 0.0), clusters(2, 3, 1.0, 0.0, 1.0, 0.0)],
)
def test_mirrored_paths_retrace_paths(topology):
    fabric, ends = fabric_of(topology, None), topology.link_ends.tolist()
    for source, destination in np.ndindex(fabric.num_nodes, fabric.num_nodes):
        forward = [tuple(ends[link]) for link in fabric.paths[source, destination]]
        backward = [tuple(ends[link]) for link in fabric.mirrored[destination, source]]
        assert backward == [(b, a) for a, b in reversed(forward)]
        assert fabric.hops[source, destination] == len(forward)


def test_ports_stand_at_both_ends_of_every_path():
    ports = {"injection_bandwidth": full(4, 3.0), "ejection_bandwidth": full(4, 5.0)}
    fabric = fabric_of(mesh_of((2, 2), endpoint_latency=7.0, efficiency=0.5, **ports), chunk_bytes=4.0)
    assert fabric.paths[1, 2][0] == 8 + 1
    assert fabric.paths[1, 2][-1] == 12 + 2
    assert fabric.mirrored[1, 2] == (8 + 1, *fabric.mirrored[1, 2][1:-1], 12 + 2)
    assert fabric.paths[1, 1] == ()
    np.testing.assert_array_equal(fabric.rate, [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, *[1.5] * 4, *[2.5] * 4])
    np.testing.assert_array_equal(fabric.latency, [*[0.5] * 8, *[0.0] * 4, *[7.0] * 4])


def test_latency_of_end_points_needs_no_limit_of_ports():
    fabric = fabric_of(eqx.tree_at(lambda m: m.endpoint_latency, mesh_of((2, 2)), jnp.asarray(7.0)), None)
    assert np.isinf(fabric.rate[8:]).all()
    assert fabric.paths[0, 3][-1] == 8 + 3
