"""The last word: nothing returned is slower than a shipped strategy, and every layer names the exchange it is run
with."""

import dataclasses
import itertools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from small_problem import EXPERTS, LAYERS, SETTINGS, SHAPE, small_model, small_problem, small_trace

from jaxmoe.engine import evaluate
from jaxmoe.hardware import node_memory, ring
from jaxmoe.network import build_exchange
from jaxmoe.placement import PlanError, expert_parallel_random
from jaxmoe.placement.exchange import ExchangeError
from jaxmoe.placement.strategies import expert_parallel, shipped_strategies
from jaxmoe.registry import OPTIMISERS
from jaxmoe.traces import synthetic_trace
from jaxmoe.tune import PlacementProblem, TuneResult, evaluator, tune
from jaxmoe.tune import results as ranking
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.objective import Objective
from jaxmoe.tune.results import Ranked, where_surely_faster
from jaxmoe.tune.settings import ALONE, DEFAULT_EXCHANGES, HYBRIDS, StopSwitch, TunerSettings, affordable

QUICK = {
    "gradient": {"restarts": 2, "steps": 25, "refine_steps": 100, "refine_batches": 8, "hybrid_cuts": 1},
    "milp-bayes": {"node_time_s": 0.3, "link_time_s": 0.3, "link_batches": 6, "link_method": "annealing"},
    "anneal": {"chains": 2, "steps": 100, "batches": 8},
    "greedy": {"batches": 8},
    "random": {"plans": 32, "batches": 8},
}


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    monkeypatch.setattr(evaluator, "SELECTION_BATCHES", (8, 8))
    monkeypatch.setattr(evaluator, "REBALANCE_BATCHES", 32)


def optimised(name: str, problem: PlacementProblem, seed: int = 3) -> TuneResult:
    optimiser = OPTIMISERS[name]
    return optimiser.run(problem, optimiser.settings(seed=seed, **QUICK[name]))


def seconds_of(problem: PlacementProblem, share: np.ndarray, exchange: str, seed: int = 3) -> np.ndarray:
    """Mean time of every layer on the selection batches under the exchange of this name, s."""
    built = build_exchange(exchange, problem.model.machine.topology)
    selection = Evaluator(problem, seed, StopSwitch()).selection
    return np.asarray(evaluate(problem.model, jnp.asarray(share, jnp.float32), selection, built).total.mean(axis=1))


def assert_nothing_that_ships_is_faster(result: TuneResult, problem: PlacementProblem) -> None:
    gathers = tuple(name for name in ("lowest_host", *problem.exchanges) if not name.startswith("ring"))
    for strategy in shipped_strategies(problem.frequency, problem.model.machine.topology, gathers, seed=3):
        for name in strategy.exchanges:
            may_be_chosen = name in (*gathers, *problem.exchanges) or HYBRIDS in problem.exchanges
            if may_be_chosen and name != "ring":
                assert (result.cost <= seconds_of(problem, strategy.share, name) * (1 + 1e-5)).all(), strategy.name


def assert_told(result: TuneResult, problem: PlacementProblem) -> None:
    """The exchange of every layer may be chosen, and under it the plan takes what the result says."""
    for layer, name in enumerate(result.exchange):
        hybrid = name.startswith("rings_") and HYBRIDS in problem.exchanges
        assert hybrid or name in ("lowest_host", *problem.exchanges)
        seconds = seconds_of(problem, result.share, name)[layer]
        np.testing.assert_allclose(result.cost[layer], seconds, rtol=1e-5)
        assert result.bound[layer] <= seconds


