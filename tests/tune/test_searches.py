"""Annealing, greedy construction and random search, all by the contract of every optimiser."""

import dataclasses
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from small_problem import LAYERS, NODES, small_problem

from jaxmoe.engine import evaluate
from jaxmoe.tune import PlacementProblem, TuneResult, evaluator
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.gradient_free import (
    AnnealSettings,
    GreedySettings,
    RandomSettings,
    anneal,
    greedy,
    random_search,
    random_starts,
)
from jaxmoe.tune.results import BestSoFar, PlanSoFar, best_so_far
from jaxmoe.tune.settings import StopSwitch

SEARCHES = {
    "anneal": (anneal, AnnealSettings(chains=2, steps=200, batches=8, seed=3)),
    "greedy": (greedy, GreedySettings(batches=8, seed=3)),
    "random": (random_search, RandomSettings(plans=64, batches=8, seed=3)),
}


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    monkeypatch.setattr(evaluator, "SELECTION_BATCHES", (8, 8))
    monkeypatch.setattr(evaluator, "REBALANCE_BATCHES", 32)


def run(name: str, problem: PlacementProblem, progress=lambda *_: None, **changed) -> TuneResult:
    search, settings = SEARCHES[name]
    return search(problem, dataclasses.replace(settings, **changed), progress)


