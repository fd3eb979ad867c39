"""The lower bound, against every whole-expert plan of a small machine and many divided ones."""

import dataclasses
import itertools
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases

from jaxmoe.engine import Layer, schedule_of
from jaxmoe.hardware import Die, MemoryLevel, node_memory
from jaxmoe.hardware.kernels import MeasuredGemm
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement.exchange import HOMES, ROUTES
from jaxmoe.traces import Batch, synthetic_trace
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.settings import HYBRIDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "placement_tuning"))
from exchange_bound import exchange_bound
from tree_bound import tree_bound

sys.path.pop(0)

EXPERTS, NODES, TOP_K, TOKENS, BATCHES = 4, 4, 2, 10, 4  # 12 kinds of token: batches stay unmerged
FACTORS = (1e-2, 1.0, 30.0, 1e3)  # of link bandwidth: from slow links to fast ones
TREES = (*(f"{home}_tree" for home in HOMES), *(f"corner_host_{route}" for route in ROUTES[2:]))
RINGS = ("ring", "ring_both_ways", "rings_2x1", "rings_1x2_both_ways", "rings_2", "rings_4")
MERGING = (*TREES, "reduce_scatter", *RINGS)


def problem_of(
    bandwidth_factor: float = 1.0,
    exchanges: tuple[str, ...] = (),
    seed: int = 0,
    room: float | None = None,
    ports: bool = False,
    **parts,
) -> PlacementProblem:
    """A machine of four nodes and links that all differ; `parts` are of its model."""
    machine = cases.random_machine(np.random.default_rng(seed), (2, 2), ports=ports)
    machine.link_bandwidth *= bandwidth_factor
    model = cases.layer_model(machine, **parts)
    if room is not None:
        model = with_memory(model, node_memory(None, jnp.full(NODES, room * cases.COSTS.expert_bytes)))
    trace = synthetic_trace(200, [0], EXPERTS, TOP_K, skew=1.0, coactivation=0.0, reuse=0.0, seed=seed)
    # Any rings between groups: tuning chooses among all complete hybrids, and the bound holds for other rings too.
    chosen = dict.fromkeys(HYBRIDS if name.startswith("rings_") else name for name in exchanges)
    return PlacementProblem(model, trace, TOKENS, exchanges=tuple(chosen))


def with_memory(model: Layer, memory: tuple[MemoryLevel, ...]) -> Layer:
    return dataclasses.replace(model, machine=dataclasses.replace(model.machine, memory=memory))


def even_time(problem: PlacementProblem) -> float:
    return TOKENS * TOP_K * 5e6 / float(np.asarray(problem.model.machine.die.flops).sum())


@eqx.filter_jit
def all_times(model: Layer, plans: jax.Array, batches: Batch, exchange: AbstractExchange | None) -> jax.Array:
    """Mean time of every plan over the batches."""
    times = jax.vmap(jax.vmap(lambda plan, batch: model(plan, batch, exchange).total, (None, 0)), (0, None))
    return times(plans, batches).mean(axis=1)


def times_of(problem: PlacementProblem, plans: np.ndarray, batches: Batch, name: str | None = None) -> np.ndarray:
    """Mean time of every plan under the exchange of this name, or under the model's own."""
    exchange = None if name is None else build_exchange(name, problem.model.machine.topology)
    return np.asarray(
        all_times(problem.model, jnp.asarray(plans), jax.tree.map(lambda leaf: leaf[0], batches), exchange)
    )


def assert_below_all(problem: PlacementProblem, plans: np.ndarray, names: tuple[str, ...]) -> float:
    """No plan is faster than the bound under any of the exchanges. Returns the bound over the least time."""
    batches = problem.draw(BATCHES, 0)
    (bound,) = lower_bound(problem, batches)
    fastest = min(times_of(problem, plans, batches, name).min() for name in names)
    assert 0 < bound <= fastest * (1 + 1e-6)
    return float(bound / fastest)


@pytest.fixture(scope="module")
def candidates() -> np.ndarray:
    """All 256 whole-expert plans, 256 divided ones of every degree of sharing, TP, and all complete hybrids."""
    whole = np.eye(NODES)[list(itertools.product(range(NODES), repeat=EXPERTS))]
    rng = np.random.default_rng(0)
    divided = [cases.random_share(rng, EXPERTS, NODES, hosts=1 + i % NODES) for i in range(256)]
    halves = [np.array([[1, 1, 0, 0], [0, 0, 1, 1]]) / 2, np.array([[1, 0, 1, 0], [0, 1, 0, 1]]) / 2]
    dealt = np.array(list(itertools.product(range(2), repeat=EXPERTS)))
    even = np.full((1, EXPERTS, NODES), 1 / NODES)
    return np.concatenate([whole, divided, even, *(half[dealt] for half in halves)]).astype(np.float32)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_plan_that_gathers_at_a_home_is_faster_than_the_bound(candidates, seed):
    near = []
    for factor in FACTORS:
        problem = problem_of(factor, HOMES, seed)
        assert lower_bound(problem, problem.draw(BATCHES, 0)) >= even_time(problem) * (1 - 1e-6)
        near.append(assert_below_all(problem, candidates, HOMES))
    assert min(near) > 0.4  # it is worth something


