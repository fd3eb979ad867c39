"""The highest rate that work leaves to engines: by hand, and never below a rate that is served."""

from dataclasses import replace

import numpy as np
import pytest
from online_scenarios import Scenario, constant, drawn_scenario

from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.serving import Serving
from jaxmoe.serving.online.arrivals import mean_rate
from jaxmoe.serving.online.engine import DecodePool, Engine, Fleet
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import StepTable, Term
from jaxmoe.serving.online.work_bound import Kinds, RankWork, _least_kinds, least_seconds, rate_bound, rate_estimate

TEN = Fleet(Engine(token_budget=10, seats=4))
SECOND = constant(1.0)
ONE_TOKEN = Requests(np.arange(11.0), np.full(11, 10), np.ones(11, int))  # each fills a step of `TEN`
ALL_IN_TIME = Limits(first_token=2.0, per_token=1.0, part=1.0)


def test_least_seconds_mix_kinds_of_steps_as_the_limit_per_token_asks():
    """One sequence in 1 s a step, or four in 2 s. 12 tokens take 6 s at best; at 1.5 s a token, half are alone: 9 s."""
    kinds = Kinds(np.array([1.0, 2.0]), np.array([1.0, 4.0]), np.zeros(2), np.array([1.0, 8.0]))
    work = RankWork(0.0, 12.0, 12.0)
    assert least_seconds(kinds, work, np.inf) == pytest.approx(6)
    assert least_seconds(kinds, work, 1.5) == pytest.approx(9)
    assert least_seconds(kinds, work, 0.9) == np.inf


def test_a_bound_by_hand():
    """11 steps of 1 s are done 2 s after the last arrival: ten gaps in 9 s at most."""
    assert rate_bound(ONE_TOKEN, TEN, SECOND, ALL_IN_TIME) == pytest.approx(10 / 9)
    assert rate_bound(ONE_TOKEN, replace(TEN, engines=2), SECOND, ALL_IN_TIME) == pytest.approx(10 / 3.5)
    assert rate_bound(ONE_TOKEN, TEN, SECOND, Limits(first_token=20.0, per_token=1.0)) == np.inf  # all at once
    assert rate_bound(ONE_TOKEN, TEN, SECOND, Limits(first_token=2.0)) == np.inf  # no limit per token


def test_a_tenth_of_ten_requests_is_one_that_may_be_late():
    """Nine steps of 1 s are done 2 s after the last arrival: nine gaps in 7 s at most."""
    ten = Requests(np.arange(10.0), np.full(10, 10), np.ones(10, int))
    assert rate_bound(ten, TEN, SECOND, Limits(2.0, 1.0, part=0.9)) == pytest.approx(9 / 7)


def test_a_limit_per_token_that_no_step_keeps_leaves_no_rate():
    two = replace(ONE_TOKEN, output=np.full(11, 2))
    assert rate_bound(two, TEN, SECOND, Limits(2.0, 0.5, 1.0)) == 0
    assert rate_estimate(two, TEN, SECOND, Limits(2.0, 0.5, 1.0)) == 0


def test_an_estimate_by_hand():
    """A request takes a step of 10 tokens; with a pool that decodes, this one's 3 further tokens at 4 a step do not."""
    assert rate_estimate(ONE_TOKEN, TEN, SECOND, ALL_IN_TIME) == pytest.approx(1)
    several = replace(ONE_TOKEN, output=np.full(11, 4))
    pool = replace(TEN, decode=DecodePool(Engine(token_budget=10, seats=4), 0.0, 1.0))
    assert rate_estimate(several, pool, SECOND, ALL_IN_TIME) == pytest.approx(1)
    slow = replace(pool, decode=DecodePool(Engine(token_budget=10, seats=2), 0.0, 1.0))
    assert rate_estimate(several, slow, SECOND, ALL_IN_TIME) == pytest.approx(1 / 1.5)
    shared = replace(ONE_TOKEN, prefix_starts=np.arange(12), prefix_blocks=np.zeros(11, int), prefix_tokens=8)
    assert rate_estimate(shared, TEN, SECOND, ALL_IN_TIME) == pytest.approx(5)  # 2 tokens of each are its own


def test_ranks_that_decode_and_ranks_that_read_may_be_others():
    """Of two ranks one decodes 10 and the other reads 60: 60 s, at 1 s a token and 50 s beside any that decode."""
    axes = [np.array([0.0, 100.0]), np.array([0.0, 1.0, 100.0])]
    table = StepTable(
        (
            Term("layers", ("tokens",), (axes[0],), axes[0]),
            Term("decode attention", ("decoding",), (axes[1],), np.array([0.0, 50.0, 50.0])),
        )
    )
    found = _least_kinds(Engine(token_budget=100, seats=64, ranks=2), table)
    assert found.seconds[(found.decoding >= 5) & (found.read >= 30)].min() <= 60


def rising(table: StepTable) -> StepTable:
    """The table with seconds that grow with every feature."""
    terms = []
    for term in table.terms:
        values = np.asarray(term.values)
        for axis in range(values.ndim):
            values = np.maximum.accumulate(values, axis)
        terms.append(term._replace(values=values))
    return StepTable(tuple(terms))


def drawn_serving(seed: int) -> Serving | None:
    """Random requests that come at a rate, engines and limits."""
    scenario: Scenario = drawn_scenario(seed)
    if not np.isfinite(mean_rate(scenario.requests)) or len(scenario.requests) < 2:
        return None
    rng = np.random.default_rng(seed)
    limits = Limits(float(rng.uniform(0.02, 2)), float(rng.uniform(0.01, 0.2)), float(rng.choice([0.5, 0.9, 1.0])))
    return Serving(scenario.requests, replace(scenario.fleet, users=None), rising(scenario.table), limits, 1)


def test_no_rate_over_the_bound_is_served():
    served, bounded = 0, 0
    for seed in range(80):
        if (own := drawn_serving(seed)) is None:
            continue
        bound = rate_bound(own.requests, own.fleet, own.table, own.limits)
        trials = RateTrials(own, ends_early=False)
        rates = mean_rate(own.requests) * 2.0 ** np.arange(-4, 8)
        met = [rate for rate in rates if trials.meets(rate)]
        assert not met or max(met) <= bound * (1 + 1e-9), seed
        served, bounded = served + bool(met), bounded + (bound < rates[-1])
    assert served > 20
    assert bounded > 10
