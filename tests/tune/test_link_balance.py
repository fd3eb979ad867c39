"""Which cluster lives on which node: three searches with one contract."""

import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.compilations import compilations
from small_problem import NODES, random_shares, small_problem

from jaxmoe.engine import evaluate
from jaxmoe.traces import Batch
from jaxmoe.tune.link_balance import METHODS, BestOrder, Budget, Question, bayesian, question_of, scorer
from jaxmoe.tune.settings import StopSwitch

TRIALS = {"bayesian": 96, "annealing": 300, "sinkhorn": 100}
ALL_ORDERS = np.array(list(itertools.permutations(range(NODES))))
each_method = pytest.mark.parametrize("method", METHODS)


def asked(seed: int = 0, layer: int = 1, **problem) -> Question:
    made = small_problem(**problem)
    share = random_shares(np.random.default_rng(seed))[layer]
    return question_of(made, share, layer, made.draw(6, seed=4))


def found(method: str, question: Question, seed: int = 0, **budget):
    return METHODS[method](question, seed, Budget(**({"trials": TRIALS[method]} | budget)))


def test_a_score_is_the_exact_time():
    problem, batches = small_problem(p95_weight=0.5), small_problem().draw(6, seed=3)
    share = random_shares(np.random.default_rng(0))
    orders = ALL_ORDERS[[0, 7, 23]]
    seconds = scorer(question_of(problem, share[1], 1, batches))(orders)
    one: Batch = jax.tree.map(lambda leaf: leaf[1:], batches)
    for order, scored in zip(orders, seconds, strict=True):
        total = evaluate(problem.model, jnp.asarray(share[1:, :, order]), one).total[0]
        assert scored == pytest.approx(float(total.mean() + 0.5 * (np.quantile(total, 0.95) - total.mean())), rel=1e-5)


@pytest.mark.parametrize(
    "method", [name if name == "annealing" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_the_best_of_all_orders_is_found_where_there_are_few(method):
    question = asked()
    seconds = scorer(question)(ALL_ORDERS)
    results = [found(method, question, seed) for seed in range(3)]
    for result in results:
        assert sorted(result.order.tolist()) == list(range(NODES))
        assert result.seconds == pytest.approx(float(scorer(question)(result.order[None])[0]), rel=1e-5)
        assert result.seconds < 0.95 * seconds[0]  # the identity
    # One seed may end in the valley beside.
    assert min(result.seconds for result in results) == pytest.approx(seconds.min(), rel=1e-5)
    assert seconds.max() > 1.05 * seconds.min()


@each_method
def test_no_search_is_worse_than_the_identity(method):
    question = asked()
    best = scorer(question)(ALL_ORDERS).argmin()
    # The best order comes first: all that a search can do is harm.
    at_best = question._replace(share=question.share[:, ALL_ORDERS[best]])
    short = {"bayesian": 8, "annealing": 100, "sinkhorn": 10}[method]
    result = found(method, at_best, trials=short)
    np.testing.assert_array_equal(result.order, np.arange(NODES))


@each_method
def test_the_history_tells_the_best_so_far(method):
    result = found(method, asked())
    seconds = np.array(result.history.seconds)
    assert result.history.step[0] == 0
    assert result.history.step[-1] >= TRIALS[method]
    assert (np.diff(result.history.step) > 0).all()
    assert (np.diff(seconds) <= 0).all()
    assert seconds[-1] == pytest.approx(result.seconds)


@each_method
def test_a_seed_names_its_mapping(method):
    short = {"bayesian": 16, "annealing": 100, "sinkhorn": 10}[method]
    one, again, other = (found(method, asked(), seed, trials=short) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.order, again.order)
    assert one.history.seconds == again.history.seconds
    longer, longer_other = (found(method, asked(), seed) for seed in (0, 1))
    assert longer.seconds <= one.seconds
    assert longer_other.seconds <= other.seconds


@each_method
def test_the_stop_switch_ends_a_search_with_the_identity(method):
    with StopSwitch(time_limit_s=1e-9) as stop:
        result = found(method, asked(), stop=stop)
    np.testing.assert_array_equal(result.order, np.arange(NODES))
    assert result.history.step == [0]


@each_method
def test_time_ends_a_search(method):
    found(method, asked(), seconds=1e-9, trials=None)  # compiles
    begun, parts = time.perf_counter(), []
    result = found(method, asked(), seconds=0.3, trials=None, report=parts.append)
    assert 0.2 < time.perf_counter() - begun < 2
    assert result.history.step[-1] > 0
    assert parts == sorted(parts)
    assert parts[0] == 0
    assert parts[-1] == 1


@each_method
def test_no_number_compiles_a_search_anew(method):
    found(method, asked())
    question = asked(seed=2, link_factor=3.0, p95_weight=0.3, trace_seed=1)
    with compilations() as compiled:
        found(method, question, seed=7)
    assert compiled == []


def test_another_objective_may_judge():
    seen = []

    def distance(orders: np.ndarray) -> np.ndarray:
        """From the reversed order; the exact model would not care."""
        seen.append(len(orders))
        return 1.0 + (orders != np.arange(NODES)[::-1]).sum(axis=1)

    result = bayesian(asked(), 0, Budget(trials=96), distance)
    np.testing.assert_array_equal(result.order, np.arange(NODES)[::-1])
    assert result.seconds == 1
    assert sum(seen) == 97


def test_optuna_stays_silent(capfd):
    found("bayesian", asked(), trials=16)
    assert capfd.readouterr() == ("", "")


def test_a_missing_optuna_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"needs optuna.*pip install '.*\[bayes\]'"):
        found("bayesian", asked())


@pytest.mark.parametrize("limits", [{}, {"trials": 0}, {"seconds": 0.0}, {"seconds": 1.0, "trials": -1}])
def test_a_budget_without_an_end_is_refused(limits):
    with pytest.raises(ValueError, match="give at least one of them, above 0"):
        Budget(**limits)


def test_the_best_is_kept_whatever_follows():
    best = BestOrder.identity(lambda orders: np.full(len(orders), 5.0), 3)
    best.see(1, np.array([[2, 1, 0], [1, 0, 2]]), np.array([4.0, 3.0]))
    best.see(2, np.array([[2, 1, 0]]), np.array([4.0]))
    np.testing.assert_array_equal(best.order, [1, 0, 2])
    assert best.history.step == [0, 1, 2]
    assert [float(seconds) for seconds in best.history.seconds] == [5, 3, 3]