@pytest.mark.slow
def test_no_plan_under_any_other_exchange_is_faster_than_the_bound(candidates):
    near = []
    for factor in FACTORS:
        problem = problem_of(factor, MERGING)
        near.append(assert_below_all(problem, candidates, MERGING))
    assert min(near) > 0.3


FEW = ("least_loaded", "corner_host_split_tree", "reduce_scatter", "ring_both_ways", "rings_2x1", "rings_1x2")


QUICK = ("least_loaded", "reduce_scatter", "rings_1x2")
UNICASTS = pytest.param(("lowest_host", "fewest_hops", "token_home"), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "names", [UNICASTS, pytest.param(FEW, marks=pytest.mark.slow), QUICK], ids=["unicasts", "any", "quick"]
)
def test_the_bound_holds_where_ports_limit(candidates, names):
    for factor in (0.1, 1.0, 1e3):
        assert_below_all(problem_of(factor, names, ports=True), candidates, names)
    links, ports = (problem_of(1e6, names, ports=ports) for ports in (False, True))
    batches = links.draw(BATCHES, 0)
    assert lower_bound(ports, batches) > 1.1 * lower_bound(links, batches)  # ports are seen


def memories() -> dict[str, tuple[MemoryLevel, ...]]:
    own = node_memory(jnp.asarray([3e10, 6e10, 5e10, 9e10]))
    shared = MemoryLevel(
        jnp.asarray([6e10, 1.2e11]), jnp.full(2, 1e-6), None, jnp.asarray([0, 0, 1, 1], jnp.int32), name="ddr"
    )
    return {"own": own, "shared": (shared,), "both": (*own, shared)}


@pytest.mark.parametrize(
    ("kind", "names"),
    [*(pytest.param(kind, FEW, marks=pytest.mark.slow) for kind in ("own", "shared", "both")), ("both", QUICK)],
)
def test_the_bound_holds_where_memory_limits(candidates, kind, names):
    near = []
    for factor in (1.0, 30.0, 1e3):
        problem = problem_of(factor, names)
        memory = memories()[kind]
        limited = dataclasses.replace(problem, model=with_memory(problem.model, memory))
        near.append(assert_below_all(limited, candidates, names))
        # All experts are read in nearly every batch, by all channels of the slowest level at best.
        read = EXPERTS * cases.COSTS.expert_bytes / min(float(level.bandwidth.sum()) for level in memory)
        assert lower_bound(limited, limited.draw(BATCHES, 0))[0] > 0.9 * read > 1.5 * even_time(problem)
    assert min(near) > 0.3


def test_memory_moves_the_vectors_of_every_expert_that_a_node_has_a_part_of():
    # Four nodes of 1 GB/s hold four experts of w bytes. Every token chooses 0 and 1: each of the nodes has a part of 0
    # or 1, or does not help to read these. Evenly on all nodes, that is half an expert and all vectors on each.
    model = with_memory(problem_of(1e25).model, node_memory(jnp.full(NODES, 1e9)))
    experts = jnp.tile(jnp.asarray([0, 1], jnp.int32), (1, 1, TOKENS, 1))
    shape = (1, 1, TOKENS)
    batches = Batch(experts, jnp.zeros(shape), jnp.zeros((*shape, 2)), jnp.ones(shape))
    problem = dataclasses.replace(problem_of(), model=model)
    moved = 2 / NODES * cases.COSTS.expert_bytes + TOKENS * (cases.COSTS.dispatch_bytes + cases.COSTS.combine_bytes)
    np.testing.assert_allclose(lower_bound(problem, batches), moved / 1e9, rtol=1e-6)
    even = np.array([[[0.25] * NODES] * EXPERTS], np.float32)
    np.testing.assert_allclose(times_of(problem, even, batches, "ring"), moved / 1e9, rtol=5e-3)  # latencies


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["overlap", "pipelined(2)"])
def test_the_bound_holds_under_other_schedules(candidates, schedule):
    for factor in FACTORS:
        problem = problem_of(factor, FEW, schedule=schedule_of(schedule))
        assert_below_all(problem, candidates, FEW)


