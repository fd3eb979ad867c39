"""What must hold for every machine, plan and batch: symmetry, monotony and scaling."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import cases
from oracles import layer as oracle
from oracles.arrays import floats, full
from oracles.cases import congestion, mirrored_congestion
from oracles.topologies import NETWORKS, random_traffic, with_random_numbers

from jaxmoe.hardware.networks import link_ends
from jaxmoe.relax import HardMax

SHAPE, EXPERTS, TOKENS, TOP_K = (3, 4), 6, 10, 2
seeds = st.integers(0, 2**32 - 1)
layer = eqx.filter_jit(lambda model, share, batch: model(share, batch))
CHUNK = jnp.asarray(512.0)


@eqx.filter_jit
def stages(mesh, flows, size):
    """Times of a stage and of its mirror image, and the time of every link in the first."""
    there, back = congestion(mesh, flows, size, CHUNK), mirrored_congestion(mesh, flows, size, CHUNK)
    return jnp.stack([there.total(HardMax()), back.total(HardMax())]), there.link_time


def flip(axis: int) -> np.ndarray:
    """Where each node goes when the mesh is mirrored; its own inverse."""
    return np.flip(np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE), axis).ravel()


def flip_links(axis: int) -> np.ndarray:
    """Where each link goes."""
    ends = link_ends(SHAPE).tolist()
    node = flip(axis)
    return np.array([ends.index([int(node[a]), int(node[b])]) for a, b in ends])


def flip_machine(machine, axis):
    node, link = flip(axis), flip_links(axis)
    return dataclasses.replace(
        machine,
        link_bandwidth=machine.link_bandwidth[link],
        link_latency=machine.link_latency[link],
        flops=machine.flops[node],
        injection=machine.injection[node],
        ejection=machine.ejection[node],
    )


def random_messages(rng):
    return rng.integers(0, 4, (12, 12)) * (rng.random((12, 12)) < 0.4).astype(float)


@given(seeds, st.sampled_from([0, 1]))
def test_mirroring_mesh_and_messages_changes_no_stage(seed, axis):
    rng = np.random.default_rng(seed)
    machine, messages = cases.random_machine(rng, SHAPE, ports=True), random_messages(rng)
    size = jnp.asarray(8192.0)
    node = flip(axis)
    times, links = stages(machine.topology, cases.pair_flows(messages), size)
    mirrored = flip_machine(machine, axis).topology
    other_times, other_links = stages(mirrored, cases.pair_flows(messages[np.ix_(node, node)]), size)
    np.testing.assert_allclose(other_times, times, rtol=1e-5)
    np.testing.assert_allclose(other_links[flip_links(axis)], links, rtol=1e-5, atol=1e-12)


@given(seeds, st.sampled_from([0, 1]))
def test_mirroring_mesh_and_plan_changes_no_layer_that_gathers_at_fewest_hops(seed, axis):
    rng = np.random.default_rng(seed)
    machine = cases.random_machine(rng, SHAPE, ports=True)
    share = cases.random_share(rng, EXPERTS, 12)
    tokens = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K)
    for token in range(TOKENS):
        reached = {n for hosts in oracle.visited_nodes(share, tokens, token, "sharded") for n in hosts}
        # Of equally near nodes the lowest-numbered gathers, and numbers change in the mirror.
        tokens.weight[token] *= len(oracle.medoids(SHAPE, reached)) == 1
    assume(tokens.weight.any())
    batch, node = cases.batch(tokens), flip(axis)
    one = layer(cases.layer_model(machine, rule="fewest_hops"), floats(share), batch)
    other_model = cases.layer_model(flip_machine(machine, axis), rule="fewest_hops")
    other = layer(other_model, floats(share[:, node]), batch)
    for part in ("compute", "dispatch", "combine"):
        assert float(getattr(other, part)) == pytest.approx(float(getattr(one, part)), rel=1e-5)


@given(seeds)
def test_a_faster_link_or_node_never_takes_longer(seed):
    rng = np.random.default_rng(seed)
    machine = cases.random_machine(rng, SHAPE, ports=True)
    share = floats(cases.random_share(rng, EXPERTS, 12))
    batch = cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))
    before = float(layer(cases.layer_model(machine), share, batch).total)
    for field in ("link_bandwidth", "flops", "injection", "ejection"):
        values = getattr(machine, field).copy()
        values[rng.integers(values.size)] *= rng.uniform(1, 4)
        faster = dataclasses.replace(machine, **{field: values})
        assert float(layer(cases.layer_model(faster), share, batch).total) <= before * (1 + 1e-6)


@eqx.filter_jit
def totals(topology, traffic):
    return {name: model(topology)(topology, traffic).total(HardMax()) for name, model in cases.TIME_MODELS.items()}


@pytest.mark.parametrize("name", ["mesh", "yx_mesh", "torus", "spines", "detours"])
@given(seed=seeds, share=st.floats(0.05, 1))
def test_more_bandwidth_never_takes_longer_in_any_time_model(name, seed, share):
    """Whichever links or ports have more of it; and so with an ideal router."""
    rng = np.random.default_rng(seed)
    topology = with_random_numbers(NETWORKS[name], rng)
    traffic = jnp.asarray(random_traffic(rng, topology.num_nodes))
    faster = {"efficiency": full((), 1.0)}
    for field in ("link_bandwidth", "injection_bandwidth", "ejection_bandwidth"):
        values = np.asarray(getattr(topology, field))
        factor = np.where(rng.random(values.size) < share, rng.uniform(1, 4, values.size), 1)
        faster[field] = floats(values * factor)
    before = totals(topology, traffic)
    for changes in ({field: value} for field, value in faster.items()):
        for model, after in totals(dataclasses.replace(topology, **changes), traffic).items():
            assert float(after) <= float(before[model]) * (1 + 1e-6), model


@given(seeds, st.floats(0.1, 10))
def test_link_time_grows_with_bytes_and_falls_with_bandwidth(seed, factor):
    rng = np.random.default_rng(seed)
    machine, flows = cases.random_machine(rng, SHAPE), cases.pair_flows(random_messages(rng))
    mesh, size = machine.topology, jnp.asarray(8192.0)
    _, links = stages(mesh, flows, size)
    _, doubled = stages(mesh, flows, 2 * size)
    np.testing.assert_allclose(doubled, 2 * links, rtol=1e-5)
    faster = eqx.tree_at(lambda m: m.link_bandwidth, mesh, mesh.link_bandwidth * factor)
    _, scaled = stages(faster, flows, size)
    np.testing.assert_allclose(scaled, links / factor, rtol=1e-5)


@given(seeds)
def test_more_messages_never_take_less_time(seed):
    rng = np.random.default_rng(seed)
    mesh, messages = cases.random_machine(rng, SHAPE, ports=True).topology, random_messages(rng)
    more = messages + random_messages(rng)
    times, _ = stages(mesh, cases.pair_flows(messages), jnp.asarray(8192.0))
    longer, _ = stages(mesh, cases.pair_flows(more), jnp.asarray(8192.0))
    assert (np.asarray(longer) >= np.asarray(times) * (1 - 1e-5)).all()


@given(seeds)
def test_work_is_kept_whoever_does_it(seed):
    """With equal nodes, the node times of any plan add up to the time one node would need for all."""
    rng = np.random.default_rng(seed)
    machine = dataclasses.replace(cases.random_machine(rng, SHAPE, ports=True), flops=np.full(12, 1e12))
    tokens = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K)
    share = floats(cases.random_share(rng, EXPERTS, 12))
    for mode in ("sharded", "replicated"):
        measured = layer(cases.layer_model(machine, mode), share, cases.batch(tokens))
        expected = tokens.weight.sum() * TOP_K * cases.COSTS.flops_per_token_expert / 1e12
        assert float(jax.device_get(measured.node_time).sum()) == pytest.approx(expected, rel=1e-5)
