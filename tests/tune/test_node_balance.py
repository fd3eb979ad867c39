"""Node balance against hand work and enumeration."""

import itertools
import os
import signal
import threading
import time

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problem import EXPERTS, LAYERS, NODES, TOKENS, TOP_K, small_problem

from jaxmoe.engine import Layer, LayerCosts
from jaxmoe.hardware import Die, Machine, Mesh, node_memory
from jaxmoe.network import Congestion, GatherExchange
from jaxmoe.placement import PlanError
from jaxmoe.placement.rounding import rebalance
from jaxmoe.traces import GatingTrace
from jaxmoe.tune import PlacementProblem, node_balance
from jaxmoe.tune.node_balance import NodeBalance
from jaxmoe.tune.settings import StopSwitch

balance = node_balance.node_balance


def tiny_problem(
    choices: list[int], flops: list[float], room: float = np.inf, bandwidth: float = 1.0
) -> PlacementProblem:
    """Nodes in a row and tokens with one expert each: 1 B a message, 1 FLOP a token, an expert is 1 B.

    A batch is as many tokens as `choices`, which names the experts of the trace in turn.
    """
    nodes, links = len(flops), 2 * (len(flops) - 1)
    mesh = Mesh(jnp.full(links, bandwidth), jnp.zeros(links), shape=(1, nodes))
    capacity = jnp.full(nodes, room) if np.isfinite(room) else None
    model = Layer(
        Machine(mesh, Die(jnp.asarray(flops, float)), node_memory(None, capacity)),
        LayerCosts(*(jnp.asarray(1.0) for _ in range(6))),
        time_model=Congestion(jnp.asarray(1.0)),
        exchange=GatherExchange(),
        mode="sharded",
    )
    trace = GatingTrace(
        experts=np.array(choices, np.int16)[:, None, None],
        num_experts=max(choices) + 1,
        layer_ids=np.array([0]),
        seq_start=np.array([0]),
        is_repeat=None,
        facts={},
    )
    return PlacementProblem(model, trace, len(choices))


def objective(problem: PlacementProblem, share: np.ndarray, gamma: float, layer: int = 0) -> float:
    """Eq. 12 of a plan in plain loops."""
    model, frequency = problem.model, problem.frequency[layer]
    choices = problem.batch_tokens * problem.trace.top_k
    rates, bandwidth = np.asarray(model.machine.die.flops), float(model.machine.topology.link_bandwidth.mean())
    compute, volume = np.zeros(share.shape[1]), np.zeros(share.shape[1])
    for expert, node in itertools.product(*map(range, share.shape)):
        flops = choices * frequency[expert] * share[expert, node] * float(model.costs.flops_per_token_expert)
        compute[node] += flops / rates[node]
        if share[expert, node] > 0:
            volume[node] += choices * frequency[expert] * float(model.costs.combine_bytes)
    return float(max(compute) + 2 * gamma * max(volume) / bandwidth)


def enumerated(problem: PlacementProblem, gamma: float) -> float:
    """The least objective over all sets of hosts; with hosts given, the division is a linear programme."""
    experts, nodes = problem.frequency.shape[1], problem.num_nodes
    sets = [set_ for set_ in itertools.product([False, True], repeat=nodes) if any(set_)]
    seconds = 1 / np.asarray(problem.model.machine.die.flops, float)
    found = []
    for hosts in itertools.product(sets, repeat=experts):
        try:
            share = rebalance(np.array(hosts), problem.frequency[:1], seconds, problem.room)
        except PlanError:
            continue
        found.append(objective(problem, share, gamma))
    return min(found)


def assert_legal(found: NodeBalance, problem: PlacementProblem, gamma: float, layer: int = 0) -> None:
    assert found.share.shape == (problem.frequency.shape[1], problem.num_nodes)
    assert (found.share >= 0).all()
    np.testing.assert_allclose(found.share.sum(axis=1), 1, rtol=1e-9)
    assert (found.share.sum(axis=0) <= problem.room * (1 + 1e-5)).all()
    assert found.seconds == pytest.approx(objective(problem, found.share, gamma, layer), rel=1e-5)
    assert found.bound <= found.seconds
    assert found.gap == pytest.approx((found.seconds - found.bound) / found.seconds)


