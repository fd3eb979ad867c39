"""Requests that wait at a layer for others (FSE-DP): by hand, compiled against plain, and laws of waiting."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from online_scenarios import (
    SECOND,
    assert_same,
    both,
    drawn_buffering,
    drawn_changes,
    drawn_scenario,
    requests_of,
    times_of,
    with_one_rank,
)
from oracles.serving import serve_plainly

from jaxmoe.errors import InputError
from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable, Term


@pytest.mark.parametrize("seed", range(50))
def test_compiled_as_plain_with_requests_that_wait(seed):
    scenario = with_one_rank(drawn_scenario(seed))
    changes = drawn_changes(seed, scenario.fleet) if seed % 2 else []
    buffering = drawn_buffering(seed, scenario.requests)
    plain = serve_plainly(*scenario, changes, buffering)
    assert_same(plain, serve(*scenario, token_times=True, steps=True, changes=changes, buffering=buffering))
    brief = replace(plain, token_starts=np.zeros(0, int), token_times=np.zeros(0), steps=None)
    assert_same(brief, serve(*scenario, changes=changes, buffering=buffering))


@given(seed=st.integers(100, 10**6))
@settings(max_examples=50)
def test_laws_of_waiting(seed):
    """Nobody is lost, nobody waits more often than the slack allows, and without slack nobody does."""
    scenario = with_one_rank(drawn_scenario(seed))
    requests, buffering = scenario.requests, drawn_buffering(seed, scenario.requests)
    served = serve(*scenario, token_times=True, steps=True, buffering=buffering)
    assert [len(times) for times in times_of(served)] == requests.output.tolist()
    most = requests.output // buffering.passes if buffering.passes else 0 * requests.output
    assert (served.deferrals <= most).all()
    if not served.preemptions.any():
        assert served.steps is not None
        assert served.steps.tokens.sum() == (requests.prompt - served.cached + requests.output - 1).sum()


def test_requests_of_random_scenarios_wait():
    scenarios = [with_one_rank(drawn_scenario(seed)) for seed in range(50)]
    every = [serve(*each, buffering=drawn_buffering(seed, each.requests)) for seed, each in enumerate(scenarios)]
    assert sum((served.deferrals > 0).sum() for served in every) > 100


def test_a_request_waits_for_others_that_choose_its_expert():
    """Two layers. Attention of a layer takes 0.5 s if any token comes to it, and each expert that is loaded 1 s; a step
    takes the mean of its layers. Prompts load experts 0 and 1, then 0: 0.5 + 2 and 0.5 + 1. Outputs choose 1 and 2, a
    token each: both requests wait, after 0.5 s of attention in the first layer, and go on without it, 2 and 0.5 + 1."""
    experts = np.array([[[0], [0]], [[0], [0]], [[1], [0]], [[2], [0]]])
    table = StepTable(
        (
            Term("attention", ("tokens",), (np.array([0.0, 1.0, 2.0]),), np.array([0.0, 0.5, 0.5])),
            Term("experts", ("loaded",), (np.array([0.0, 1.0, 2.0]),), np.array([0.0, 1.0, 2.0])),
        )
    )
    requests, fleet = requests_of((0, 1, 2), (0, 1, 2)), Fleet(Engine())
    asked = RequestBuffering(experts, np.array([1, 2]), 3, slack=1.0)
    served = both(requests, fleet, table, buffering=asked)
    assert list(served.deferrals) == [1, 1]
    assert times_of(served) == [[2.0, 4.0], [2.0, 4.0]]
    without = both(requests, fleet, table, buffering=replace(asked, slack=0.0))
    assert times_of(without) == [[2.0, 4.0], [2.0, 4.0]]
    assert served.steps is not None
    assert list(served.steps.seconds) == [2.0, 0.25, 1.75]
    assert list(served.steps.tokens) == [2, 0, 2]


def test_waiting_alone_is_no_faster():
    """Two layers, experts in the last. Attention takes 0.5 s in a layer with tokens, the head 1 s for a pass that ends.
    The request waits at the last layer in every pass but the first, and its pass ends in a step without attention."""
    experts = np.array([[[-1], [0]]])
    table = StepTable(
        (
            Term("attention", ("tokens",), (np.array([0.0, 1.0]),), np.array([0.0, 0.5])),
            Term("head", ("sequences",), (np.array([0.0, 1.0]),), np.array([0.0, 1.0])),
        )
    )
    asked = RequestBuffering(experts, np.array([0]), 1, slack=1.0)
    served = both(requests_of((0, 1, 3)), Fleet(Engine()), table, buffering=asked)
    assert list(served.deferrals) == [2]
    assert times_of(served) == [[1.5, 3.0, 4.5]]
    without = both(requests_of((0, 1, 3)), Fleet(Engine()), table, buffering=replace(asked, slack=0.0))
    assert times_of(without) == [[1.5, 3.0, 4.5]]


def test_hardly_any_slack_is_none():
    experts, come = np.zeros((4, 2, 1), int), requests_of((0, 1, 9), (0, 1, 9))
    asked = RequestBuffering(experts, np.zeros(2, int), 1, slack=1e-20, least_tokens=9)
    assert not both(come, Fleet(Engine()), SECOND, buffering=asked).deferrals.any()


def test_waiting_that_cannot_be_is_told():
    experts = np.zeros((4, 2, 1), int)
    for slack in (2.0, -0.1, float("nan")):
        with pytest.raises(InputError, match=rf"buffering\.slack is {slack:g}; expected 0 to 1"):
            RequestBuffering(experts, np.zeros(1, int), 1, slack)
    asked = RequestBuffering(experts, np.zeros(1, int), 1, 0.5)
    for simulate in (serve, serve_plainly):
        with pytest.raises(InputError, match=r"engine\.ranks is 2; expected 1 with buffering"):
            simulate(requests_of((0, 1, 1)), Fleet(Engine(ranks=2)), SECOND, buffering=asked)
        with pytest.raises(InputError, match=r"buffering\.first has 1 rows; expected the 2"):
            simulate(requests_of((0, 1, 1), (0, 1, 1)), Fleet(Engine()), SECOND, buffering=asked)
