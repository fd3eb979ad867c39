"""Strategies compared: a plan whose layers run under several exchanges."""

import jax
import numpy as np

from jaxmoe.config import load_scenario
from jaxmoe.experiment import score, standard_strategies
from jaxmoe.experiment.comparison import compare
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import strategy

NAMES = ("lowest_host", "random_host_tree")


def test_every_layer_of_a_plan_is_timed_under_its_own_exchange(kept_scenario):
    inputs = inputs_of(load_scenario(kept_scenario, [f"tuning.exchanges=[{','.join(NAMES)}]"]), layers="3,5")
    (usual,) = (each for each in standard_strategies(inputs) if each.name == "ep_balanced")
    mixed = strategy(inputs, "mixed", usual.placement.share, NAMES, "sharded")
    with StageTimer() as clock:
        told = compare(inputs, [mixed], clock, lambda stage, done, total: None).scores["mixed"]
    expected = score(inputs, mixed, inputs.evaluation_batches)
    assert not np.array_equal(expected.total, score(inputs, mixed, inputs.evaluation_batches, NAMES[0]).total)
    jax.tree.map(np.testing.assert_array_equal, told, expected)
