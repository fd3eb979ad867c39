"""The lower bound, against every whole-expert plan of a small machine and many divided ones."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases

from jaxmoe.hardware import Machine, node_memory
from jaxmoe.latency import LayerModel
from jaxmoe.traces import Batch, synthetic_trace
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.bounds import lower_bound

EXPERTS, NODES, TOP_K, TOKENS, BATCHES = 4, 4, 2, 10, 4  # 12 kinds of token: batches stay unmerged


def problem_of(bandwidth_factor: float = 1.0, rule: str = "lowest", seed: int = 0, room: float | None = None):
    machine = cases.random_machine(np.random.default_rng(seed), (2, 2))
    machine.link_bandwidth *= bandwidth_factor
    model = cases.layer_model(machine, rule=rule)
    if room is not None:
        capacity = jnp.full(NODES, room * cases.COSTS.expert_bytes)
        numbers = (
            model.costs.combine_bytes,
            model.costs.expert_bytes,
            model.costs.flops_per_token_expert,
            model.time_model,
        )
        machine = Machine(model.machine.topology, model.machine.die, node_memory(None, capacity))
        model = type(model)(machine, *numbers, exchange=model.exchange, mode="sharded")
    trace = synthetic_trace(200, [0], EXPERTS, TOP_K, skew=1.0, coactivation=0.0, reuse=0.0, seed=seed)
    return PlacementProblem(model, trace, TOKENS)


def even_time(problem: PlacementProblem) -> float:
    return TOKENS * TOP_K * 5e6 / float(np.asarray(problem.model.machine.die.flops).sum())


@eqx.filter_jit
def all_times(model: LayerModel, plans: jax.Array, batches: Batch) -> jax.Array:
    """Mean time of every plan over the batches."""
    times = jax.vmap(jax.vmap(lambda plan, batch: model(plan, batch).total, (None, 0)), (0, None))
    return times(plans, batches).mean(axis=1)


def times_of(problem: PlacementProblem, plans: np.ndarray, batches: Batch) -> np.ndarray:
    return np.asarray(all_times(problem.model, jnp.asarray(plans), jax.tree.map(lambda leaf: leaf[0], batches)))


@pytest.fixture(scope="module")
def candidates() -> np.ndarray:
    """All 256 whole-expert plans, and 256 divided ones of every degree of sharing."""
    whole = np.eye(NODES)[list(itertools.product(range(NODES), repeat=EXPERTS))]
    rng = np.random.default_rng(0)
    divided = [cases.random_share(rng, EXPERTS, NODES, hosts=1 + i % NODES) for i in range(256)]
    return np.concatenate([whole, divided]).astype(np.float32)


@pytest.mark.parametrize("rule", ["lowest", "fewest"])
@pytest.mark.parametrize("seed", range(2))
def test_no_plan_is_faster_than_the_bound_on_the_very_same_batches(candidates, rule, seed):
    near = []
    for factor in (1e-2, 1.0, 30.0, 1e3):
        problem = problem_of(factor, rule, seed)
        batches = problem.draw(BATCHES, seed)
        times = times_of(problem, candidates, batches)
        (bound,) = lower_bound(problem, batches)
        assert even_time(problem) * (1 - 1e-6) <= bound <= times.min() * (1 + 1e-6)
        near.append(bound / times.min())
    assert min(near) > 0.4  # it is worth something


def test_memory_forces_tokens_to_visit_more_nodes():
    # One and a half experts fit a node: two experts never share one, however slow the links.
    free, tight = problem_of(1e-2), problem_of(1e-2, room=1.5)
    batches = free.draw(BATCHES, 0)
    assert lower_bound(tight, batches)[0] > 1.5 * lower_bound(free, batches)[0]


@pytest.mark.parametrize("seed", range(2))
def test_with_memory_no_plan_that_fits_is_faster_than_the_bound(candidates, seed):
    problem = problem_of(1e-1, seed=seed, room=1.5)
    batches = problem.draw(BATCHES, seed)
    fits = (candidates.sum(axis=1) <= 1.5).all(axis=1)
    times = times_of(problem, candidates, batches)
    (bound,) = lower_bound(problem, batches)
    assert fits.sum() > 20
    assert bound <= times[fits].min() * (1 + 1e-6)


def test_infinitely_fast_links_leave_even_compute():
    problem = problem_of(1e25)
    np.testing.assert_allclose(lower_bound(problem, problem.draw(BATCHES, 0)), even_time(problem), rtol=1e-6)


def test_the_bound_grows_as_links_slow_down_until_no_token_travels():
    problem = problem_of()
    batches = problem.draw(BATCHES, 0)
    factors = [1e25, 1e3, 100, 30, 10, 3, 1, 0.1, 1e-3, 1e-6]
    bounds = np.array([lower_bound(problem_of(factor), batches)[0] for factor in factors])
    assert (np.diff(bounds) >= 0).all()
    assert (np.diff(bounds[1:6]) > 0).all()
    # In the end all experts a token may need live on the fastest node, as far as one token can tell.
    assert bounds[-1] == bounds[-2] > bounds[0]


def test_layers_are_bounded_each_for_itself():
    problem = problem_of()
    batches = [problem.draw(BATCHES, seed) for seed in (0, 1)]
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)
    apart = [lower_bound(problem, one)[0] for one in batches]
    np.testing.assert_array_equal(lower_bound(problem, both), apart)
    assert apart[0] != apart[1]
