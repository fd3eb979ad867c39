"""Trials that end early answer what whole ones do, by fewer requests."""

import numpy as np
import pytest
from served_by_hand import served_by_hand
from test_work_bound import ONE_TOKEN, SECOND, TEN, drawn_serving

from jaxmoe.experiment.rate_trials import RateTrials, hardly_fills, over_limits
from jaxmoe.experiment.serving import Serving
from jaxmoe.serving.online.arrivals import mean_rate
from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.capacity import drained_rate
from jaxmoe.serving.online.metrics import Limits, waits_of
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


def keeps_limits(own: Serving, rate: float) -> bool:
    """Of a whole run, by the waits of each request."""
    requests, served = own.at(rate)
    within = waits_of(requests, served).within(own.limits)
    return within.sum() >= own.limits.part * len(requests) and drained_rate(served) is None


def test_early_ends_answer_what_whole_runs_do(monkeypatch):
    monkeypatch.setattr("jaxmoe.serving.online.simulate.LOOK", 2)
    fewer, answers = 0, set()
    for seed in range(60):
        if (own := drawn_serving(seed)) is None:
            continue
        for rate in mean_rate(own.requests) * np.array([0.1, 1.0, 10.0, 100.0]):
            early = RateTrials(own)
            assert early.meets(rate) == keeps_limits(own, rate), (seed, rate)
            assert early.simulated <= len(own.requests)
            fewer += early.simulated < len(own.requests)
            answers.add(early.meets(rate))
    assert answers == {True, False}
    assert fewer > 20


def test_a_rate_is_tried_once_and_requests_are_counted():
    trials = RateTrials(Serving(ONE_TOKEN, TEN, SECOND, Limits(1.5, 1.0, 1.0), 1), ends_early=False)
    assert trials.highest(0.25, 0.01) == pytest.approx(1 / 0.95, rel=0.01)  # the last of 11 waits for 0.5 s
    assert trials.best <= 1 / 0.95 < trials.above <= 1.01 * trials.best
    before = trials.simulated
    assert before % 11 == 0
    assert trials.meets(0.25)
    assert trials.simulated == before


def test_what_is_known_of_a_highest_rate_is_narrowed_from_where_it_was():
    trials = RateTrials(Serving(ONE_TOKEN, TEN, SECOND, Limits(1.5, 1.0, 1.0), 1))
    assert (trials.best, trials.above) == (0, np.inf)
    trials.highest(0.25, 1.0)
    assert (trials.best, trials.above, trials.count) == (1.0, 2.0, 4)
    trials.narrow(0.01)
    assert trials.best <= 1 / 0.95 < trials.above <= 1.01 * trials.best
    assert trials.count == 4 + 7  # to halve a ratio of 2 seven times


def test_a_window_of_requests_starts_its_own_clock():
    starts, blocks = np.array([0, 1, 3, 3, 4]), np.array([7, 8, 9, 6])
    requests = Requests(np.array([0.0, 2.0, 5.0, 9.0]), np.arange(10, 14), np.arange(1, 5), starts, blocks, 4)
    own = requests.window(1, 3)
    assert own.arrival.tolist() == [0, 3]
    assert (own.prompt.tolist(), own.output.tolist()) == ([11, 12], [2, 3])
    assert (own.prefix_starts.tolist(), own.prefix_blocks.tolist()) == ([0, 2, 2], [8, 9])


def test_the_first_requests_of_a_serving_wait_as_among_all_until_the_next_comes():
    experts = np.array([[[0]], [[1]], [[2]]])
    buffering = RequestBuffering(experts, np.arange(11) % 3, 3, slack=0.5)
    own = Serving(ONE_TOKEN, TEN, SECOND, Limits(), 1, buffering=buffering)
    first = own.first(4)
    assert own.first(11) is own
    assert first.buffering is not None
    assert first.buffering.first.tolist() == [0, 1, 2, 0]
    assert first.requests.arrival.tolist() == ONE_TOKEN.arrival[:4].tolist()
    (_, alone), (_, among) = first.at(), own.at()
    assert alone.first_token[0] == among.first_token[0]
    assert len(alone.finish) == 4


def test_requests_that_come_before_an_engine_is_full_are_told():
    own = Serving(ONE_TOKEN, TEN, SECOND, Limits(1.5, 1.0, 1.0), 1)  # 11 requests of a second or so each
    assert hardly_fills(own, 0.5) is None  # they come within 22 s
    told = hardly_fills(own, 11.0)
    assert "that of 11 requests, which come within 1.0 s" in told
    assert "Take 1,000 requests or more" in told
