"""Compile time is counted once, however functions that are traced lie inside each other."""

import jax
import jax.numpy as jnp
import pytest
from oracles.arrays import full

from jaxmoe.experiment import stage_timer
from jaxmoe.experiment.stage_timer import COMPILING, CompileTime, StageTimer


@pytest.fixture
def now(monkeypatch):
    """Sets the time."""
    return lambda seconds: monkeypatch.setattr(stage_timer.time, "perf_counter", lambda: seconds)


def test_spans_inside_each_other_count_once(now):
    spent = CompileTime()
    for end, duration in [(2.0, 1.0), (3.0, 0.5), (4.0, 3.5), (6.0, 1.0)]:
        now(end)
        spent.on_event(f"{COMPILING}any", duration)
    assert spent.seconds == pytest.approx(3.5 + 1.0)


def test_other_events_do_not_count(now):
    spent = CompileTime()
    now(1.0)
    spent.on_event("/jax/checkpoint/any", 0.5)
    assert spent.seconds == 0


def test_what_jax_compiles_is_heard():
    with StageTimer() as clock, clock.stage("work"):
        jax.jit(lambda x: jnp.sin(x) @ x.T)(full((7, 11), 1.0)).block_until_ready()
    work = clock.report()["stages"]["work"]
    assert work["compile_s"] > 0
    assert work["run_s"] > 0


def test_a_stage_that_runs_again_adds_up(now):
    now(0.0)
    clock = StageTimer()
    for start, end in [(1.0, 2.0), (5.0, 7.0)]:
        now(start)
        with clock.stage("work"):
            now(end)
    assert clock.report()["stages"]["work"] == {"run_s": 3.0, "compile_s": 0.0}
