"""The usual placements, worked by hand where they are small."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxmoe.hardware import Mesh, ring
from jaxmoe.hardware.networks import num_links
from jaxmoe.placement import (
    Placement,
    PlanError,
    expert_parallel_balanced,
    expert_parallel_random,
    hybrid,
    tensor_parallel,
)
from jaxmoe.placement.strategies import expert_parallel, filled_in_order, in_groups, replicated_by_load
from jaxmoe.traces import read_trace


def hosts(share: np.ndarray) -> list[list[int]]:
    """The node of every expert, of shares that are whole."""
    assert set(np.unique(share)) <= {0, 1}
    return share.argmax(axis=2).tolist()


def is_legal(share: np.ndarray, shape: tuple[int, int]) -> bool:
    assert share.dtype == np.float32
    Placement(share, shape, "sharded", tuple(range(len(share))))  # rows that do not sum to 1 are refused
    return True


def test_tensor_parallel_is_even():
    share = tensor_parallel(2, 3, 6)
    assert is_legal(share, (2, 3))
    np.testing.assert_allclose(share, np.full((2, 3, 6), 1 / 6), rtol=1e-7)


@pytest.mark.parametrize(("experts", "nodes"), [(8, 3), (64, 32), (3, 8), (5, 5), (1, 1)])
def test_random_counts_are_as_equal_as_possible(experts, nodes):
    share = expert_parallel_random(4, experts, nodes, seed=0)
    assert is_legal(share, (1, nodes))
    counts = share.sum(axis=1)
    assert set(np.unique(counts)) <= {experts // nodes, -(-experts // nodes)}


def test_random_layers_differ_and_seeds_repeat():
    share = expert_parallel_random(6, 16, 4, seed=3)
    np.testing.assert_array_equal(share, expert_parallel_random(6, 16, 4, seed=3))
    assert (share != expert_parallel_random(6, 16, 4, seed=4)).any()
    assert len({str(layer) for layer in hosts(share)}) == 6


def test_random_is_uniform():
    # Every expert is on every node in about a quarter of 4000 layers: the standard deviation is 0.007.
    np.testing.assert_allclose(expert_parallel_random(4000, 6, 4, seed=0).mean(axis=0), 0.25, atol=0.035)


def test_balanced_by_hand():
    # Order 9 (e3), 7 (e0), 6 (e4), 5 (e1), 2 (e2) on two nodes; work of (node 0, node 1) after each:
    # e3 -> 0 (9, 0); e0 -> 1 (9, 7); e4 -> 1 (9, 13); e1 -> 0 (14, 13); e2 -> 1 (14, 15).
    share = expert_parallel_balanced(np.array([[7.0, 5, 2, 9, 6]]), 2)
    assert hosts(share) == [[1, 0, 1, 0, 1]]
    assert is_legal(share, (1, 2))


def test_ties_go_to_fewer_experts_then_to_the_lower_node():
    # All equal: expert by expert, round and round.
    assert hosts(expert_parallel_balanced(np.ones((1, 5)), 3)) == [[0, 1, 2, 0, 1]]
    # 4 -> 0, 2 -> 1, 2 -> 1; both have 4 now, node 0 with fewer experts takes the 1, node 1 the next 1.
    assert hosts(expert_parallel_balanced(np.array([[4, 2, 2, 1, 1]]), 2)) == [[0, 1, 1, 0, 1]]


def test_layers_are_balanced_each_for_itself():
    frequency = np.array([[3, 1, 1, 1], [1, 1, 1, 3]])
    # Layer 0: 3 -> 0, then three 1s -> node 1. Layer 1: e3 -> 0, the others -> node 1.
    assert hosts(expert_parallel_balanced(frequency, 2)) == [[0, 1, 1, 1], [1, 1, 1, 0]]


def test_fewer_experts_than_nodes_get_nodes_of_their_own():
    assert hosts(expert_parallel_balanced(np.array([[1, 3, 2]]), 5)) == [[2, 0, 1]]


frequencies = arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 24)), elements=st.floats(0, 100))


@given(frequencies, st.integers(1, 9))
def test_balance_keeps_its_bounds(frequency, nodes):
    share = expert_parallel_balanced(frequency, nodes)
    assert is_legal(share, (1, nodes))
    work = np.einsum("le,len->ln", frequency, share).max(axis=1)
    mean, largest = frequency.sum(axis=1) / nodes, frequency.max(axis=1)
    slack = 1 + 1e-5
    # The node that ends fullest was the idlest, so at most at the mean of the others, before its last expert.
    assert (work <= (mean + (1 - 1 / nodes) * largest) * slack).all()


def best_makespan(frequency: np.ndarray, nodes: int) -> float:
    """The least largest work over all assignments, tried one by one."""
    assignments = np.stack(np.meshgrid(*[np.arange(nodes)] * frequency.size), -1).reshape(-1, frequency.size)
    work = (assignments[..., None] == np.arange(nodes)).transpose(0, 2, 1) @ frequency
    return float(work.max(axis=1).min())


@pytest.mark.parametrize("nodes", [2, 3])
def test_balance_is_within_grahams_ratio_of_the_best(nodes):
    rng = np.random.default_rng(nodes)
    frequency = rng.integers(1, 30, (20, 7)).astype(float)
    work = np.einsum("le,len->ln", frequency, expert_parallel_balanced(frequency, nodes)).max(axis=1)
    best = np.array([best_makespan(layer, nodes) for layer in frequency])
    assert (work <= (4 / 3 - 1 / (3 * nodes)) * best + 1e-9).all()


def test_hybrid_by_hand():
    # A 2x4 mesh in two regions of 2x2: nodes 0 1 4 5 and 2 3 6 7.
    # 5 (e1) -> region 0; 4 (e2) -> region 1; 3 (e0) -> region 1 (work 5, 7); 1 (e3) -> region 0.
    share = hybrid(np.array([[3, 5, 4, 1]]), (2, 4), 2)
    left, right = [0.25, 0.25, 0, 0, 0.25, 0.25, 0, 0], [0, 0, 0.25, 0.25, 0, 0, 0.25, 0.25]
    np.testing.assert_array_equal(share, np.array([[right, left, right, left]], np.float32))


def test_hybrid_contains_both_pure_forms():
    frequency = np.random.default_rng(0).random((3, 10))
    np.testing.assert_array_equal(hybrid(frequency, (2, 3), 1), tensor_parallel(3, 10, 6))
    # Six regions are single nodes, numbered as the nodes are.
    np.testing.assert_array_equal(hybrid(frequency, (2, 3), 6), expert_parallel_balanced(frequency, 6))


@given(frequencies, st.sampled_from([((4, 8), 2), ((4, 8), 8), ((3, 4), 6), ((5, 5), 5)]))
def test_hybrid_shares_evenly_inside_one_region(frequency, machine):
    shape, regions = machine
    share = hybrid(frequency, shape, regions)
    assert is_legal(share, shape)
    inside = shape[0] * shape[1] // regions
    assert ((share > 0).sum(axis=2) == inside).all()
    np.testing.assert_allclose(share.max(axis=2), 1 / inside, rtol=1e-6)


def test_mesh_that_cannot_be_cut():
    with pytest.raises(ValueError, match="a 3x3 mesh cannot be cut into 2 equal rectangles"):
        hybrid(np.ones((1, 4)), (3, 3), 2)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("strategy", [lambda f: expert_parallel_balanced(f, 2), lambda f: hybrid(f, (2, 2), 2)])
def test_impossible_frequencies(strategy, value):
    with pytest.raises(PlanError, match="frequency holds negative or non-finite values"):
        strategy(np.array([[1.0, value]]))


def test_balance_helps_on_recorded_gating(shared):
    trace = read_trace(shared / "traces" / "deepseek-v2-lite" / "intent.npz")
    frequency = (trace.experts[..., None] == np.arange(64)).sum(axis=(0, 2))

    def imbalance(share):
        """max over mean of the nodes' work, worst layer."""
        work = np.einsum("le,len->ln", frequency, share)
        return (work.max(axis=1) / work.mean(axis=1)).max()

    dealt = expert_parallel_random(26, 64, 16, seed=0)
    balanced, mixed = expert_parallel_balanced(frequency, 16), hybrid(frequency, (4, 4), 8)
    # One expert of a layer can have more than a node's fair part of 1/16, which no whole placement divides.
    assert imbalance(mixed) < imbalance(balanced) < imbalance(dealt)
    assert imbalance(tensor_parallel(26, 64, 16)) == pytest.approx(1, abs=1e-5)