EVERYDAY = ("greedy",)


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMISERS]
)
def test_no_shipped_strategy_is_faster_than_what_is_returned(name):
    problem = small_problem(link_factor=0.3)
    result = optimised(name, problem)
    assert_told(result, problem)
    assert_nothing_that_ships_is_faster(result, problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("link_factor", [0.1, 1.0, 10.0])
def test_no_shipped_strategy_is_faster_under_any_of_the_usual_exchanges(name, link_factor):
    problem = small_problem(exchanges=DEFAULT_EXCHANGES, link_factor=link_factor)
    result = optimised(name, problem)
    assert_told(result, problem)
    assert_nothing_that_ships_is_faster(result, problem)


def ranked(*seconds: float) -> Ranked:
    """A plan of one layer whose batches take so long."""
    batches = np.array([seconds])
    return Ranked(np.zeros((1, 1, 1)), batches.mean(axis=1), np.array(["lowest_host"], object), batches)


def test_a_gain_counts_from_twice_its_standard_error_on():
    known = ranked(*[10.0] * 8)
    # Gains 0, 0, 0, 0, 2, 2, 2, 2: mean 1, standard error 0.378.
    sure = where_surely_faster(ranked(*[10.0] * 4, *[8.0] * 4), known, Objective())
    np.testing.assert_array_equal(sure.seconds, [9.0])
    # Gains -2, -2, -2, 2, 2, 2, 2, 2: mean 0.5, standard error 0.73.
    unsure = where_surely_faster(ranked(*[12.0] * 3, *[8.0] * 5), known, Objective())
    np.testing.assert_array_equal(unsure.seconds, [np.inf])
    assert where_surely_faster(known, known, Objective()).seconds == np.inf


def test_a_shipped_strategy_is_returned_where_what_was_searched_is_not_surely_faster(monkeypatch):
    problem = small_problem(link_factor=0.3)
    known = Evaluator(problem, 3, StopSwitch()).shipped
    monkeypatch.setattr(ranking, "STANDARD_ERRORS", 1e9)
    result = optimised("greedy", problem)
    np.testing.assert_array_equal(result.share, known.plan)
    np.testing.assert_allclose(result.cost, known.seconds)


def halves_far_apart() -> PlacementProblem:
    """Links along y are as good as free and those along x slow; nodes are all alike."""
    problem = small_problem(trace_seed=2, exchanges=(HYBRIDS,), flops_factor=0.5)
    topology, flops = problem.model.machine.topology, problem.model.machine.die.flops
    x, y = SHAPE
    along_x = np.arange(topology.num_links) < 2 * (x - 1) * y
    where = lambda model: (  # noqa: E731
        model.machine.topology.link_bandwidth,
        model.machine.topology.link_latency,
        model.machine.die.flops,
    )
    numbers = (
        jnp.where(along_x, 2e9, 1e12),
        jnp.zeros(topology.num_links),
        jnp.full_like(flops, flops.mean()),
    )
    return dataclasses.replace(problem, model=eqx.tree_at(where, problem.model, numbers))


@pytest.mark.slow
def test_a_complete_hybrid_is_found_and_improved_where_it_is_best(monkeypatch):
    monkeypatch.setattr(evaluator, "SELECTION_BATCHES", (64, 64))
    problem = halves_far_apart()
    settings = dataclasses.replace(SETTINGS, seed=3, steps=25, refine_batches=64, hybrid_cuts=1)
    result = tune(problem, settings)
    assert_told(result, problem)
    assert result.exchange == ("rings_2x1_both_ways",) * LAYERS
    assert (result.cost < result.stages["searched"]).all()
    strategies = shipped_strategies(problem.frequency, problem.model.machine.topology, ("lowest_host",), seed=3)
    dealt = next(each.share for each in strategies if each.exchanges[:1] == result.exchange[:1])
    by_load = seconds_of(problem, dealt, result.exchange[0])
    assert (result.cost <= by_load * (1 + 1e-6)).all()
    assert (result.cost < 0.99 * by_load).any()
    # Whatever an expert has in a half its two nodes have evenly.
    np.testing.assert_allclose(result.share[..., [0, 2]], result.share[..., [1, 3]], rtol=1e-6)
    # No dealing of whole experts is much better, of all there are.
    halves = np.array([[1, 1, 0, 0], [0, 0, 1, 1]]) / 2
    every = halves[np.array(list(itertools.product(range(2), repeat=6)))]
    alike = [np.broadcast_to(plan, result.share.shape) for plan in every]
    best = np.min([seconds_of(problem, share, result.exchange[0]) for share in alike], axis=0)
    assert (result.cost <= best * 1.02).all()


@pytest.mark.slow
def test_where_memory_limits_nothing_is_slower_than_expert_parallelism():
    problem = small_problem(exchanges=())
    memory = node_memory(jnp.full(problem.num_nodes, 2e10))
    machine = dataclasses.replace(problem.model.machine, memory=memory)
    problem = dataclasses.replace(problem, model=dataclasses.replace(problem.model, machine=machine))
    result = tune(problem, dataclasses.replace(SETTINGS, seed=3))
    assert_told(result, problem)
    topology = problem.model.machine.topology
    for share in (expert_parallel(problem.frequency, topology), expert_parallel_random(LAYERS, 6, 4, seed=3)):
        assert (result.cost <= seconds_of(problem, share, "lowest_host") * (1 + 1e-5)).all()
    fresh = problem.draw(64, seed=999)
    ours = evaluate(problem.model, jnp.asarray(result.share, jnp.float32), fresh).total.mean()
    theirs = evaluate(problem.model, jnp.asarray(expert_parallel_random(LAYERS, 6, 4, 3)), fresh).total.mean()
    assert ours < theirs


@pytest.mark.parametrize(
    ("exchanges", "message"),
    [
        (("magic",), "exchange is 'magic', expected one of lowest_host, .*reduce_scatter"),
        (("rings_3x1",), "exchange rings_3x1: a 2x2 mesh cannot be cut"),
        (("rings_3",), "exchange rings_3 needs equal groups of 4 nodes; use one of 1, 2, 4"),
    ],
)
def test_exchanges_that_no_machine_or_not_this_one_has_are_refused(exchanges, message):
    with pytest.raises(ExchangeError, match=message):
        small_problem(exchanges=exchanges)


def on_a_ring(exchanges: tuple[str, ...]) -> PlacementProblem:
    model = small_model()
    machine = dataclasses.replace(model.machine, topology=ring(4, bandwidth=1e9, latency=1e-7))
    return PlacementProblem(dataclasses.replace(model, machine=machine), small_trace(), 24, exchanges=exchanges)


def test_trees_of_a_mesh_alone_are_refused_elsewhere_unless_nobody_asked_for_them():
    with pytest.raises(ExchangeError, match=r"corner_host_split_tree needs a mesh.*use corner_host_tree"):
        on_a_ring(("corner_host_split_tree",))
    assert "least_loaded_tree" in on_a_ring(DEFAULT_EXCHANGES).gathers
    assert next(iter(on_a_ring(DEFAULT_EXCHANGES).gathers)) == "lowest_host"  # the model's own comes first


def test_replicas_need_whole_slots():
    model = dataclasses.replace(small_model(room=1.9), mode="replicated")
    with pytest.raises(PlanError, match=r"need 6 times an expert's memory, all nodes together have room for 4"):
        PlacementProblem(model, small_trace(), 24, exchanges=())


def test_small_problems_are_searched_as_asked():
    assert affordable(SETTINGS, small_problem()) == SETTINGS
    assert affordable(TunerSettings(), small_problem()) == TunerSettings()


def test_many_layers_have_smaller_searches_each():
    asked = TunerSettings()

    def cut(layers):
        trace = synthetic_trace(64, range(layers), EXPERTS, 2, skew=0.5, coactivation=0.0, reuse=0.0, seed=0)
        return affordable(asked, dataclasses.replace(small_problem(), trace=trace))

    assert cut(4) == asked
    many = cut(32)
    assert (many.restarts, many.steps, many.batches_per_step) == (2, 300, 1)  # restarts and batches are the least
    assert many.refine_batches == 8
    assert 32 * many.refine_steps * 8 == pytest.approx(1000 * 32, rel=0.01)  # moves that one layer alone has
    some = cut(8)
    assert (some.restarts, some.batches_per_step) == (12, 1)
    assert some.refine_steps * some.refine_batches == pytest.approx(1000 * 32 / 2 ** (5 / 3), rel=0.05)


def test_many_layers_are_judged_on_fewer_batches(monkeypatch):
    monkeypatch.setattr(evaluator, "SELECTION_BATCHES", (8, 64))
    monkeypatch.setattr(evaluator, "MANY_LAYERS_BATCHES", 16)

    def batches(layers):
        trace = synthetic_trace(64, range(layers), EXPERTS, 2, skew=0.5, coactivation=0.0, reuse=0.0, seed=0)
        problem = dataclasses.replace(small_problem(), trace=trace)
        return Evaluator(problem, 0, StopSwitch()).selection.weight.shape[1]

    assert [batches(layers) for layers in (4, 8, 32)] == [64, 32, 16]


def test_large_problems_are_searched_for_as_long_as_can_be_waited():
    problem, settings = small_problem(), TunerSettings(hybrid_cuts=3, seed=7, learning_rate=0.3)
    large = dataclasses.replace(problem, batch_tokens=10**6)  # batches are not drawn here
    cut = affordable(settings, large)
    assert cut.refine_steps < settings.refine_steps
    assert cut.refine_batches < settings.refine_batches
    for name, least in {"restarts": 2, "steps": 100, "batches_per_step": 2, "refine_steps": 100}.items():
        assert least <= getattr(cut, name) <= getattr(settings, name)
    assert cut.hybrid_cuts == 0
    kept = ("seed", "learning_rate", "refine_chains", "time_limit_s")
    assert all(getattr(cut, name) == getattr(settings, name) for name in kept)
    # Without a descent moves may take the time that it would have taken.
    many = TunerSettings(refine_steps=10**6)
    alone = dataclasses.replace(many, restarts=0)
    medium = dataclasses.replace(problem, batch_tokens=10**4)
    ratio = affordable(alone, medium).refine_steps / affordable(many, medium).refine_steps
    assert ratio == pytest.approx(ALONE, rel=0.05)
    brief = affordable(TunerSettings(restarts=1, steps=2, refine_steps=2, batches_per_step=1), large)
    assert (brief.restarts, brief.steps, brief.refine_steps, brief.batches_per_step) == (1, 2, 2, 1)  # never longer
