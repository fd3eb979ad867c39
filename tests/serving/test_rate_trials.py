"""Trials that end early answer what whole ones do, by fewer requests."""

import numpy as np
import pytest
from served_by_hand import served_by_hand
from test_work_bound import ONE_TOKEN, SECOND, TEN, drawn_serving

from jaxmoe.experiment.rate_trials import RateTrials, over_limits
from jaxmoe.experiment.serving import Serving
from jaxmoe.serving.online.arrivals import mean_rate
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.requests import Requests

NEVER = -1.0
NOW = 10.0  # the last request's first token


def test_requests_over_their_limits_are_told_before_they_end():
    rows = {
        "done in time": (0.0, 1.0, 3.0, False),
        "done late": (0.0, 5.0, 6.0, True),
        "done slowly": (0.0, 1.0, 9.0, True),
        "decodes, in time": (5.0, 7.0, NEVER, False),
        "decodes for too long": (0.0, 2.0, NEVER, True),
        "waits for too long": (5.0, NEVER, NEVER, True),
        "waits": (8.0, NEVER, NEVER, False),
        "not there yet": (NEVER, NEVER, NEVER, False),
        "the last": (9.0, NOW, NEVER, False),
    }
    sent, first, finish, over = (np.array(column) for column in zip(*rows.values(), strict=True))
    requests = Requests(np.arange(9.0), np.ones(9, int), np.full(9, 3))
    limits = Limits(first_token=4.0, per_token=2.0)
    for row, name in enumerate(rows):
        others = np.where(np.arange(9) == row, sent, NEVER)
        alone = served_by_hand(others, sent, np.where(others < 0, NEVER, first), np.where(others < 0, NEVER, finish))
        alone.first_token[8] = NOW  # so late it is
        alone.sent[8] = 9.0
        assert over_limits(requests, alone, limits) == over[row], name
    assert over_limits(requests, served_by_hand(sent, sent, first, finish), limits) == over.sum()


def test_early_ends_answer_what_whole_runs_do(monkeypatch):
    monkeypatch.setattr("jaxmoe.serving.online.simulate.LOOK", 2)
    fewer, answers = 0, set()
    for seed in range(60):
        if (own := drawn_serving(seed)) is None:
            continue
        for rate in mean_rate(own.requests) * np.array([0.1, 1.0, 10.0, 100.0]):
            early = RateTrials(own)
            assert early.meets(rate) == own.meets(rate), (seed, rate)
            assert early.simulated <= len(own.requests)
            fewer += early.simulated < len(own.requests)
            answers.add(early.meets(rate))
    assert answers == {True, False}
    assert fewer > 20


def test_a_rate_is_tried_once_and_requests_are_counted():
    trials = RateTrials(Serving(ONE_TOKEN, TEN, SECOND, Limits(1.5, 1.0, 1.0), 1), ends_early=False)
    assert trials.highest(0.25, 0.01) == pytest.approx(1 / 0.95, rel=0.01)  # the last of 11 waits for 0.5 s
    before = trials.simulated
    assert before % 11 == 0
    assert trials.meets(0.25)
    assert trials.simulated == before
