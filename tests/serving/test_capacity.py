"""The highest rate against a known threshold, rates that never drain, and what forbids more, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from served_by_hand import served_by_hand

from jaxmoe.serving.online.capacity import drained_rate, highest_rate, what_binds, what_forbids
from jaxmoe.serving.online.engine import DecodePool, Engine, Fleet
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served, StepLog


@pytest.mark.parametrize("stride", [1.05, 2.0])
@pytest.mark.parametrize("threshold", [0.013, 1.0, 7.3, 900.0])
def test_the_highest_rate_is_found_from_either_side(threshold, stride):
    found = highest_rate(lambda rate: rate <= threshold, start=1.0, tolerance=0.01, stride=stride)
    assert threshold / 1.01 <= found <= threshold


def test_a_small_stride_asks_less_near_the_start():
    asked: dict[float, list[float]] = {1.05: [], 2.0: []}
    for stride, rates in asked.items():
        highest_rate(lambda rate, rates=rates: rates.append(rate) or rate <= 1.03, 1.0, stride=stride)
    assert len(asked[1.05]) < len(asked[2.0]) / 2 + 1


def test_without_an_end_the_rate_is_infinite_and_with_no_beginning_zero():
    assert highest_rate(lambda rate: True, 3.0) == math.inf
    assert highest_rate(lambda rate: False, 3.0) == 0.0


def one_server(gap: float, seconds: float = 1.0, count: int = 100) -> Served:
    """Requests that come like a clock to a server that takes each as long, one after another."""
    sent = np.arange(count) * gap
    begin = np.arange(count) * max(gap, seconds)
    return served_by_hand(sent, begin, begin + seconds, begin + seconds)


@pytest.mark.parametrize("gap", [0.2, 0.5, 0.8])
def test_a_rate_over_that_of_the_server_does_not_drain_and_the_servers_is_told(gap):
    assert drained_rate(one_server(gap)) == pytest.approx(1.0)
    assert drained_rate(one_server(gap, seconds=2.0)) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("gap", [1.0, 1.1, 5.0])
def test_a_rate_within_that_of_the_server_drains(gap):
    assert drained_rate(one_server(gap)) is None


def test_a_queue_that_empties_once_it_is_late_drains():
    served = one_server(0.5)
    idle = served.sent[80:] + 1000.0  # the rest come when all are done
    rest = np.concatenate([served.sent[:80], idle])
    begin = np.concatenate([served.scheduled[:80], idle + np.arange(20) * 0.5])
    assert drained_rate(served_by_hand(rest, begin, begin + 1, begin + 1)) is None


ENGINE = Engine(token_budget=100, seats=10, ranks=2, kv_blocks=50)
STEPS = StepLog(
    engine=np.array([0, 0, 0, 0]),
    start=np.array([0.0, 1.0, 3.0, 6.0]),
    seconds=np.array([1.0, 2.0, 3.0, 4.0]),
    tokens=np.array([200, 20, 20, 200]),
    running=np.array([10, 20, 10, 20]),
    waiting=np.array([5, 5, 5, 0]),
    kv_blocks=np.array([40, 90, 98, 100]),
)


def test_what_is_fullest_binds_while_requests_wait():
    binds = what_binds(STEPS, Fleet(ENGINE))
    told = {"nothing waits": 0.4, "the next step": 0.0, "token budget": 0.1, "seats": 0.2, "KV blocks": 0.3}
    assert binds == pytest.approx(told)


def test_where_nothing_is_full_requests_wait_for_the_next_step():
    calm = replace(STEPS, running=np.array([10, 12, 10, 20]), kv_blocks=np.array([40, 70, 98, 100]))
    binds = what_binds(calm, Fleet(ENGINE))
    assert (binds["the next step"], binds["seats"]) == pytest.approx((0.2, 0.0))


def test_engines_of_a_decode_pool_are_told_apart():
    fleet = Fleet(ENGINE, decode=DecodePool(ENGINE, kv_bytes_per_token=1.0, bytes_per_s=1.0))
    binds = what_binds(replace(STEPS, engine=np.array([0, 1, 1, 0])), fleet)
    assert binds["token budget"] == pytest.approx(0.1)
    assert (binds["decode seats"], binds["decode KV blocks"]) == pytest.approx((0.2, 0.3))
    assert sum(binds.values()) == pytest.approx(1.0)


REQUESTS = Requests(np.zeros(3), np.array([10, 10, 10]), np.array([5, 5, 5]))


def test_what_forbids_more_is_the_limit_that_most_are_over():
    served = served_by_hand(REQUESTS.arrival, np.zeros(3), np.array([1.0, 2.0, 3.0]), np.array([5.0, 4.0, 4.0]))
    served = replace(served, steps=STEPS)
    assert what_forbids(REQUESTS, served, Fleet(ENGINE), Limits(first_token=1.5)) == (
        "time to first token",
        "KV blocks",
    )
    assert what_forbids(REQUESTS, served, Fleet(ENGINE), Limits(per_token=0.2)) == ("time per token", "step time")
    calm = replace(served, steps=replace(STEPS, waiting=np.zeros(4, int)))
    assert what_forbids(REQUESTS, calm, Fleet(ENGINE), Limits(first_token=1.5)) == ("time to first token", "step time")
