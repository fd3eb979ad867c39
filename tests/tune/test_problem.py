"""What a problem tells of its trace and its machine, each counted once."""

import numpy as np
from small_problem import EXPERTS, LAYERS, NODES, small_problem

from jaxmoe.tune import problem as module


def test_the_trace_is_counted_once(monkeypatch):
    problem = small_problem(room=2.0)
    counted, bincount = [], np.bincount
    monkeypatch.setattr(module.np, "bincount", lambda *given, **more: counted.append(0) or bincount(*given, **more))
    first = [problem.frequency, problem.room]
    assert len(counted) == LAYERS
    assert all(again is one for again, one in zip([problem.frequency, problem.room], first, strict=True))
    assert len(counted) == LAYERS


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
