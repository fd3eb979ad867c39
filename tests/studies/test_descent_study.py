"""The study's descent: what a gradient says of longer steps, neighbours, and the best of four that it reaches."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.experiment.serving import Serving
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import StepTable, Term
from jaxmoe.sweep.best_deployment import Contender, candidate

STUDY = Path(__file__).parents[2] / "studies" / "serving"
COME = Requests(np.arange(40.0), np.full(40, 10), np.ones(40, int))


@pytest.fixture(scope="module")
def descent():
    sys.path.insert(0, str(STUDY))
    import descent

    yield descent
    sys.path.remove(str(STUDY))
    for name in ("descent", "best", "best_methods"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def short(descent, monkeypatch):
    monkeypatch.setattr(descent, "READ", 12)
    monkeypatch.setattr(descent, "STEPS", 16)


def server(tensor: int, budget: int, seats: int, seconds: float) -> Contender:
    """A step takes so many seconds and reads one request of ten tokens."""
    table = StepTable((Term("step", ("tokens",), (np.zeros(1),), np.array([seconds])),))
    serving = Serving(COME, Fleet(Engine(token_budget=10, seats=4)), table, Limits(1.0, 1.0, 1.0), 1)
    values = {"deployment.tensor": tensor, "serving.engine.token_budget": budget, "serving.engine.seats": seats}
    return candidate(values, serving)


def test_lateness_grows_by_the_steps_that_are_there_alone(descent):
    """All steps read ten tokens, between 8 and 16 of the grid, and decode nobody."""
    now = server(1, 10, 4, 0.3)
    slope = descent.lateness_slope(now, 1 / 0.28)  # requests queue, so each waits for the steps of all before
    read = np.isin(descent.SIZES, [8, 16])
    assert (slope[read, 0] > 0).all()
    assert np.abs(slope[~read]).max() == np.abs(slope[:, 1:]).max() == 0
    assert slope[read, 0][0] == pytest.approx(3 * slope[read, 0][1])  # 10 is a quarter of the way from 8 to 16
    arrival, took = np.arange(12) * 0.28, 0.3

    def lateness(took: float) -> float:
        waits = took * np.arange(1, 13) - arrival
        return (np.log1p(np.exp(descent.SHARP * (waits - 1))) + np.log1p(np.exp(-descent.SHARP))).mean()

    change = (lateness(took + 1e-6) - lateness(took - 1e-6)) / 2e-6
    assert slope.sum() == pytest.approx(change, rel=1e-5)


def test_neighbours_differ_in_one_step_of_one_axis_of_batching(descent):
    budgets, seats = (1024, 2048, 8192), (32, 64)
    every = [server(tensor, a, b, 0.3) for tensor in (1, 2) for a in budgets for b in seats]
    beside = [tuple(each.values.values()) for each in every if descent._are_neighbours(each, every[0], every)]
    assert beside == [(1, 1024, 64), (1, 2048, 32)]


def test_descent_goes_to_the_layout_of_shorter_steps_and_on_to_the_best_batching(descent):
    seconds = {(1, 1024): 0.5, (1, 2048): 0.45, (2, 1024): 0.3, (2, 2048): 0.25}
    four = [server(tensor, budget, 32, each) for (tensor, budget), each in seconds.items()]
    wrong = [Contender(each.values, each.serving, 1.0 / at, each.bound) for at, each in enumerate(four, start=1)]
    found, simulated = descent.descent(wrong)
    assert tuple(found.each.values.values()) == (2, 2048, 32)
    assert descent.rate_of(found) > 4
    assert simulated > 3 * descent.READ