def test_the_bound_holds_for_replicas(candidates):
    for factor in FACTORS:
        problem = problem_of(factor, ("token_home", "reduce_scatter"), mode="replicated")
        assert_below_all(problem, candidates, ("lowest_host", "token_home", "reduce_scatter"))


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("uncongested", "alpha_beta")), "pipelined"]
)
def test_the_bound_holds_under_other_time_models(candidates, name):
    for factor in (1e-2, 1.0, 30.0):
        problem = problem_of(factor, FEW)
        model = dataclasses.replace(problem.model, time_model=cases.TIME_MODELS[name](problem.model.machine.topology))
        assert_below_all(dataclasses.replace(problem, model=model), candidates, FEW)


def test_groups_that_send_each_other_nothing_are_bounded_by_compute(candidates):
    problem = problem_of(1e-2)
    alone = build_exchange("rings_4_alone", problem.model.machine.topology)
    assert_below_all(problem.under(alone), candidates, ("rings_4_alone",))


def test_measured_products_leave_communication_to_bound():
    table = MeasuredGemm(jnp.asarray([0.0, 100.0]), jnp.asarray([0.0, 100.0]), jnp.full((2, 2), 1e-9))
    for room in (None, 1.5):
        problem = problem_of(1e-2, room=room)
        die = Die(problem.model.machine.die.flops, table)
        model = dataclasses.replace(problem.model, machine=dataclasses.replace(problem.model.machine, die=die))
        bound = lower_bound(dataclasses.replace(problem, model=model), problem.draw(BATCHES, 0))
        assert (bound > 0).all() if room else (bound == 0).all()  # all experts may be on one node, or may not


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


@eqx.filter_jit
def communication_of(model: Layer, plans: jax.Array, batches: Batch, exchange: AbstractExchange) -> jax.Array:
    """Communication time of every plan and batch."""
    times = jax.vmap(jax.vmap(lambda plan, batch: model(plan, batch, exchange).communication, (None, 0)), (0, None))
    return times(plans, batches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_exchange_makes_a_plan_communicate_less_than_its_bound(candidates, seed):
    problem = problem_of(seed=seed)
    batches = jax.tree.map(lambda leaf: leaf[0], problem.draw(BATCHES, 0))
    chosen = candidates[[0, 27, 100, 300, 301, 303, 512, 515]]  # of every kind; the last but one is TP
    names, topology = (*HOMES, *MERGING, "token_home_split_tree"), problem.model.machine.topology
    exchanges = [build_exchange(name, topology) for name in names]
    least = np.min([communication_of(problem.model, jnp.asarray(chosen), batches, each) for each in exchanges], axis=0)
    bounds = np.stack([exchange_bound(problem.model, plan, batches) for plan in chosen])
    assert (bounds <= least * (1 + 1e-6)).all()
    # It is worth something: most where all nodes are visited, though links differ up to four times.
    assert (bounds.sum(axis=1) >= 0.15 * least.sum(axis=1)).all()
    assert bounds[6].sum() > 0.4 * least[6].sum()
    trees = np.stack([tree_bound(problem.model, plan, batches) for plan in chosen])
    assert (trees <= least * (1 + 1e-6)).all()
    assert (trees.sum(axis=1) >= 0.15 * least.sum(axis=1)).all()


def test_all_dies_of_a_mesh_wait_for_the_corners():
    # Each of 128 tokens needs a part from all 16 dies: at best the four corners keep a quarter of the tokens each, and
    # send the rest over two links.
    machine = cases.random_machine(np.random.default_rng(0), (4, 4))
    machine.link_bandwidth[:] = 1e9
    model = cases.layer_model(machine)
    experts = jnp.zeros((1, 128, 1), jnp.int32)
    batch = Batch(experts, jnp.zeros((1, 128)), jnp.zeros((1, 128, 1)), jnp.ones((1, 128)))
    seconds = 0.75 / 2 * 128 * (float(model.costs.combine_bytes) + float(model.costs.dispatch_bytes)) / 1e9
    np.testing.assert_allclose(exchange_bound(model, np.full((1, 16), 1 / 16), batch), seconds, rtol=1e-6)
    np.testing.assert_allclose(exchange_bound(model, np.eye(16)[:1], batch), 0, atol=1e-15)
    heavy = dataclasses.replace(batch, experts=experts.at[0, 64:].set(-1), weight=jnp.full((1, 128), 2.0))
    np.testing.assert_allclose(exchange_bound(model, np.full((1, 16), 1 / 16), heavy), seconds, rtol=1e-6)
    with pytest.raises(ValueError, match="sharded"):
        exchange_bound(dataclasses.replace(model, mode="replicated"), np.eye(16)[:1], batch)
