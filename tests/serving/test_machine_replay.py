"""Whole steps on machines, the engine's time against the replay of layers, message by message, and of the rest."""

import numpy as np
import pytest
from test_number_worth import MESH, SYSTEMS

from jaxmoe.config import load_scenario
from jaxmoe.des import fabric_of
from jaxmoe.des.description import LayerDescription, Memory, even_seconds
from jaxmoe.experiment.machine_deployment import compared
from jaxmoe.experiment.machine_replay import replayed_step
from jaxmoe.hardware import Mesh
from jaxmoe.serving.step import StepLoad

DRAFTS = "deployment.speculative={tokens: 2, acceptance: 0.5}"


def test_work_that_nodes_share_by_hand():
    """Two dies of 50 FLOP/s, one with half of the bandwidth: 200 FLOP in 2 s; 90 B take the slower 45 B / 15 B/s."""
    memory = Memory(np.array([30.0, 15.0]), np.array([0.5, 0.5]), np.array([0, 1]))
    mesh = fabric_of(Mesh.uniform(1.0, 0.0, shape=(1, 2)), None)
    layer = LayerDescription(mesh, np.full(2, 50.0), 1.0, 1.0, 1.0, 1.0, "sharded", memory=(memory,))
    assert even_seconds(layer, 200.0, 0.0) == pytest.approx(2.0)
    assert even_seconds(layer, 200.0, 90.0) == pytest.approx(3.5)


@pytest.mark.parametrize(
    "system", [*(["static"]), *(pytest.param(name, marks=pytest.mark.slow) for name in [*SYSTEMS][1:])]
)
def test_steps_agree_with_the_replay(system, tmp_path):
    """Asked are 2 % where stages follow each other, and 5 % where they share what a die has."""
    path = tmp_path / "steps.yaml"
    path.write_text(MESH)
    for drafts in ((), (DRAFTS,)):
        scenario = load_scenario(path, (*SYSTEMS[system], *drafts))
        for own in compared(scenario):
            queries = own.deployment.queries
            mixed = StepLoad(8.0, 160.0, 64.0, 128.0, queries)
            for load in (StepLoad(16.0, 160.0, queries=queries), StepLoad(1.0, 160.0, queries=queries), mixed):
                told, replayed = float(own.step.seconds(load)), replayed_step(scenario, own.step, load)
                streams = own.step.layers.name == "expert_streaming"
                assert told == pytest.approx(replayed, rel=0.05 if streams else 0.02)
                assert told != replayed