def assert_legal(result: TuneResult, problem: PlacementProblem) -> None:
    assert result.share.shape == (LAYERS, problem.trace.num_experts, NODES)
    assert (result.share >= 0).all()
    np.testing.assert_allclose(result.share.sum(axis=2), 1, rtol=1e-6)
    assert (result.share.sum(axis=1) <= problem.room * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", [pytest.param("anneal", marks=pytest.mark.slow), "greedy", "random"])
def test_the_result_is_a_legal_plan_with_its_exact_cost(name):
    problem = small_problem()
    result = run(name, problem)
    assert_legal(result, problem)
    selection = Evaluator(problem, 3, StopSwitch()).selection
    total = evaluate(problem.model, jnp.asarray(result.gathered, jnp.float32), selection).total
    np.testing.assert_allclose(result.stages["searched"], total.mean(axis=1), rtol=1e-5)
    assert (result.bound <= result.stages["searched"]).all()
    assert (result.bound <= result.cost).all()
    # Every layer has what was searched, or the best shipped strategy, which is then at least nearly as fast.
    assert ((result.cost == result.stages["searched"]) | (result.cost == result.shipped.seconds)).all()
    assert (result.cost <= result.shipped.seconds).all()
    assert result.stopped is None
    assert result.seed == 3
    assert 0 < result.wall_s == pytest.approx(sum(result.seconds.values()))


@pytest.mark.parametrize("name", SEARCHES)
def test_it_finds_something_better_than_a_plan_without_preference(name):
    problem = small_problem()
    batches = problem.draw(64, seed=99)
    starts = random_starts(Evaluator(problem, 0, StopSwitch()), 16, seed=7)
    drawn = [
        evaluate(problem.model, jnp.asarray(plan, jnp.float32), batches).total.mean() for plan in starts.swapaxes(0, 1)
    ]
    found = evaluate(problem.model, jnp.asarray(run(name, problem).gathered, jnp.float32), batches).total.mean()
    assert found < np.mean(drawn)


@pytest.mark.parametrize("name", SEARCHES)
def test_its_history_tells_of_every_layer_and_its_progress_ends(name):
    seen = []
    result = run(name, small_problem(), lambda *now: seen.append(now))
    (history,) = result.history.values()
    assert len(history.step) == len(history.seconds) > 0
    assert all(seconds.shape == (LAYERS,) for seconds in history.seconds)
    stage = next(iter(result.history))
    assert [done == of for told, done, of in seen if told == stage][-1]


def test_random_search_never_gets_worse():
    history = run("random", small_problem()).history["random search"]
    assert (np.diff(np.stack(history.seconds), axis=0) <= 0).all()


@pytest.mark.parametrize("name", SEARCHES)
def test_a_seed_names_its_plan(name):
    np.testing.assert_array_equal(run(name, small_problem()).share, run(name, small_problem()).share)


@pytest.mark.parametrize("name", SEARCHES)
def test_no_node_is_filled_beyond_its_room(name):
    problem = small_problem(room=np.array([0.5, 1.0, 1.5, 3.25]))
    assert_legal(run(name, problem), problem)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_time_limit_leaves_a_legal_plan(name):
    problem = small_problem(room=1.6)
    result = run(name, problem, time_limit_s=1e-6)
    assert result.stopped == "time limit"
    assert_legal(result, problem)


@pytest.mark.parametrize("name", SEARCHES)
def test_ctrl_c_leaves_a_legal_plan(name):
    def interrupt(stage, done, of):
        if done < of:
            os.kill(os.getpid(), signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough

    before = signal.getsignal(signal.SIGINT)
    try:
        result = run(name, small_problem(), interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.stopped == "interrupted"
    assert_legal(result, small_problem())


def test_given_batches_are_all_that_counts():
    drawn = small_problem().draw(2, seed=5)
    problem = dataclasses.replace(small_problem(), batches=drawn)
    result = run("greedy", problem)
    total = evaluate(problem.model, jnp.asarray(result.gathered, jnp.float32), drawn).total
    np.testing.assert_allclose(result.stages["searched"], total.mean(axis=1), rtol=1e-5)
    counts = np.bincount(np.asarray(drawn.experts[0]).ravel(), minlength=problem.trace.num_experts)
    np.testing.assert_allclose(problem.frequency[0], np.maximum(counts, 0.1) / np.maximum(counts, 0.1).sum())


def test_starts_have_even_work():
    problem = small_problem()
    flops = np.asarray(problem.model.machine.die.flops, float)
    starts = random_starts(Evaluator(problem, 0, StopSwitch()), 3, seed=1)
    work = np.einsum("le,lcen->lcn", problem.frequency, starts)
    np.testing.assert_allclose(work, np.broadcast_to(flops / flops.sum(), work.shape), rtol=1e-6)
    assert not np.array_equal(starts[:, 0], starts[:, 1])


# What those know who may have to end the process before the search ends.


@pytest.mark.parametrize("name", SEARCHES)
def test_the_best_plan_so_far_fits_and_in_the_end_is_the_best_of_all(name):
    best, problem = BestSoFar(), small_problem(room=1.6)
    token = best_so_far.set(best)
    try:
        result = run(name, problem)
    finally:
        best_so_far.reset(token)
    assert (best.found.seconds <= result.cost * (1 + 1e-6)).all()
    assert_legal(dataclasses.replace(result, share=best.found.plan), problem)
    assert set(best.found.exchange) <= {*problem.gathers, *problem.named, *problem.hybrids}


def test_the_best_so_far_is_chosen_layer_by_layer():
    best, problem, other = BestSoFar(), small_problem(), small_problem()

    def offer(problem: PlacementProblem, kind: float, seconds: list[float], exchange: str) -> None:
        best.offer(PlanSoFar(problem, np.full((2, 1, 1), kind), np.array(seconds), np.full(2, exchange, object)))

    offer(problem, 1, [np.inf, np.inf], "any")  # not yet scored
    offer(problem, 2, [3.0, 5.0], "one")
    offer(problem, 3, [4.0, 2.0], "two")
    assert best.found.plan.ravel().tolist() == [2, 3]
    assert best.found.seconds.tolist() == [3, 2]
    assert best.found.exchange.tolist() == ["one", "two"]
    offer(other, 4, [1.0, 4.5], "three")  # plans of two problems do not go together, and this one is slower
    assert best.found.problem is problem
    offer(other, 5, [1.0, 3.0], "three")
    assert best.found.plan.ravel().tolist() == [5, 5]
