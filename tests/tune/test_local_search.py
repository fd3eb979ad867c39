"""Local improvement with the exact model."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.compilations import compilations
from small_problem import EXPERTS, LAYERS, NODES, SHAPE, random_shares, small_problem

from jaxmoe.engine import evaluate
from jaxmoe.hardware.networks import hop_counts
from jaxmoe.network import build_exchange
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem, local_search
from jaxmoe.tune.local_search import search_of
from jaxmoe.tune.objective import objective

HOPS = jnp.asarray(hop_counts(SHAPE), jnp.float32)
ROOM = jnp.full(NODES, jnp.inf)
CHAINS = 2
propose = jax.jit(local_search._propose)


def scores_of(problem: PlacementProblem, shares: jax.Array, batches: Batch) -> np.ndarray:
    """Exact objective of every chain's plan, [layer, chain]."""
    seconds = [local_search.seconds_of_all(search_of(problem), shares[:, chain], batches) for chain in range(CHAINS)]
    return np.asarray(objective(jnp.stack(seconds, axis=1), problem.p95_weight))


def plans(seed: int = 0) -> jax.Array:
    return jnp.asarray(random_shares(np.random.default_rng(seed), CHAINS))


@given(st.integers(0, 2**32 - 1))
def test_proposals_keep_a_plan_legal_however_many_follow_each_other(seed):
    rng = np.random.default_rng(seed)
    share = jnp.asarray(random_shares(rng, hosts=NODES)[0])
    frequency = rng.dirichlet(np.full(EXPERTS, 0.3)) + 1e-5
    for luck in jnp.asarray(rng.random((30, local_search.LUCK)), jnp.float32):
        share = propose(luck, share, jnp.asarray(frequency, jnp.float32), HOPS, ROOM)
        values = np.asarray(share)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-5)
        # No crumbs: what is not worth a message is swept up.
        assert values[values > 0].min() >= local_search.SMALLEST_SHARE * 0.99


def kind_of(before: np.ndarray, after: np.ndarray) -> str:
    """What a proposal did, told from the plans alone."""
    rows, columns = ((before != after).any(axis=axis) for axis in (1, 0))
    swaps = [np.allclose(np.sort(before, axis), np.sort(after, axis), atol=1e-6) for axis in (0, 1)]
    if np.allclose(before, after, atol=1e-6):
        return "nothing"
    if rows.sum() == 2 and swaps[0] and np.allclose(before[rows][::-1], after[rows], atol=1e-6):
        return "experts swap"
    if rows.sum() > 2 and columns.sum() == 2 and swaps[1]:
        return "nodes swap"
    if rows.sum() == 2:
        return "exchange"
    row, old = after[rows][0], before[rows][0]
    if (old[row > 0] == 0).any():
        return "to any node"
    gained = row > old + 1e-6
    proportional = np.allclose(row[row > 0], old[row > 0] / old[row > 0].sum(), atol=1e-6)
    return "leaves a host" if proportional and (row == 0).sum() > (old == 0).sum() and gained.sum() > 1 else "to a host"


def test_every_kind_of_move_occurs():
    share = random_shares(np.random.default_rng(4), hosts=NODES)[0]
    share[0] = [0.1, 0.2, 0.3, 0.4]  # one that can do everything but move to a new node
    share[1] = [0.7, 0.0, 0.3, 0.0]
    frequency = jnp.full(EXPERTS, 1 / EXPERTS)
    lucks = jnp.asarray(np.random.default_rng(0).random((600, local_search.LUCK)), jnp.float32)
    moved = jax.vmap(propose, (0, None, None, None, None))(lucks, share, frequency, HOPS, ROOM)
    kinds = [kind_of(share, after) for after in np.asarray(moved)]
    expected = {"experts swap", "nodes swap", "exchange", "to any node", "to a host", "leaves a host"}
    assert expected <= set(kinds)
    assert kinds.count("nothing") < 0.5 * len(kinds)


@given(st.integers(0, 2**32 - 1))
def test_an_exchange_leaves_every_node_its_work(seed):
    rng = np.random.default_rng(seed)
    share = random_shares(rng, hosts=NODES)[0]
    frequency = rng.dirichlet(np.ones(EXPERTS)).astype(np.float32) + np.float32(1e-3)
    one, other = rng.choice(EXPERTS, 2, replace=False)
    origin, target = (rng.choice(np.flatnonzero(share[expert])) for expert in (one, other))
    numbers = (jnp.asarray(int(n)) for n in (one, other, origin, origin, target))
    pick = local_search.Pick(*numbers, jnp.asarray(rng.uniform(0.2, 1), jnp.float32))
    after = np.asarray(local_search._exchange(jnp.asarray(share), pick, jnp.asarray(frequency)))
    np.testing.assert_allclose(frequency @ after, frequency @ share, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after.sum(axis=1), 1, rtol=1e-5)
    assert (after > -1e-6).all()
    assert origin == target or not np.allclose(after, share, atol=1e-6)


