"""The tuner from end to end, on a problem of a second."""

import dataclasses
import os
import signal
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.compilations import compilations
from small_problem import LAYERS, SETTINGS, SHAPE, small_problem

from jaxmoe.engine import LayerTime, evaluate
from jaxmoe.network import build_exchange
from jaxmoe.placement import Placement, PlanError, check_fits, expert_parallel_random
from jaxmoe.placement.strategies import shipped_strategies
from jaxmoe.tune import PlacementProblem, TuneResult, evaluator, local_search, tune, tuner
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.settings import StopSwitch


def few_batches_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluator, "SELECTION_BATCHES", (8, 8))
    patch.setattr(evaluator, "REBALANCE_BATCHES", 32)


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    few_batches_in(monkeypatch)


@pytest.fixture(scope="module")
def tuned() -> TuneResult:
    with pytest.MonkeyPatch.context() as patch:
        few_batches_in(patch)
        return tune(small_problem(), SETTINGS)


def assert_legal(result: TuneResult, problem) -> None:
    plan = Placement(result.share.astype(np.float32), SHAPE, "sharded", tuple(range(LAYERS)))
    check_fits(plan, float(problem.model.costs.expert_bytes), np.asarray(problem.model.machine.capacity))
    assert (result.share.sum(axis=1) <= problem.room * (1 + 1e-4)).all()


def test_each_stage_is_at_least_as_good_as_the_one_before_and_none_beats_the_bound(tuned):
    assert_legal(tuned, small_problem())
    assert set(tuned.stages) == {"relaxed", "rounded", "rebalanced", "searched", "final"}
    rounded, rebalanced, refined = (tuned.stages[name] for name in ("rounded", "rebalanced", "searched"))
    assert (rounded >= rebalanced).all()
    assert (rebalanced >= refined).all()
    assert (refined < rounded).any()
    assert (tuned.bound <= refined).all()
    assert (tuned.bound > 0.2 * refined).all()
    assert tuned.stopped is None


