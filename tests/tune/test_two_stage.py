"""hd_moe's two stages from end to end, on a problem of a second."""

import dataclasses
import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest
from small_problem import LAYERS, NODES, small_problem

from jaxmoe.engine import evaluate
from jaxmoe.tune import PlacementProblem, TuneResult, evaluator
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.link_balance import METHODS
from jaxmoe.tune.node_balance import node_balance
from jaxmoe.tune.results import History
from jaxmoe.tune.settings import StopSwitch
from jaxmoe.tune.two_stage import TwoStageSettings, together, two_stage

SETTINGS = TwoStageSettings(node_time_s=0.5, link_time_s=0.3, link_batches=6, seed=5)


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    monkeypatch.setattr(evaluator, "SELECTION_BATCHES", (8, 8))


def assert_legal(result: TuneResult, problem: PlacementProblem) -> None:
    assert result.share.shape == (LAYERS, problem.trace.num_experts, NODES)
    assert (result.share >= 0).all()
    np.testing.assert_allclose(result.share.sum(axis=2), 1, rtol=1e-6)
    assert (result.share.sum(axis=1) <= problem.room * (1 + 1e-4)).all()


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow) if name == "bayesian" else name for name in METHODS]
)
def test_both_stages_make_a_legal_plan_with_its_exact_cost(method):
    problem, reported = small_problem(), []
    result = two_stage(problem, dataclasses.replace(SETTINGS, link_method=method), lambda *now: reported.append(now))
    assert_legal(result, problem)
    assert list(result.stages) == ["node_balanced", "searched", "final"]
    selection = Evaluator(problem, 5, StopSwitch()).selection
    total = evaluate(problem.model, jnp.asarray(result.gathered, jnp.float32), selection).total
    np.testing.assert_allclose(result.stages["searched"], total.mean(axis=1), rtol=1e-5)
    assert (result.bound <= result.stages["searched"]).all()
    assert result.stopped is None
    assert set(result.seconds) == {"node balance", "link balance", "scoring", "strategies", "bound"}
    history = result.history["link balance"]
    assert history.step[0] == 0
    assert all(seconds.shape == (LAYERS,) for seconds in history.seconds)
    assert (np.diff(history.seconds, axis=0) <= 0).all()
    for stage in ("node balance", "link balance"):
        done = [step for name, step, _ in reported if name == stage]
        assert done == sorted(done)
        assert done[0] == 0
        assert done[-1] == 100 * LAYERS
        assert {of for name, _, of in reported if name == stage} == {100 * LAYERS}
    assert reported[-1] == ("link balance", 100 * LAYERS, 100 * LAYERS)


def test_known_node_balances_are_mapped_as_they_are():
    problem = small_problem(room=1.6)
    balanced = [node_balance(problem, layer, 1.0, 1.0) for layer in range(LAYERS)]
    result = two_stage(problem, SETTINGS, balanced=balanced)
    assert "node balance" not in result.seconds
    run = Evaluator(problem, 5, StopSwitch())
    shares = np.stack([node.share for node in balanced])
    np.testing.assert_allclose(result.stages["node_balanced"], run.score(shares[:, None])[:, 0], rtol=1e-6)
    for plan, share in zip(result.gathered, shares, strict=True):
        # The same columns in another order.
        np.testing.assert_array_equal(plan[:, np.lexsort(plan)], share[:, np.lexsort(share)])
    with pytest.raises(ValueError, match="balanced has 1 layers, the problem 2"):
        two_stage(problem, SETTINGS, balanced=balanced[:1])


def test_a_bad_order_of_the_clusters_is_put_right():
    problem = small_problem(link_factor=0.1)  # so slow that paths are all that counts
    balanced = [node_balance(problem, layer, 1.0, 1.0) for layer in range(LAYERS)]
    swapped = [dataclasses.replace(node, share=node.share[:, [1, 2, 0, 3]]) for node in balanced]
    longer = dataclasses.replace(SETTINGS, link_method="annealing", link_time_s=1.0)  # enough where others work as well
    result = two_stage(problem, longer, balanced=swapped)
    assert (result.stages["searched"] < 0.99 * result.stages["node_balanced"]).all()


@pytest.mark.slow
def test_the_time_limit_is_shared_out():
    settings = dataclasses.replace(SETTINGS, node_time_s=60.0, link_time_s=60.0, time_limit_s=4.0)
    two_stage(small_problem(), SETTINGS)  # compiles
    begun = time.perf_counter()
    result = two_stage(small_problem(room=1.6), settings)
    assert time.perf_counter() - begun < 8
    assert_legal(result, small_problem(room=1.6))
    assert len(result.history["link balance"].step) > 2


def test_a_limit_that_is_over_at_once_leaves_the_even_plan():
    problem = small_problem(room=1.6)
    result = two_stage(problem, dataclasses.replace(SETTINGS, time_limit_s=1e-6))
    assert result.stopped == "time limit"
    assert_legal(result, problem)
    assert result.history["link balance"].step == [0]
    np.testing.assert_array_equal(result.stages["searched"], result.stages["node_balanced"])


@pytest.mark.parametrize("at", ["node balance", "link balance"])
def test_ctrl_c_leaves_a_legal_plan_of_every_layer(at):
    problem, struck = small_problem(), []

    def interrupt(stage, done, of):
        if stage == at and not struck:
            struck.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

    result = two_stage(problem, dataclasses.replace(SETTINGS, node_time_s=20.0, link_time_s=20.0), interrupt)
    assert time.perf_counter() - struck[0] < 10
    assert result.stopped == "interrupted"
    assert_legal(result, problem)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="link_method is 'magic', expected one of bayesian, annealing, sinkhorn"):
        TwoStageSettings(link_method="magic")


def test_histories_of_unequal_length_become_one():
    long, short = History([0, 8, 16], [np.array(3.0), np.array(2.0), np.array(1.0)]), History([0], [np.array(9.0)])
    joint = together([short, long])
    assert joint.step == [0, 8, 16]
    np.testing.assert_array_equal(joint.seconds, [[9, 3], [9, 2], [9, 1]])
