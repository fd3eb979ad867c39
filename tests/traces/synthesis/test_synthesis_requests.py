"""How requests are dealt: as many tokens as asked for, in an order that keeps as much of the recorded one as told."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.traces import TraceError
from jaxmoe.traces.synthesis import RequestDeck


def requests(length=(3, 5, 2), prompt=(1, 5, 0), topics=((0, 1), (1, 0), (2, 2)), window=3, drift=1.0):
    prompts = None if prompt is None else np.array(prompt)
    return RequestDeck(np.array(length), prompts, np.array(topics), window, drift)


def many(drift, count=200):
    return RequestDeck(np.ones(count, int), None, np.zeros((count, 1), int), 1, drift)


@given(
    tokens=st.integers(1, 60),
    seed=st.integers(0, 9),
    drift=st.floats(0, 1),
    length=st.lists(st.integers(1, 6), min_size=1),
)
def test_tokens_are_as_many_as_asked_for(tokens, seed, drift, length):
    topics = np.zeros((len(length), 1), int)
    deal = RequestDeck(np.array(length), None, topics, 6, drift).deal(tokens, seed)
    assert deal.length.sum() == tokens
    assert deal.length.min() > 0
    whole = np.array(length)[deal.card]
    np.testing.assert_array_equal(deal.length[:-1], whole[:-1])
    assert deal.length[-1] <= whole[-1]


@pytest.mark.parametrize("drift", [0.0, 0.5, 1.0])
def test_the_deck_is_dealt_whole_before_it_is_dealt_again(drift):
    card = many(drift, 20).deal(50, seed=0).card
    assert sorted(card[:20]) == sorted(card[20:40]) == list(range(20))
    assert len(set(card[40:])) == 10


def test_full_drift_keeps_the_order():
    assert many(1.0).deal(200, seed=0).card.tolist() == list(range(200))


def test_no_drift_shuffles():
    first, again, other = (many(0.0).deal(400, seed).card for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    assert first[:200].tolist() != first[200:].tolist()
    # Places of 200 cards in random order are unrelated to their numbers: five standard errors of a correlation.
    assert abs(np.corrcoef(first[:200], np.arange(200))[0, 1]) < 5 / np.sqrt(200)


def test_some_drift_keeps_the_order_roughly():
    card = many(0.7).deal(200, seed=0).card
    assert card.tolist() != list(range(200))
    assert np.corrcoef(card, np.arange(200))[0, 1] > 0.8


def test_topic_and_phase_of_tokens():
    deal = requests().deal(11, seed=0)
    assert deal.seq_start.tolist() == [0, 3, 8, 10]
    assert deal.length.tolist() == [3, 5, 2, 1]
    assert deal.phases().tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]
    request, position = np.repeat(np.arange(4), deal.length), np.array([0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 0])
    assert deal.topic(request, position).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 2, 2, 0]
    np.testing.assert_array_equal(deal.phase(request, position), deal.phases())


def test_without_prompts_there_are_no_phases():
    deal = requests(prompt=None).deal(7, seed=0)
    assert deal.phases() is None
    assert deal.phase(np.array([0, 1]), np.array([0, 4])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": np.array([], int)}, "at least one token"),
        ({"length": np.array([3, 0, 2])}, "at least one token"),
        ({"topics": np.zeros((2, 2), int)}, r"\(2, 2\), expected \[3, stretches\]"),
        ({"topics": np.zeros(3, int)}, r"\(3,\), expected"),
        ({"topics": np.full((3, 2), -1)}, "from 0 up"),
        ({"window": 2}, "2 x 2 tokens do not cover"),
        ({"window": 0}, "do not cover"),
        ({"prompt": np.array([1, 6, 0])}, "prompt holds"),
        ({"prompt": np.array([-1, 0, 0])}, "prompt holds"),
        ({"prompt": np.array([1])}, "prompt has shape"),
        ({"drift": 1.5}, "drift is 1.5"),
        ({"drift": float("nan")}, "drift is nan"),
    ],
)
def test_parts_that_do_not_fit(change, message):
    with pytest.raises(TraceError, match=message):
        replace(requests(), **change)


def test_no_tokens_cannot_be_dealt():
    with pytest.raises(TraceError, match="tokens is 0"):
        requests().deal(0, seed=0)
