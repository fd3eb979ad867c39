"""The layer model against the loops, and against hand arithmetic."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import exchange as oracle
from oracles.arrays import floats, full
from oracles.layer import Tokens
from oracles.network import NumpyMachine

from jaxmoe.engine import Decisions
from jaxmoe.engine.demand import Work
from jaxmoe.hardware import Die, Machine, Mesh, node_memory
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import build_exchange

SHAPE, EXPERTS, TOKENS, TOP_K = (3, 4), 6, 10, 2
run = eqx.filter_jit(lambda model, *args: model(*args))


def check(machine, mode, rule, rng, num_tokens=TOKENS, costs=cases.COSTS):
    share = cases.random_share(rng, EXPERTS, machine.num_nodes)
    tokens = cases.random_tokens(rng, num_tokens, EXPERTS, TOP_K, missing=True)
    model = cases.layer_model(machine, mode, rule, costs)
    measured = run(model, floats(share), cases.batch(tokens))
    for name, value in oracle.layer(machine, share, tokens, costs, mode, rule).items():
        np.testing.assert_allclose(getattr(measured, name), value, rtol=2e-5, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", ["lowest_host", "fewest_hops"])
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_gathering_layer_equals_the_loops(mode, rule, seed):
    rng = np.random.default_rng(seed)
    check(cases.random_machine(rng, SHAPE), mode, rule, rng)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_layer_with_port_and_memory_limits_equals_the_loops(mode, seed):
    rng = np.random.default_rng(seed)
    check(cases.random_machine(rng, SHAPE, ports=True, memory=True), mode, "lowest_host", rng)


@pytest.mark.parametrize("rings", ["ring", "rings_1x2_alone", "rings_3x2_alone", "rings_3x4_alone", "rings_3x2"])
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_layer_with_rings_equals_the_loops(mode, rings):
    rng = np.random.default_rng(len(rings))
    check(cases.random_machine(rng, SHAPE, ports=True), mode, rings, rng)


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_layer_with_fewer_tokens_than_ring_nodes_equals_the_loops(mode):
    # Messages are smaller than a vector and than a chunk, and the last step of a ring of 3 x 3 takes four hops.
    rng = np.random.default_rng(1)
    machine = cases.random_machine(rng, (3, 3))
    costs = dataclasses.replace(cases.COSTS, chunk_bytes=4096.0)
    check(machine, mode, "ring", rng, num_tokens=1, costs=costs)


EQUAL = dataclasses.replace(cases.COSTS, dispatch_bytes=8192.0)  # as many bytes as in combine


def plain_machine(shape=(2, 2), bandwidth=1e9, latency=1e-6, flops=1e12) -> NumpyMachine:
    links, nodes = num_links(shape), shape[0] * shape[1]
    return NumpyMachine(shape, np.full(links, bandwidth), np.full(links, latency), np.full(nodes, flops))


def test_tensor_parallelism_by_hand():
    # Each of 4 nodes sends a quarter of 8 vectors of 8192 B, three times over, at 1 GB/s; every step also takes 1 us.
    tokens = cases.random_tokens(np.random.default_rng(0), 8, EXPERTS, TOP_K)
    tokens.weight[:] = 1
    share = full((EXPERTS, 4), 0.25)
    model = cases.layer_model(plain_machine(), costs=EQUAL)
    measured = run(model, share, cases.batch(tokens), build_exchange("ring", model.machine.topology))
    stage = 3 * (8 / 4 * 8192 / 1e9 + 1e-6)
    assert float(measured.dispatch) == pytest.approx(stage, rel=1e-5)
    assert float(measured.combine) == pytest.approx(stage, rel=1e-5)
    # 16 token-expert products of 5 MFLOP, a quarter on each node of 1 TFLOP/s.
    assert float(measured.compute) == pytest.approx(16 * 5e6 / 4 / 1e12, rel=1e-5)
    assert float(measured.total) == pytest.approx(2 * stage + 20e-6, rel=1e-5)


def test_one_token_of_two_experts_by_hand():
    # Experts 0 and 1 live whole on nodes 0 and 3 of a 2x2 mesh. The token gathers at node 3: one vector takes
    # two hops back and forth, and a chunk of 512 B is received whole on one of the two links.
    tokens = Tokens(np.array([[0, 1]]), np.array([0.5]), np.array([[0.5, 0.5]]), np.array([1.0]))
    share = jnp.asarray(np.eye(4)[[0, 3]], jnp.float32)
    measured = run(cases.layer_model(plain_machine(), costs=EQUAL), share, cases.batch(tokens))
    stage = 8192 / 1e9 + 2e-6 + 512 / 1e9
    assert float(measured.total) == pytest.approx(2 * stage + 5e6 / 1e12, rel=1e-5)
    assert float(measured.combine_link_time.sum()) == pytest.approx(2 * 8192 / 1e9, rel=1e-5)


def test_local_tokens_need_no_communication():
    tokens = Tokens(np.array([[0, 1]]), np.array([0]), np.array([[0.5, 0.5]]), np.array([4.0]))
    share = jnp.asarray(np.eye(4)[[2, 2]], jnp.float32)
    measured = run(cases.layer_model(plain_machine()), share, cases.batch(tokens))
    assert float(measured.dispatch) == float(measured.combine) == 0
    assert float(measured.total) == pytest.approx(8 * 5e6 / 1e12, rel=1e-6)


def test_memory_bound_node_by_hand():
    machine = plain_machine()
    machine.memory_bandwidth = np.full(4, 1e9)
    tokens = Tokens(np.array([[0, 1]]), np.array([0]), np.array([[0.5, 0.5]]), np.array([2.0]))
    share = jnp.asarray([[0.75, 0.25, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]], jnp.float32)
    measured = run(cases.layer_model(machine, costs=EQUAL), share, cases.batch(tokens))
    # Node 1 reads 1.25 experts of 3 MB (expert 2 is not used) and 2 vectors in and out.
    assert float(measured.node_time[1]) == pytest.approx((1.25 * 3e6 + 2 * 2 * 8192) / 1e9, rel=1e-5)


def test_dies_that_do_not_overlap_add_up_by_hand():
    """300 GFLOP at 1 GFLOP/s, and 3 kB of weights and 8 B of vectors at 1 kB/s."""
    level = node_memory(full(1, 1e3))
    work = Work(full(1, 300e9), full(1, 3e3), full(1, 8.0))
    for overlap, expected in ((True, 300.0), (False, 303.008)):
        die = Die(full(1, 1e9), overlap=overlap)
        lone = Machine(Mesh(full(0, 0.0), full(0, 0.0), shape=(1, 1)), die, level)
        busy = work.busy(lone)
        assert float(busy["node"][0]) == pytest.approx(expected, rel=1e-5)
        assert float(busy["compute"][0]) == 300.0


def test_choices_served_elsewhere_by_hand():
    # Three tokens choose expert 0, which lives on node 1, and expert 1, on node 2 of a 2x2 mesh. The second is served
    # at node 1 for one token and at node 3 for another. Tokens meet where the first choice is computed: at node 1.
    machine = plain_machine()
    machine.memory_bandwidth = np.full(4, 1e9)
    tokens = Tokens(np.array([[0, 1]] * 3), np.zeros(3), np.zeros((3, 2)), np.ones(3))
    decisions = Decisions(jnp.asarray(np.eye(4)[[1, 2]], jnp.float32), served=jnp.asarray([[-1, 1], [-1, -1], [-1, 3]]))
    model = cases.layer_model(machine, costs=EQUAL)
    measured = eqx.filter_jit(lambda model, *args: model.time(*args))(model, decisions, cases.batch(tokens))
    # From 2 to 1 over node 3 by XY: (1, 0) to (0, 0) to (0, 1). One more vector goes from 3 over its own link.
    stage = 8192 / 1e9 + 2e-6 + 512 / 1e9
    assert float(measured.combine) == pytest.approx(stage, rel=1e-5)
    # Node 1 reads both experts and 3 tokens, node 2 an expert and one token, node 3 likewise.
    moved = np.array([0, 2 * 3e6 + 3 * 2 * 8192, 3e6 + 2 * 8192, 3e6 + 2 * 8192])
    np.testing.assert_allclose(measured.node_time, moved / 1e9, rtol=1e-5)
    assert float(measured.total) == pytest.approx(2 * stage + moved[1] / 1e9, rel=1e-5)
