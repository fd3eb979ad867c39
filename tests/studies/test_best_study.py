"""The study of the best deployment: its methods on six servers whose order is known, stretches and windows by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.experiment.serving import Serving
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import StepTable, Term
from jaxmoe.sweep.best_deployment import candidate

STUDY = Path(__file__).parents[2] / "studies" / "serving"
SECONDS = {(2048, 32): 0.5, (2048, 64): 0.4, (4096, 32): 0.3, (4096, 64): 0.2, (8192, 32): 0.25, (8192, 64): 0.6}


@pytest.fixture(scope="module")
def methods():
    sys.path.insert(0, str(STUDY))
    import best_methods

    yield best_methods
    sys.path.remove(str(STUDY))
    sys.modules.pop("best_methods", None)


@pytest.fixture(scope="module")
def six():
    """One request a step, of so many seconds by values that say nothing about them."""
    come = Requests(np.arange(200.0), np.full(200, 10), np.ones(200, int))
    found = []
    for (budget, seats), seconds in SECONDS.items():
        table = StepTable((Term("step", ("tokens",), (np.zeros(1),), np.array([seconds])),))
        limits = Limits(2 * seconds, 1.0, 1.0)
        serving = Serving(come, Fleet(Engine(token_budget=10, seats=4)), table, limits, 1)
        found.append(candidate({"token_budget": budget, "seats": seats}, serving))
    return found


@pytest.mark.parametrize("method", ["grid", "race", "halving", "estimate"])
def test_methods_take_the_fastest_of_six(methods, six, method):
    grid = methods.grid_of(six)
    assert grid.simulated % 200 == 0
    found = methods.METHODS[method](six, grid, 0)
    assert found.chosen.values == {"token_budget": 4096, "seats": 64}
    assert grid.rates[found.chosen] == pytest.approx(5 * 199 / 198, rel=0.01)
    assert found.simulated <= grid.simulated
    assert (found.simulated == 0) == (method == "estimate")
    assert found.rate == pytest.approx(0 if method == "estimate" else 5 * 199 / 198, rel=0.01)


def test_a_guided_model_stops_once_it_has_its_share(methods, six):
    pytest.importorskip("optuna")
    grid = methods.grid_of(six)
    found = methods.by_guide(six, grid, 0)
    assert found.chosen.values == {"token_budget": 4096, "seats": 64}  # the estimate's, which is tried first
    assert 0 < found.simulated < 0.1 * grid.simulated + grid.simulated / len(six)


def test_a_stretch_is_the_first_part_and_two_requests_at_least(methods):
    requests = Requests(np.array([0.0, 2.0, 5.0, 9.0]), np.arange(10, 14), np.arange(1, 5))
    assert methods.first_of(requests, 0.75).arrival.tolist() == [0, 2, 5]
    assert methods.first_of(requests, 0.1).arrival.tolist() == [0, 2]