def test_the_last_stage_is_the_exact_time_of_the_plan(tuned):
    problem = small_problem()
    run = Evaluator(problem, SETTINGS.seed, StopSwitch())  # draws the same selection batches
    total = evaluate(problem.model, jnp.asarray(tuned.gathered, jnp.float32), run.selection).total
    np.testing.assert_allclose(tuned.stages["searched"], total.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(tuned.bound, lower_bound(problem, run.selection), rtol=1e-6)


def test_with_many_nodes_tokens_choose_in_rounds_while_the_tuner_searches(monkeypatch):
    monkeypatch.setattr(tuner, "MANY_NODES", 1)
    searched = []
    improve, under = local_search.improve, PlacementProblem.under

    class Told:
        lower = staticmethod(improve.lower)

        def __call__(self, *given):
            searched.append(given[-2].name)
            return improve(*given)

    monkeypatch.setattr(local_search, "improve", Told())
    monkeypatch.setattr(PlacementProblem, "under", lambda *given: searched.append(given[-1].name) or under(*given))
    problem = small_problem(exchanges=())
    problem = problem.under(build_exchange("least_congested", problem.model.machine.topology))
    result = tune(problem, dataclasses.replace(SETTINGS, steps=25, refine_steps=100))
    assert searched[1:] == ["least_congested_by_4"] * 3  # a descent, and moves in two halves of the layers
    assert {*result.exchange, *result.gathered_exchange} == {"least_congested"}
    run = Evaluator(problem, SETTINGS.seed, StopSwitch())
    total = evaluate(problem.model, jnp.asarray(result.gathered, jnp.float32), run.selection).total
    np.testing.assert_allclose(result.stages["searched"], total.mean(axis=1), rtol=1e-5)


def test_history_and_wall_times_are_told(tuned):
    assert tuned.history["descent"].step == [25, 50]
    assert tuned.history["refinement"].step == [100, 200]
    assert all(
        seconds.shape == (LAYERS,) for seconds in tuned.history["descent"].seconds + tuned.history["refinement"].seconds
    )
    np.testing.assert_array_equal(tuned.history["descent"].seconds[-1], tuned.stages["relaxed"])
    assert set(tuned.seconds) == {
        "descent",
        "rounding",
        "rebalance",
        "refinement",
        "hybrids",
        "scoring",
        "strategies",
        "bound",
    }
    assert all(seconds >= 0 for seconds in tuned.seconds.values())


def test_a_seed_names_its_plan(tuned):
    again = tune(small_problem(), SETTINGS)
    np.testing.assert_array_equal(again.share, tuned.share)
    np.testing.assert_array_equal(again.stages["searched"], tuned.stages["searched"])
    other = tune(small_problem(), dataclasses.replace(SETTINGS, seed=6))
    assert not np.array_equal(other.history["descent"].seconds, tuned.history["descent"].seconds)
    assert_legal(other, small_problem())


def test_a_tuned_plan_beats_random_expert_parallelism_on_fresh_batches(tuned):
    problem = small_problem()
    batches = problem.draw(64, seed=12345)
    ours = evaluate(problem.model, jnp.asarray(tuned.share, jnp.float32), batches).total.mean(axis=1)
    dealt = [jnp.asarray(expert_parallel_random(LAYERS, 6, 4, seed)) for seed in range(12)]
    theirs = np.stack([evaluate(problem.model, share, batches).total.mean(axis=1) for share in dealt])
    assert (ours < 0.9 * theirs.mean(axis=0)).all()


def test_no_number_compiles_a_run_anew(tuned):
    settings = dataclasses.replace(
        SETTINGS,
        steps=75,
        refine_steps=100,
        learning_rate=0.1,
        sinkhorn_temperature=(0.8, 0.1),
        support_width=(0.7, 0.1),
        max_temperature=(0.2, 0.05),
        budget_spread=0.4,
        seed=9,
    )
    problem = small_problem(
        link_factor=2.0, flops_factor=0.5, message_factor=3.0, room=2.5, trace_seed=1, p95_weight=0.3
    )
    with compilations() as compiled:
        tune(problem, settings)
    assert compiled == []


@pytest.mark.parametrize("room", [1.6, [0.5, 1.0, 1.5, 3.25]])
def test_no_node_is_filled_beyond_its_room(room):
    problem = small_problem(room=np.array(room))
    result = tune(problem, SETTINGS)
    assert_legal(result, problem)
    stages = result.stages
    assert (stages["rounded"] >= stages["rebalanced"]).all()
    assert (stages["rebalanced"] >= stages["searched"]).all()
    assert (result.bound <= stages["searched"]).all()


def test_too_little_memory_is_refused():
    with pytest.raises(PlanError, match=r"need 6 times an expert's memory, all nodes together have room for 5\.6"):
        small_problem(room=1.4)


def test_the_time_limit_ends_a_run_with_a_legal_plan():
    result = tune(small_problem(room=1.6), dataclasses.replace(SETTINGS, time_limit_s=1e-6))
    assert result.stopped == "time limit"
    assert "descent" not in result.history  # there was no time to compile it
    assert result.history["refinement"].step == []
    assert_legal(result, small_problem(room=1.6))


def test_work_that_the_limit_does_not_leave_time_for_is_not_begun():
    stop = StopSwitch(time_limit_s=1000.0)
    assert stop.has(1.0)
    assert stop.reason is None
    assert not stop.has(1001.0)
    assert stop.reason == "time limit"
    assert StopSwitch().has(1e9)


@pytest.fixture
def handler():
    """A handler of Ctrl-C that must be back in its place afterwards."""
    before = signal.getsignal(signal.SIGINT)

    def mine(signum, frame):
        raise AssertionError("the tuner left Ctrl-C to its caller")

    signal.signal(signal.SIGINT, mine)
    yield mine
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("at", "steps"), [("descent", ([25], [])), ("refinement", ([25, 50], [100]))])
def test_ctrl_c_ends_the_stage_under_way_and_keeps_the_plan(handler, at, steps):
    def interrupt(stage, done, of):
        if stage == at and done:
            os.kill(os.getpid(), signal.SIGINT)

    result = tune(small_problem(), SETTINGS, interrupt)
    assert result.stopped == "interrupted"
    assert (result.history["descent"].step, result.history["refinement"].step) == steps
    assert_legal(result, small_problem())
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_ends_the_run_at_once(handler):
    seen = []

    def interrupt(stage, done, of):
        seen.append(stage)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tune(small_problem(), SETTINGS, lambda *now: (interrupt(*now), interrupt(*now)))
    assert set(seen) == {"exchanges"}
    assert signal.getsignal(signal.SIGINT) is handler