def test_an_expert_never_leaves_its_only_host():
    share = jnp.eye(NODES)[jnp.array([0, 1, 2, 3, 0, 1])]
    pick = local_search.Pick(*(jnp.asarray(n) for n in (2, 0, 2, 2, 1)), jnp.asarray(1.0))
    np.testing.assert_array_equal(local_search._leave(share, pick), share)


@pytest.mark.parametrize("p95_weight", [0.0, 0.5])
def test_a_score_is_the_exact_time(p95_weight):
    problem = small_problem(p95_weight=p95_weight)
    shares, batches = plans(), problem.draw(8, seed=3)
    scores = scores_of(problem, shares, batches)
    assert scores.shape == (LAYERS, CHAINS)
    for chain in range(CHAINS):
        total = evaluate(problem.model, shares[:, chain], batches).total
        expected = total.mean(axis=1) + p95_weight * (np.quantile(total, 0.95, axis=1) - total.mean(axis=1))
        np.testing.assert_allclose(scores[:, chain], expected, rtol=1e-5)
        np.testing.assert_allclose(scores[:, chain], objective(total, p95_weight), rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "corner_host_split_tree",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("ring_both_ways", "lowest_host", "fewest_hops_tree", "reduce_scatter")
        ),
    ],
)
def test_merged_batches_score_the_same(name):
    problem = small_problem(tokens=40)
    problem = problem.under(build_exchange(name, problem.model.machine.topology))
    batches = problem.draw(8, seed=3)
    merged = problem.merged(batches)
    assert merged.experts.ndim < batches.experts.ndim
    apart, together = (scores_of(problem, plans(), given) for given in (batches, merged))
    np.testing.assert_allclose(together, apart, rtol=1e-5)


@pytest.mark.parametrize("name", ["random_host_tree", "least_loaded", "token_home"])
def test_batches_stay_apart_where_equal_tokens_have_different_homes(name):
    problem = small_problem(tokens=40)
    problem = problem.under(build_exchange(name, problem.model.machine.topology))
    batches = problem.draw(2, seed=3)
    assert problem.merged(batches) is batches


def run(problem: PlacementProblem, coldness: float, batches: Batch, key: int = 0, seed: int = 0):
    cold = jnp.full(local_search.SEGMENT, coldness, jnp.float32)
    return local_search.improve(search_of(problem), plans(seed), batches, cold, jr.key(key))


def test_a_cold_search_never_ends_above_its_start_and_mostly_below():
    problem = small_problem()
    batches = problem.draw(8, seed=3)
    start = scores_of(problem, plans(), batches)
    shares, costs = run(problem, 1e12, batches)
    assert (np.asarray(costs) <= start * (1 + 1e-6)).all()
    assert np.mean(np.asarray(costs) < 0.98 * start) > 0.5
    # What is returned as the cost is the cost of what is returned.
    np.testing.assert_allclose(scores_of(problem, shares, batches), costs, rtol=1e-5)
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-4)
    again, _ = run(problem, 1e12, batches)
    np.testing.assert_array_equal(again, shares)
    other, _ = run(problem, 1e12, batches, key=1)
    assert not np.array_equal(other, shares)


def test_a_hot_search_takes_worse_plans_too():
    problem = small_problem()
    batches = problem.draw(8, seed=3)
    _, cold = run(problem, 1e12, batches)
    _, hot = run(problem, 1e-3, batches)
    assert np.mean(hot) > np.mean(cold) * 1.05


def test_a_search_never_fills_a_node_beyond_its_room():
    fullest = np.asarray(plans()).sum(axis=2).max(axis=-1)
    full = small_problem(room=float(fullest.min()) + 0.1)
    fits = fullest <= full.room[0]
    shares, _ = run(full, 1e-3, full.draw(8, seed=3))
    held = np.asarray(shares).sum(axis=2)
    assert (held[fits] <= full.room * (1 + 2e-5)).all()
    unlimited, _ = run(small_problem(), 1e-3, full.draw(8, seed=3))
    assert (np.asarray(unlimited).sum(axis=2)[fits] > full.room * (1 + 2e-5)).any()


def test_no_number_compiles_the_search_anew():
    cold = jnp.full(local_search.SEGMENT, 1e4, jnp.float32)
    cases = [
        (
            search_of(small_problem(**changed)),
            plans(seed),
            small_problem(**changed).draw(8, seed),
            cold * heat,
            jr.key(seed),
        )
        for changed, heat, seed in [
            ({}, 1, 0),
            ({"link_factor": 3.0}, 1, 0),
            ({"flops_factor": 2.0}, 1, 0),
            ({"message_factor": 0.25}, 1, 0),
            ({"p95_weight": 0.5}, 1, 0),
            ({"room": 1.6}, 1, 0),
            ({"trace_seed": 1}, 1, 0),
            ({}, 1e-7, 0),
            ({}, 1, 1),
        ]
    ]
    for search, *inputs in cases[:1]:
        local_search.improve(search, *inputs)
        local_search.seconds_of_all(search, inputs[0][:, 0], inputs[1])
    with compilations() as compiled:
        for search, *inputs in cases[1:]:
            local_search.improve(search, *inputs)
            local_search.seconds_of_all(search, inputs[0][:, 0], inputs[1])
        assert compiled == []