def test_filling_in_order_is_the_north_west_corner():
    share = filled_in_order(np.array([0.5, 0.25, 0.25]), np.array([0.4, 0.6]), np.array([1, 0, 2]), np.array([1, 0]))
    # Expert 1 (0.25) and 0.35 of expert 0 fill node 1; the rest, 0.15 and expert 2, node 0.
    np.testing.assert_allclose(share, [[0.3, 0.7], [0, 1], [1, 0]], atol=1e-12)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_filled_nodes_have_their_part_and_few_hosts(experts, nodes, seed):
    rng = np.random.default_rng(seed)
    frequency, part = rng.dirichlet(np.ones(experts)), rng.dirichlet(np.ones(nodes))
    share = filled_in_order(frequency, part, rng.permutation(experts), rng.permutation(nodes))
    np.testing.assert_allclose(share.sum(axis=1), 1)
    np.testing.assert_allclose(frequency @ share, part, atol=1e-9)
    assert (share > 0).sum() <= experts + nodes - 1


def mesh(x: int, y: int) -> Mesh:
    links = num_links((x, y))
    return Mesh(jnp.ones(links), jnp.zeros(links), shape=(x, y))


def test_expert_parallelism_with_fewer_experts_than_nodes_uses_the_whole_machine():
    halves = expert_parallel(np.ones((2, 2)), mesh(2, 4))
    np.testing.assert_array_equal(halves[0] * 4, [[1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1]])
    np.testing.assert_array_equal(halves[1], halves[0])
    # Three experts on four nodes, no three rectangles: each has 4/3 nodes, in order.
    thirds = [[0.75, 0.25, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.25, 0.75]]
    for topology in (mesh(2, 2), ring(4, bandwidth=1.0, latency=0.0)):
        np.testing.assert_allclose(expert_parallel(np.ones((1, 3)), topology)[0], thirds, rtol=1e-6)


