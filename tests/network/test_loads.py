"""Link loads and path values of every network, against walking its paths."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import paths as oracle
from oracles.arrays import full
from oracles.own_topologies import Dragonfly
from oracles.topologies import NETWORKS, mesh, random_graph, random_traffic

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.flows import Flows
from jaxmoe.network.loads import flow_loads, link_loads, path_maxima, path_sums, round_loads

seeds = st.integers(0, 2**32 - 1)
loads_of = jax.jit(link_loads)
every_network = pytest.mark.parametrize("topology", NETWORKS.values(), ids=NETWORKS.keys())


@eqx.filter_jit
def measured(topology, traffic, per_link, source, destination):
    return (
        link_loads(topology, traffic),
        path_sums(topology, per_link),
        path_maxima(topology, per_link),
        flow_loads(topology, source, destination),
    )


def check_against_walks(topology: AbstractTopology, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, flows = topology.num_nodes, 3
    traffic = random_traffic(rng, nodes)
    per_link = rng.random(topology.num_links).astype(np.float32)
    source = rng.integers(0, 4, (flows, nodes)).astype(np.float32)
    destination = rng.dirichlet(np.ones(nodes), flows).astype(np.float32)
    loads, sums, maxima, loads_of_flows = measured(
        topology, *map(jnp.asarray, (traffic, per_link, source, destination))
    )
    np.testing.assert_allclose(loads, oracle.link_loads(topology, traffic), rtol=1e-5, atol=1)
    np.testing.assert_allclose(sums, oracle.path_values(topology, per_link, sum), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(maxima, oracle.path_values(topology, per_link, max), rtol=1e-6)
    expected = oracle.link_loads(topology, source.T @ destination)
    np.testing.assert_allclose(loads_of_flows, expected, rtol=1e-5, atol=1e-5)


@every_network
@settings(max_examples=10)
@given(seed=seeds)
def test_every_network_agrees_with_walking_its_paths(topology, seed):
    check_against_walks(topology, seed)


@pytest.mark.parametrize(("shape", "routing"), [((1, 23), "xy"), ((9, 5), "yx"), ((5, 9), "xy"), ((8, 1), "yx")])
def test_long_lines_agree_with_walking_their_paths(shape, routing):
    check_against_walks(mesh(shape, routing=routing), seed=shape[0])


@pytest.mark.parametrize("seed", range(5))
def test_any_graph_agrees_with_walking_its_paths(seed):
    check_against_walks(random_graph(np.random.default_rng(seed)), seed)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 2), (3, 3)])
def test_a_yx_mesh_of_any_shape_agrees_with_walking_its_paths(shape):
    check_against_walks(mesh(shape, routing="yx"), 0)


@every_network
@settings(max_examples=10)
@given(seed=seeds)
def test_loads_sum_to_bytes_times_hops(topology, seed):
    traffic = random_traffic(np.random.default_rng(seed), topology.num_nodes)
    loads = loads_of(topology, jnp.asarray(traffic))
    np.testing.assert_allclose(np.asarray(loads).sum(), (traffic * np.asarray(topology.hop_counts())).sum(), rtol=1e-5)


@every_network
def test_traffic_of_a_node_to_itself_is_free(topology):
    assert (np.asarray(loads_of(topology, np.eye(topology.num_nodes, dtype=np.float32))) == 0).all()


@every_network
def test_many_traffics_at_once_equal_one_by_one(topology):
    rng = np.random.default_rng(0)
    traffic = jnp.asarray(np.stack([random_traffic(rng, topology.num_nodes) for _ in range(3)]))
    together = jax.jit(jax.vmap(link_loads, in_axes=(None, 0)))(topology, traffic)
    np.testing.assert_allclose(
        together, np.stack([loads_of(topology, row) for row in np.asarray(traffic)]), rtol=1e-6, atol=1
    )


def test_a_class_may_have_a_rule_of_its_own():
    class Bus(Dragonfly):
        pass

    bus = Bus.uniform(1.0, 0.0, groups=2, routers=1, terminals=1)
    link_loads.register(Bus, lambda topology, traffic: jnp.full(topology.num_links, traffic.sum()))
    assert (link_loads(bus, full((2, 2), 1.0)) == 4).all()


def test_trees_without_weights_are_refused():
    lone = Flows(full((1, 4), 1.0), jnp.zeros(1, jnp.int32), full((), 1.0), route="tree")
    with pytest.raises(ValueError, match="route tree have no weight; give each tree"):
        round_loads(mesh((2, 2)), lone)