@pytest.mark.parametrize(
    ("gamma", "hosts", "seconds"),
    [
        # Whole experts: 6 tokens on the slower node, 6 messages. Even work: 4 each, but expert 0 on both nodes and
        # so 6 + 2 messages on one of them. Apart costs 6 + 12 gamma, together 4 + 16 gamma: alike at gamma = 0.5.
        (0.1, 3, 4 + 0.2 * 8),
        (2.0, 2, 6 + 4.0 * 6),
    ],
)
def test_two_experts_on_two_nodes_by_hand(gamma, hosts, seconds):
    problem = tiny_problem([0] * 6 + [1] * 2, [1.0, 1.0])
    found = balance(problem, 0, gamma)
    assert_legal(found, problem, gamma)
    assert found.status == "optimal"
    assert not found.relaxed
    assert (found.share > 0).sum() == hosts
    assert found.seconds == pytest.approx(seconds, rel=1e-5)
    assert found.bound == pytest.approx(seconds, rel=0.012)


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
    st.sampled_from([(3, [1.0, 1.0]), (3, [1.0, 3.0]), (2, [1.0, 1.0, 1.0]), (2, [1.0, 2.0, 3.0])]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.sampled_from([np.inf, 1.6]),
)
def test_the_optimum_is_that_of_enumeration(counts, machine, gamma, room):
    experts, flops = machine
    problem = tiny_problem(np.repeat(range(experts), counts[:experts]).tolist(), flops, room, bandwidth=2.0)
    found = balance(problem, 0, gamma)
    least = enumerated(problem, gamma)
    assert_legal(found, problem, gamma)
    # Ties and the solver's own tolerance are about a percent.
    assert least * (1 - 1e-5) <= found.seconds <= least * 1.012
    assert found.bound <= least * (1 + 1e-5)
    relaxed = balance(problem, 0, gamma, relaxed=True)
    assert_legal(relaxed, problem, gamma)
    assert relaxed.relaxed
    assert relaxed.bound <= least * (1 + 1e-5)


@pytest.mark.parametrize("room", [1.6, [0.5, 1.0, 1.5, 3.25], np.inf])
@pytest.mark.parametrize("relaxed", [False, True])
def test_no_node_is_filled_beyond_its_room(room, relaxed):
    problem = small_problem(room=np.array(room))
    for layer in range(LAYERS):
        assert_legal(balance(problem, layer, 1.0, 1.0, relaxed=relaxed), problem, 1.0, layer)


def test_the_relaxed_bound_is_below_the_incumbent_and_the_incumbent_below_the_relaxed_plan():
    problem = small_problem()
    whole, relaxed = (balance(problem, 0, 1.0, 5.0, relaxed=relaxed) for relaxed in (False, True))
    assert relaxed.bound <= whole.seconds <= relaxed.seconds * 1.011
    assert relaxed.wall_s < 5


def test_more_gamma_means_fewer_messages():
    problem = small_problem()
    cheap, dear = (balance(problem, 0, gamma, 5.0).share for gamma in (0.01, 100.0))

    def volume(share):
        return (problem.frequency[0] @ (share > 0)).max()

    assert volume(dear) < volume(cheap)
    assert (problem.frequency[0] @ dear).max() > (problem.frequency[0] @ cheap).max()


def test_links_so_fast_that_eq_9_admits_no_plan_known_leave_the_known_one():
    # Memory keeps work uneven, and tensor parallelism would cost next to nothing.
    problem = tiny_problem([0] * 9 + [1], [1.0, 1.0], room=1.05, bandwidth=1e6)
    found = balance(problem, 0, 1.0)
    assert_legal(found, problem, 1.0)
    assert found.status == "optimal"


def hard_problem() -> PlacementProblem:
    """One that takes HiGHS far longer than a test."""
    counts = np.random.default_rng(0).integers(20, 60, 8)
    return tiny_problem(np.repeat(range(8), counts).tolist(), [1.0] * 32, bandwidth=10.0)


def test_the_time_limit_is_kept_and_the_bound_told():
    found = balance(hard_problem(), 0, 1.0, time_limit_s=1.0)
    assert found.status == "time limit"
    assert found.wall_s < 3
    assert found.gap > 0.001
    assert_legal(found, hard_problem(), 1.0)


def test_ctrl_c_ends_it_within_a_second_with_a_legal_plan():
    problem, struck, parts = hard_problem(), [], []

    def strike():
        struck.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    with StopSwitch() as stop:
        threading.Timer(0.5, strike).start()
        found = balance(problem, 0, 1.0, time_limit_s=4.0, stop=stop, report=parts.append)
    assert time.perf_counter() - struck[0] < 1
    assert found.status == "interrupted"
    assert found.relaxed
    assert len(parts) > 3
    assert parts == sorted(parts)
    assert 0 <= parts[0] < parts[-2] < 0.5
    assert parts[-1] == 1
    assert_legal(found, problem, 1.0)


def test_after_the_stop_nothing_is_solved():
    problem = hard_problem()
    with StopSwitch(time_limit_s=1e-9) as stop:
        found = balance(problem, 0, 1.0, stop=stop)
    assert found.status == "time limit"
    assert found.wall_s < 1
    assert found.relaxed
    assert_legal(found, problem, 1.0)


def test_the_numbers_are_those_of_the_problem():
    problem = small_problem()
    found = balance(problem, 1, 0.5, 2.0)
    work = TOKENS * TOP_K * float(problem.model.costs.flops_per_token_expert)
    even = work / float(np.sum(problem.model.machine.die.flops))
    assert found.seconds > even
    doubled = eqx.tree_at(lambda model: model.costs.combine_bytes, problem.model, problem.model.costs.combine_bytes * 2)
    same = balance(PlacementProblem(doubled, problem.trace, TOKENS), 1, 0.25, 2.0)
    assert same.seconds == pytest.approx(found.seconds, rel=0.02)  # gamma and bytes come as a product
    assert found.share.shape == (EXPERTS, NODES)
