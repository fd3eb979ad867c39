"""That planted topics are found, and that stretches of one topic keep to requests."""

from dataclasses import replace

import numpy as np

from jaxmoe.traces import GatingTrace
from jaxmoe.traces.synthesis.process import MOST_TOPICS, WINDOW, find_topics


def planted(topic, seq_start=(0,), seed=0):
    """Tokens of topic t choose two of experts 4 t to 4 t + 3, in both layers."""
    rng = np.random.default_rng(seed)
    experts = rng.random((len(topic), 2, 4)).argsort(axis=2)[..., :2] + 4 * np.asarray(topic)[:, None, None]
    return GatingTrace(experts, 4 * (int(max(topic)) + 1), np.arange(2), np.array(seq_start), None, {})


def joint(found, topic):
    """How many tokens have each pair of found and planted topic."""
    table = np.zeros((max(found) + 1, max(topic) + 1), int)
    np.add.at(table, (found, topic), 1)
    return table


def test_planted_topics_are_found():
    # Enough stretches for two topics and not for three.
    topic = np.repeat(np.arange(16) % 2, WINDOW)
    table = joint(find_topics(planted(topic), seed=0), topic)
    assert sorted(table.ravel().tolist()) == [0, 0, 512, 512]


def test_found_topics_never_mix_planted_ones():
    topic = np.repeat(np.random.default_rng(1).integers(4, size=64), WINDOW)
    found = find_topics(planted(topic), seed=0)
    assert max(found) + 1 == 8
    assert (np.count_nonzero(joint(found, topic), axis=1) == 1).all()


def test_a_short_trace_is_of_one_topic():
    topic = np.repeat(np.arange(15) % 2, WINDOW)
    assert not find_topics(planted(topic), seed=0).any()


def test_topics_are_few():
    topic = np.repeat(np.arange(256) % 2, WINDOW)
    assert max(find_topics(planted(topic), seed=0)) == MOST_TOPICS - 1


def test_stretches_do_not_cross_requests():
    # Every request is of one topic and starts anywhere; a stretch of two requests would mix them.
    length = np.random.default_rng(2).integers(20, 200, 64)
    start = np.cumsum(length) - length
    topic = np.repeat(np.arange(64) % 2, length)
    found = find_topics(planted(topic, start), seed=0)
    assert (np.count_nonzero(joint(found, topic), axis=1) == 1).all()


def test_the_short_end_of_a_request_goes_with_what_is_before():
    lengths = np.full(40, 2 * WINDOW + WINDOW // 4)
    start = np.cumsum(lengths) - lengths
    topic = np.repeat(np.arange(40) % 2, lengths)
    found = find_topics(planted(topic, start), seed=0).reshape(40, -1)
    assert (found[:, WINDOW : 2 * WINDOW + WINDOW // 4] == found[:, WINDOW : WINDOW + 1]).all()


def test_loads_that_are_all_alike_are_one_topic():
    trace = planted(np.zeros(64 * WINDOW, int))
    everything = np.broadcast_to(np.arange(4), (trace.num_tokens, 2, 4))
    assert not find_topics(replace(trace, experts=everything), seed=0).any()


def test_missing_choices_are_no_topic_of_their_own():
    topic = np.repeat(np.arange(16) % 2, WINDOW)
    trace = planted(topic)
    experts = trace.experts.copy()
    experts[np.random.default_rng(3).random(experts.shape) < 0.3] = -1
    table = joint(find_topics(replace(trace, experts=experts), seed=0), topic)
    assert np.count_nonzero(table) == 2


def test_the_same_seed_finds_the_same_topics():
    topic = np.repeat(np.random.default_rng(4).integers(4, size=64), WINDOW)
    np.testing.assert_array_equal(find_topics(planted(topic), 7), find_topics(planted(topic), 7))
