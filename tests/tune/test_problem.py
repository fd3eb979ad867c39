"""What a problem tells of its trace and its machine, each counted once."""

import dataclasses

import numpy as np
import pytest
from small_problem import EXPERTS, LAYERS, NODES, small_problem, small_trace

from jaxmoe.traces import TraceError
from jaxmoe.tune import problem as module


def test_the_trace_is_counted_once(monkeypatch):
    problem = small_problem(room=2.0)
    counted, bincount = [], np.bincount
    monkeypatch.setattr(module.np, "bincount", lambda *given, **more: counted.append(0) or bincount(*given, **more))
    first = [problem.frequency, problem.room]
    assert len(counted) == 1
    assert all(again is one for again, one in zip([problem.frequency, problem.room], first, strict=True))
    assert len(counted) == 1


def test_frequency_and_room_by_hand():
    problem = small_problem(room=2.0)
    chosen = np.zeros((LAYERS, EXPERTS))
    for token in problem.trace.experts:
        for layer in range(LAYERS):
            for expert in token[layer]:
                chosen[layer, expert] += 1
    chosen[chosen == 0] = 0.1
    np.testing.assert_allclose(problem.frequency, chosen / chosen.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(problem.room, np.full(NODES, 2.0), rtol=1e-6)


def test_topics_count_alike_however_long_they_are():
    alone = [small_problem(trace_seed=seed) for seed in (0, 1)]
    short = small_trace(1).select_tokens(np.arange(100))
    topics = (small_trace(0), short)
    both = dataclasses.replace(alone[0], topics=topics)
    parts = [dataclasses.replace(alone[0], trace=topic).frequency for topic in topics]
    np.testing.assert_allclose(both.frequency, (parts[0] + parts[1]) / 2)


@pytest.mark.parametrize("count", [4, 5])
def test_batches_come_from_topics_in_turn(count):
    """A topic of which all tokens choose experts below 3, and one of which all choose the others."""
    trace, choices = small_trace(0), np.array([[0, 1], [1, 2], [2, 0]], np.int16)
    low = dataclasses.replace(trace, experts=np.broadcast_to(choices[np.arange(600) % 3, None], trace.experts.shape))
    high = dataclasses.replace(low, experts=low.experts + 3)
    drawn = dataclasses.replace(small_problem(), topics=(low, high)).draw(count, seed=3)
    experts = np.asarray(drawn.experts)
    assert experts.shape[:2] == (LAYERS, count)
    assert (experts[:, 0::2] < 3).all()
    assert (experts[:, 1::2] >= 3).all()
    assert (np.asarray(drawn.experts[:, 0]) != np.asarray(drawn.experts[:, 2])).any()  # each drawn anew


def test_topics_of_another_model_are_refused():
    problem = small_problem()
    with pytest.raises(TraceError, match=r"topic 1 has the layers \[0\], but the trace \[0, 1\]"):
        dataclasses.replace(problem, topics=(small_trace(0), small_trace(1).select_layers([0])))
    other = dataclasses.replace(small_trace(1), num_experts=EXPERTS + 1)
    with pytest.raises(TraceError, match="topic 0 has num_experts 7, but the trace 6"):
        dataclasses.replace(problem, topics=(other,))