def test_expert_parallelism_with_enough_experts_is_the_balanced_one():
    frequency = np.random.default_rng(0).random((2, 9))
    np.testing.assert_array_equal(expert_parallel(frequency, mesh(2, 2)), expert_parallel_balanced(frequency, 4))


def test_experts_are_dealt_to_groups_by_load_by_hand():
    # 5 (e1) -> group 0, 4 (e2) -> group 1, 3 (e0) -> group 1, 1 (e3) -> group 0, each evenly on its three nodes.
    share = in_groups(np.array([[3, 5, 4, 1]]), np.array([0, 1, 1, 0, 0, 1]))
    one, other = np.array([1, 0, 0, 1, 1, 0]) / 3, np.array([0, 1, 1, 0, 0, 1]) / 3
    np.testing.assert_allclose(share, [[other, one, other, one]], rtol=1e-6)


def test_uneven_nodes_are_dealt_by_when_they_are_done_by_hand():
    # Paces 2, 1, 1. 6 -> node 0 (3 against 6), 4 -> node 1 (5 against 4), 3 -> node 2 (4.5 against 3), 2 -> node 0 (4).
    frequency, pace = np.array([[6, 4, 3, 2]]), np.array([2.0, 1, 1])
    np.testing.assert_array_equal(expert_parallel_balanced(frequency, 3, pace)[0].argmax(axis=1), [0, 1, 2, 0])
    # A node that is slow gets no heavy expert, although it is idle.
    assert expert_parallel_balanced(np.array([[5, 1]]), 2, np.array([10.0, 1]))[0, :, 0].tolist() == [1, 1]
    np.testing.assert_allclose(tensor_parallel(1, 2, 3, pace), [[[0.5, 0.25, 0.25]] * 2])
    # Groups of paces 3 and 1: 6 and 4 to the first (2, 10 / 3 against 4), 3 to the second, 2 to the first (4, not 5).
    share = in_groups(frequency, np.array([0, 1, 0]), pace)
    first, second = [2 / 3, 0, 1 / 3], [0, 1, 0]
    np.testing.assert_allclose(share, [[first, first, second, first]], rtol=1e-6)


@given(frequencies, st.integers(1, 9))
def test_equal_paces_deal_as_none(frequency, nodes):
    pace = np.full(nodes, 0.3)
    np.testing.assert_array_equal(
        expert_parallel_balanced(frequency, nodes, pace), expert_parallel_balanced(frequency, nodes)
    )
    np.testing.assert_allclose(tensor_parallel(1, 2, nodes, pace), tensor_parallel(1, 2, nodes), rtol=1e-6)


def test_replicas_by_load_by_hand():
    # Five slots for three experts: 6 -> 3 + 3, then the 3s tie and the first gets it: 2 + 2 + 2. Of load 3 the next
    # expert comes first, on node 0; e0 goes to nodes 1 and 2 with a load of 2 each, then to 0, the least that has none.
    share = replicated_by_load(np.array([[6.0, 3, 1]]), np.array([2, 2, 1]))
    np.testing.assert_allclose(share, [[[1 / 3] * 3, [1, 0, 0], [0, 1, 0]]], rtol=1e-6)


@given(frequencies, st.integers(0, 2**32 - 1))
def test_replicas_fit_their_slots_and_every_expert_has_one(frequency, seed):
    rng = np.random.default_rng(seed)
    experts, nodes = frequency.shape[1], int(rng.integers(1, 7))
    slots = rng.multinomial(experts + rng.integers(0, 10), np.full(nodes, 1 / nodes))
    share = replicated_by_load(frequency, slots)
    assert is_legal(share, (1, nodes))
    held = share > 0
    assert (held.sum(axis=1) <= slots).all()
    assert held.any(axis=2).all()
    np.testing.assert_allclose(share, held / held.sum(axis=2, keepdims=True), rtol=1e-6)  # served evenly


def test_replicas_that_do_not_fit_are_refused():
    with pytest.raises(PlanError, match="4 experts do not fit 3 slots; raise the memory capacity"):
        replicated_by_load(np.ones((1, 4)), np.array([2, 1]))
