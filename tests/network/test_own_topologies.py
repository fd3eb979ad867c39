"""A layer on networks by their links and paths alone: a mesh equals the mesh, a dragonfly is borne out."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats, full
from oracles.cases import random_share, random_tokens
from oracles.exchange import names_of
from oracles.own_topologies import Dragonfly, PlainMesh
from oracles.topologies import with_random_numbers

from jaxmoe.des import LayerDescription, fabric_of, replay_layer
from jaxmoe.engine import Layer, LayerTime
from jaxmoe.hardware import AbstractTopology, Die, Machine, Mesh, Router, clusters
from jaxmoe.network import build_exchange
from jaxmoe.network.contention import Contention, passages_of
from jaxmoe.network.loads import flow_loads, link_loads, path_maxima, path_sums, tree_loads
from jaxmoe.placement.exchange import exchange_of
from jaxmoe.traces import Batch

SHAPE, EXPERTS = (2, 4), 6


def pair_of_meshes(rng: np.random.Generator) -> tuple[Mesh, PlainMesh]:
    """A mesh with random numbers, and the same by its paths."""
    mesh = with_random_numbers(Mesh.uniform(1.0, 0.0, shape=SHAPE), rng)
    ends = tuple(map(tuple, mesh.link_ends.tolist()))
    own = {field.name: getattr(mesh, field.name) for field in dataclasses.fields(AbstractTopology)}
    return mesh, PlainMesh(**own, sides=SHAPE, ends=ends)


def test_sums_along_paths_equal_those_by_prefix_sums():
    rng = np.random.default_rng(0)
    traffic, source = floats(rng.random((8, 8))), floats(rng.integers(0, 2, (5, 8)))
    home, weight, per_link = jnp.asarray(rng.integers(8, size=5)), floats(rng.random(5)), floats(rng.random(20))

    def all_of(topology):
        trees = tree_loads(topology, source, home, weight)
        values = path_sums(topology, per_link), path_maxima(topology, per_link)
        return link_loads(topology, traffic), flow_loads(topology, source, home), trees, *values

    for ways in (lambda topology: topology, lambda topology: topology.crossed()):
        mesh, plain = map(ways, pair_of_meshes(rng))
        for one, other in zip(all_of(mesh), all_of(plain), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@eqx.filter_jit
def timed(model: Layer, share: jax.Array, batch: Batch) -> LayerTime:
    return model(share, batch)


FEW = ("fewest_hops", "random_host_tree", "least_loaded_split_tree", "reduce_scatter", "rings_2x2", "ring_both_ways")
EVERY = (*FEW, *(name for name in names_of(Mesh.uniform(1.0, 0.0, shape=SHAPE)) if name not in FEW))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in EVERY])
def test_a_layer_on_a_mesh_by_its_paths_equals_that_on_the_mesh(name):
    rng = np.random.default_rng(1)
    share, tokens = floats(random_share(rng, EXPERTS, 8)), cases.batch(random_tokens(rng, 20, EXPERTS, 2))
    tokens = dataclasses.replace(tokens, weight=full(20, 1.0))
    seen = []
    for topology in pair_of_meshes(rng):
        model = cases.model_on(Machine(topology, Die(full(8, 1e12))), "sharded", name)
        described = LayerDescription(
            fabric_of(topology, 512.0), np.full(8, 1e12), 4200.0, 8192.0, 3e6, 5e6, "sharded", exchange_of(name)
        )
        seen.append((timed(model, share, tokens), replay_layer(described, np.asarray(share), tokens)))
    (told, replay), (own, own_replay) = seen
    for one, other in zip(*map(jax.tree.leaves, (told, own)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert own_replay.stages == replay.stages
    assert own_replay.total_s == replay.total_s


def dragonfly(rng: np.random.Generator) -> Dragonfly:
    """16 nodes whose links differ; those between groups are the faster."""
    topology = Dragonfly.uniform(1.0, 0.0, groups=4, routers=2, terminals=2)
    links = topology.num_links
    return eqx.tree_at(
        lambda t: (t.link_bandwidth, t.link_latency),
        topology,
        (floats(rng.uniform(40e9, 60e9, links)), floats(rng.uniform(5e-9, 10e-9, links))),
    )


# Messages that all nodes send one home, or one group, at a time wait for each other; the model leaves that out behind
# switches. So no token_home, and no messages between groups.
ROUTES = ("lowest_host", "fewest_hops", "least_loaded", "fewest_hops_tree", "reduce_scatter", "ring_both_ways")
BORNE_OUT = (*ROUTES, "rings_4_alone")


@pytest.mark.parametrize("name", BORNE_OUT)
def test_a_dragonfly_is_borne_out(name):
    rng = np.random.default_rng(7)
    topology, nodes, tokens = dragonfly(rng), 16, 256
    share = random_share(rng, 8, nodes)
    flops = rng.uniform(1e12, 5e12, nodes)
    batch = Batch(
        experts=jnp.asarray(np.stack([rng.choice(8, 2, replace=False) for _ in range(tokens)]), jnp.int32),
        token_draw=floats((rng.integers(2, size=tokens) + 0.5) / 2),
        draw=floats(rng.random((tokens, 2))),
        weight=full(tokens, 1.0),
    )
    costs = dataclasses.replace(cases.COSTS, combine_bytes=16384.0, dispatch_bytes=16384.0, chunk_bytes=256.0)
    model = cases.model_on(Machine(topology, Die(floats(flops))), "sharded", name, costs)
    layer = LayerDescription(
        fabric_of(topology, costs.chunk_bytes),
        flops,
        costs.dispatch_bytes,
        costs.combine_bytes,
        costs.expert_bytes,
        costs.flops_per_token_expert,
        "sharded",
        exchange_of(name),
    )
    told, seen = timed(model, floats(share), batch), replay_layer(layer, share, batch)
    np.testing.assert_allclose(told.dispatch_link_time, seen.link_busy["dispatch"], rtol=1e-5)
    np.testing.assert_allclose(told.combine_link_time, seen.link_busy["combine"], rtol=1e-5)
    for stage in ("dispatch", "combine"):
        np.testing.assert_allclose(told.stages[stage], seen.stages[stage], rtol=0.02)
    np.testing.assert_allclose(told.total, seen.total_s, rtol=0.02)


def test_a_dragonfly_with_one_router_a_group_is_a_cluster_with_links_between_all():
    """Two groups of one router: the path of two clusters without their spine."""
    own = Dragonfly.uniform(2.0, 0.5, groups=2, routers=1, terminals=3)
    other = clusters(2, 3, 2.0, 0.25, 2.0, 0.25)
    hops = np.asarray(other.hop_counts())
    np.testing.assert_array_equal(own.hop_counts(), hops - (hops > 2))
    traffic = jnp.ones((6, 6))
    assert link_loads(own, traffic).max() == link_loads(other, traffic).max() == 9


@pytest.mark.parametrize("order", ["shuffled", "staggered", "by_destination"])
def test_contention_on_a_mesh_by_its_paths_equals_that_on_the_mesh(order):
    rng = np.random.default_rng(3)
    traffic, router = floats(rng.uniform(1e5, 1e6, (8, 8))), Router(4.0, 8.0, 32.0, internal_speedup=2.0)
    seen = []
    for topology in pair_of_meshes(rng):
        own = dataclasses.replace(topology, router=router)
        ways = [passages_of(own, order, back) for back in (False, True)]
        model = Contention(jnp.asarray(512.0), order=order, ways=ways[0], ways_back=ways[1])
        seen.append((model(own, traffic), model.mirrored(own, traffic)))
    for one, other in zip(*map(jax.tree.leaves, seen), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_many_dragonflies_at_once_equal_one_by_one():
    topology = dragonfly(np.random.default_rng(0))
    rng = np.random.default_rng(2)
    share, batch = floats(random_share(rng, EXPERTS, 16)), cases.batch(random_tokens(rng, 20, EXPERTS, 2))
    exchange = build_exchange("fewest_hops_tree", topology)

    def seconds(bandwidth, injection):
        fields = {"link_bandwidth": bandwidth, "injection_bandwidth": injection}
        own = dataclasses.replace(topology, **fields)
        model = cases.model_on(Machine(own, Die(full(16, 1e12))))
        return dataclasses.replace(model, exchange=exchange)(share, batch).total

    numbers = floats(rng.uniform(1e9, 2e9, (3, topology.num_links))), floats(rng.uniform(1e9, 2e9, (3, 16)))
    together = jax.jit(jax.vmap(seconds))(*numbers)
    np.testing.assert_allclose(together, [jax.jit(seconds)(*each) for each in zip(*numbers, strict=True)], rtol=1e-6)
    slopes = jax.jit(jax.grad(seconds, argnums=(0, 1)))(*(each[0] for each in numbers))
    assert all((each <= 0).all() and (each < 0).any() for each in slopes)
