"""What a problem tells of its trace and its machine, each counted once."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_problem import EXPERTS, LAYERS, NODES, small_problem, small_trace

from jaxmoe.hardware import node_memory
from jaxmoe.traces import TraceError
from jaxmoe.tune import problem as module
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.settings import StopSwitch


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


def with_machine(problem, bandwidth=None, **die):
    """The problem on dies, and maybe memory, of other numbers."""
    machine = problem.model.machine
    dies = dataclasses.replace(machine.die, **{key: jnp.asarray(value) for key, value in die.items()})
    memory = machine.memory if bandwidth is None else node_memory(jnp.asarray(bandwidth), None)
    model = dataclasses.replace(problem.model, machine=dataclasses.replace(machine, die=dies, memory=memory))
    return dataclasses.replace(problem, model=model)


def test_pace_follows_what_limits_a_node():
    problem = small_problem()
    flops = np.asarray(problem.model.machine.die.flops)
    np.testing.assert_allclose(problem.pace, flops / flops.sum(), rtol=1e-5)
    assert problem.uneven
    # Memory a thousand times slower than any die: bandwidths decide, and dies do not matter.
    slow = with_machine(problem, bandwidth=np.array([1.0, 2, 3, 4]) * 1e3)
    np.testing.assert_allclose(slow.pace, np.array([1, 2, 3, 4]) / 10, rtol=1e-5)


def test_alike_nodes_have_exactly_equal_paces_and_a_dead_one_hardly_any():
    alike = with_machine(small_problem(), flops=np.full(NODES, 3e9, np.float32))
    assert alike.pace.tolist() == [1 / NODES] * NODES
    assert not alike.uneven
    dead = with_machine(small_problem(), flops=np.array([0, 1e9, 1e9, 1e9], np.float32))
    np.testing.assert_allclose(dead.pace, [1e-6 / 3, 1 / 3, 1 / 3, 1 / 3], rtol=1e-5)


def test_uneven_nodes_are_offered_plans_by_pace():
    with StopSwitch() as stop:
        names = set(Evaluator(small_problem(), 0, stop).looks)
        alike = with_machine(small_problem(), flops=np.full(NODES, 3e9, np.float32))
        even = set(Evaluator(alike, 0, stop).looks)
    assert names - even == {name for name in names if name.endswith("_by_pace")} != set()


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
