"""What is told of runs: iterations, stages in order, and broadcasts that come too late."""

import numpy as np
import pytest

from jaxmoe.engine import measured_time
from jaxmoe.experiment.simulation import IterationBatches, Simulation, SystemRun, mean_stages
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.methods import AbstractRun, RolloutResult
from jaxmoe.methods.static import late

# Two iterations of three layers.
STAGES = {
    "dispatch": np.array([[1.0, 1, 1], [2, 2, 2]]),
    "compute": np.array([[4.0, 5, 6], [4, 5, 6]]),
    "combine": np.array([[1.0, 1, 1], [2, 2, 2]]),
}
TOTAL = np.array([[6.0, 7, 8], [8, 9, 10]])


class Made(AbstractRun):
    """Has been rolled out already."""

    def rollout(self, steps):
        pytest.fail("it has been rolled out already")

    def replay(self, rolled, batch, step, row):
        pytest.fail("it has been replayed already")


def made(**more) -> SystemRun:
    stages = STAGES | {name: np.array(seconds, float) for name, seconds in more.items()}
    rolled = RolloutResult(measured_time(stages, {}, TOTAL / (2 if more else 1)))
    return SystemRun(Made(), rolled, simulated=np.full((1, 3), 7.0 if more else 14), moved=np.zeros((1, 3)))


@pytest.fixture
def simulation() -> Simulation:
    runs = {"static": made(), "own": made(movement=[[1, 2, 3], [0, 0, 6]])}
    # Neither the plan nor the tokens are looked at here.
    return Simulation(object.__new__(Strategy), object.__new__(IterationBatches), (0,), runs)


def test_iterations_and_stages(simulation):
    assert simulation.runs["static"].seconds.tolist() == [21, 27]
    assert (simulation.baseline, simulation.system) == ("static", "own")
    assert simulation.stages == ["dispatch", "compute", "combine", "movement"]
    shared = {"dispatch": 4.5, "compute": 15, "combine": 4.5}
    assert mean_stages(simulation, "static") == shared | {"movement": 0, "total": 24}
    assert mean_stages(simulation, "own") == shared | {"movement": 6, "total": 12}


def test_speedups_are_over_the_first_run(simulation):
    assert simulation.speedup == 2
    # In the model 21 over 10.5 in the first iteration; in the simulator 42 over 21.
    assert simulation.simulated_speedup() == (2, 2)


def test_a_broadcast_is_late_where_it_outlasts_the_layer_before():
    sent = np.array([[1, 1, 1], [1, 0, 2]])
    assert late(TOTAL, np.zeros((2, 3)), 0 * sent) == 0
    # Windows are none, 6, 7; then 8 of the iteration before, 8, 9. Of five broadcasts two are longer.
    assert late(TOTAL, np.array([[1.0, 6, 7], [9, 0, 9]]), sent) == 2 / 5