def test_outside_the_main_thread_ctrl_c_is_left_alone(handler):
    reasons = []

    def work():
        with StopSwitch(time_limit_s=1e-9) as stop:
            reasons.append(stop.reason)
            reasons.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reasons == ["time limit", handler]


def test_a_layer_that_tensor_parallelism_serves_faster_gets_it():
    ringing = tune(even_problem(), SETTINGS)
    faster = ringing.stages["final"] < ringing.stages["searched"]
    assert faster.all()
    np.testing.assert_array_equal(ringing.share, np.full_like(ringing.share, 1 / 4))
    run = Evaluator(even_problem(), SETTINGS.seed, StopSwitch())  # draws the same selection batches
    scored = evaluate(
        run.problem.model,
        jnp.asarray(ringing.share, jnp.float32),
        run.selection,
        build_exchange("ring_both_ways", run.problem.model.machine.topology),
    )
    np.testing.assert_allclose(ringing.stages["final"], scored.total.mean(axis=1), rtol=1e-5)


@pytest.mark.slow
def test_merged_batches_are_scored_as_well():
    result = tune(even_problem(tokens=64), SETTINGS)  # 30 kinds of token: batches are merged
    assert (result.stages["final"] < result.stages["searched"]).all()


def test_a_layer_that_gathers_faster_keeps_its_plan():
    single = dataclasses.replace(SETTINGS, descent_cuts=0, seed=4)
    gathering = tune(small_problem(), single)  # nodes differ, so even shares are slow
    np.testing.assert_array_equal(gathering.share, gathering.gathered)
    np.testing.assert_array_equal(gathering.stages["final"], gathering.stages["searched"])


def test_tensor_parallelism_that_does_not_fit_is_not_taken():
    result = tune(even_problem(room=np.array([0.5, 1.0, 1.5, 3.25])), SETTINGS)
    np.testing.assert_array_equal(result.share, result.gathered)


def even_problem(**machine) -> PlacementProblem:
    """Fast links all alike and nodes all alike: even work is what counts."""
    problem = small_problem(link_factor=10.0, **machine)
    numbers = (problem.model.machine.die.flops, problem.model.machine.topology.link_bandwidth)
    alike = [jnp.full_like(number, number.mean()) for number in numbers]
    where = lambda model: (model.machine.die.flops, model.machine.topology.link_bandwidth)  # noqa: E731
    return dataclasses.replace(problem, model=eqx.tree_at(where, problem.model, alike))


def test_batches_scored_a_few_at_a_time_score_the_same(monkeypatch):
    problem = small_problem(p95_weight=0.5)
    plans = expert_parallel_random(LAYERS, problem.trace.num_experts, problem.num_nodes, 0)[:, None].astype(float)
    together = Evaluator(problem, 0, StopSwitch()).score(plans)
    monkeypatch.setattr(evaluator, "at_once", lambda nodes: 2)
    np.testing.assert_allclose(Evaluator(problem, 0, StopSwitch()).score(plans), together, rtol=1e-5)


