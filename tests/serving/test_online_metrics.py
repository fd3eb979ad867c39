"""Waiting times and goodput, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from served_by_hand import served_by_hand

from jaxmoe.serving.online.metrics import Limits, distribution, gaps_between, goodput, span_of, waits_of
from jaxmoe.serving.online.requests import Requests

REQUESTS = Requests(np.array([0.0, 1.0, 2.0]), np.array([10, 10, 10]), np.array([5, 1, 3]))
SERVED = served_by_hand(
    sent=REQUESTS.arrival,
    scheduled=np.array([0.5, 1.0, 4.0]),
    first_token=np.array([1.0, 3.0, 5.0]),
    finish=np.array([3.0, 3.0, 10.0]),
)


def test_waits_are_those_of_the_formulas():
    waits = waits_of(REQUESTS, SERVED)
    assert waits.queue.tolist() == [0.5, 0.0, 2.0]
    assert waits.first_token.tolist() == [1.0, 2.0, 3.0]
    assert waits.end_to_end.tolist() == [3.0, 2.0, 8.0]
    assert waits.per_token[[0, 2]].tolist() == [0.5, 2.5]
    assert math.isnan(waits.per_token[1])  # one token has no gap
    assert span_of(REQUESTS, SERVED) == 10.0


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(), 3),
        (Limits(first_token=2.0), 2),
        (Limits(per_token=1.0), 2),  # the request of one token keeps it
        (Limits(first_token=1.0, per_token=0.4), 0),
        (Limits(first_token=2.0, per_token=0.4), 1),
    ],
)
def test_goodput_counts_requests_within_both_limits(limits, kept):
    assert goodput(REQUESTS, SERVED, limits) == pytest.approx(kept / 10)


def test_a_distribution_leaves_out_what_is_not_there():
    told = distribution(np.array([1.0, math.nan, 2.0, 3.0]))
    assert told == pytest.approx({"mean": 2.0, "p50": 2.0, "p90": 2.8, "p95": 2.9, "p99": 2.98})
    assert distribution(np.array([math.nan])) is None


def test_gaps_are_between_tokens_of_one_request():
    starts, times = np.array([0, 3, 4, 6]), np.array([1.0, 2.0, 4.0, 3.0, 5.0, 5.5])
    assert gaps_between(replace(SERVED, token_starts=starts, token_times=times)).tolist() == [1.0, 2.0, 0.5]


def test_a_user_of_a_closed_loop_waits_from_when_the_request_was_sent():
    later = replace(SERVED, sent=np.array([0.0, 1.0, 3.5]))
    assert waits_of(REQUESTS, later).first_token.tolist() == [1.0, 2.0, 1.5]
