"""What is told of a run: iterations, stages as the simulator has them, and broadcasts that come too late."""

import numpy as np

from jaxmoe.experiment.simulation import Run, mean_stages
from jaxmoe.latency import LayerTime

# Two iterations of three layers.
STAGES = {
    "dispatch": np.array([[1.0, 1, 1], [2, 2, 2]]),
    "compute": np.array([[4.0, 5, 6], [4, 5, 6]]),
    "combine": np.array([[1.0, 1, 1], [2, 2, 2]]),
}
TOTAL = np.array([[6.0, 7, 8], [8, 9, 10]])


def made(movement=None, broadcast=None) -> Run:
    stages = STAGES if movement is None else STAGES | {"movement": np.array(movement, float)}
    sent = np.zeros((2, 3), int) if broadcast is None else np.array(broadcast)
    return Run(LayerTime(stages, {}, TOTAL), sent, None, np.zeros((1, 3)), np.zeros((1, 3)))


def test_iterations_and_stages():
    run = made()
    assert run.seconds.tolist() == [21, 27]
    np.testing.assert_array_equal(run.staged, TOTAL)
    expected = {"dispatch": 4.5, "compute": 15, "combine": 4.5, "movement": 0, "total": 24}
    assert mean_stages(run) == expected


def test_a_broadcast_is_late_where_it_outlasts_the_layer_before():
    assert made().late == 0
    # Windows are none, 6, 7; then 8 of the iteration before, 8, 9. Of five broadcasts two are longer.
    late = made(movement=[[1, 6, 7], [9, 0, 9]], broadcast=[[1, 1, 1], [1, 0, 2]])
    assert late.late == 2 / 5
    assert mean_stages(late)["movement"] == 16