def test_times_of_parts_of_the_batches_join_to_those_of_all():
    problem = small_problem()
    share, batches = jnp.full((LAYERS, problem.trace.num_experts, problem.num_nodes), 1.0), problem.draw(6, 0)
    given = problem.model, share / problem.num_nodes
    parts = [evaluate(*given, batches.some(first, 3)).as_numpy() for first in (0, 3)]
    joined, whole = LayerTime.joined(parts), evaluate(*given, batches).as_numpy()
    assert jax.tree.structure(joined) == jax.tree.structure(whole)
    for one, other in zip(jax.tree.leaves(joined), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_an_exchange_that_is_far_slower_is_looked_at_alone(monkeypatch):
    monkeypatch.setattr(evaluator, "at_once", lambda nodes: 2)
    problem = small_problem(exchanges=("random_host",))
    run, asked = Evaluator(problem, 0, StopSwitch()), []
    seconds = {"lowest_host": 1.0, "random_host": 1.2}

    def part_seconds(share, exchange, part):
        asked.append((exchange.name, part))
        return np.full((LAYERS, run._at_once), seconds[exchange.name])

    monkeypatch.setattr(run, "_part_seconds", part_seconds)
    plan = np.full((LAYERS, problem.trace.num_experts, problem.num_nodes), 1 / problem.num_nodes)
    assert set(run.under_best(plan, problem.gathers).exchange) == {"lowest_host"}
    rest = [("lowest_host", part) for part in range(1, run._parts(None))]
    assert rest
    assert sorted(asked) == sorted([(name, 0) for name in seconds] + rest)


def test_the_best_shipped_strategy_is_that_of_a_loop_over_all_batches(monkeypatch):
    monkeypatch.setattr(evaluator, "at_once", lambda nodes: 2)  # so that a look has two batches of eight
    problem = small_problem(exchanges=("random_host", "reduce_scatter", "rings"))
    run, topology, least = Evaluator(problem, 0, StopSwitch()), problem.model.machine.topology, np.full(LAYERS, np.inf)
    for each in shipped_strategies(problem.frequency, topology, tuple(problem.gathers), 0, problem.pace):
        able = {name for name in each.exchanges if name in problem.gathers or name in problem.hybrids}
        for exchange in (problem.gathers.get(name) or build_exchange(name, topology) for name in able):
            seconds = evaluate(problem.model, jnp.asarray(each.share), run.selection, exchange).mean
            least = np.minimum(least, np.asarray(seconds))
    np.testing.assert_allclose(run.shipped.seconds, least, rtol=1e-5)
    assert set(run.strategies) < set(run.looks)


def test_uneven_work_is_divided_anew_and_even_work_is_not(monkeypatch):
    run, asked = Evaluator(even_problem(), 0, StopSwitch()), []

    def divided(support, *given):
        asked.append(support)
        raise PlanError("too many experts")

    monkeypatch.setattr(evaluator, "rebalance", divided)
    even = np.full((LAYERS, 1, run.problem.trace.num_experts, run.problem.num_nodes), 1 / run.problem.num_nodes)
    kept, _ = run.rebalance(even, run.score(even))
    np.testing.assert_array_equal(kept, even)
    assert asked == []
    uneven = np.zeros_like(even)
    uneven[..., 0] = 1
    with pytest.raises(PlanError, match="too many experts"):
        run.rebalance(uneven, run.score(uneven))


def opposed_topics() -> PlacementProblem:
    """Slow nodes, room for two whole experts each; all tokens of one topic choose expert 0, of the other expert 3."""
    problem = even_problem(room=2.0, message_factor=0.01, flops_factor=0.02)
    rng, experts = np.random.default_rng(0), problem.trace.num_experts
    topics = []
    for hot in (0, 3):
        scores = rng.gumbel(size=(600, LAYERS, experts))
        scores[..., hot] += 8
        chosen = np.argsort(-scores, axis=-1)[..., : problem.trace.top_k].astype(np.int16)
        topics.append(dataclasses.replace(problem.trace, experts=chosen))
    model = dataclasses.replace(problem.model, mode="replicated")
    return dataclasses.replace(problem, model=model, trace=topics[0], topics=tuple(topics), exchanges=())


@pytest.mark.slow
def test_a_plan_tuned_over_topics_serves_the_worst_of_them_better_than_one_tuned_on_another():
    problem = dataclasses.replace(opposed_topics(), worst_weight=1.0)
    batches = [dataclasses.replace(problem, trace=topic, topics=()).draw(16, seed=9) for topic in problem.topics]

    def seconds(result: TuneResult) -> np.ndarray:
        share = jnp.asarray(result.share, jnp.float32)
        exchange = build_exchange(result.exchange[0], problem.model.machine.topology)
        return np.array([evaluate(problem.model, share, some, exchange).total.mean() for some in batches])

    # The same topic twice is that topic alone, and compiles nothing anew.
    alone = [tune(dataclasses.replace(problem, topics=(topic, topic)), SETTINGS) for topic in problem.topics]
    robust, other = seconds(tune(problem, SETTINGS)), [seconds(alone[0])[1], seconds(alone[1])[0]]
    assert max(robust) < 0.9 * min(other)
