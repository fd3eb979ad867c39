"""Every shipped machine that computes: experts and rings take as long in the model as they take in the simulator."""

import numpy as np
import pytest

from jaxmoe.config import Scenario, load_hardware, load_model
from jaxmoe.config.files import shipped_names
from jaxmoe.experiment.evaluation import replay, score
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.strategies import standard_strategies

MOST_NODES = 100  # paths of more take the simulator long
WORKLOAD = {"batch_tokens": 256, "trace": {"kind": "synthetic", "tokens": 1024}}


@pytest.mark.slow
@pytest.mark.parametrize("machine", shipped_names("hardware"))
def test_experts_and_rings_take_as_long_as_in_the_simulator(machine):
    hardware = load_hardware(machine)
    if hardware.die is None:
        pytest.skip("a network alone")
    given = {"name": machine, "hardware": hardware, "model": load_model("deepseek-v2-lite", "model")}
    small = {"workload": WORKLOAD, "strategies": {"hybrid_regions": 1}, "validation": {"batches": 1}}
    inputs = inputs_of(Scenario.model_validate(given | small), None, "1")
    if inputs.num_nodes > MOST_NODES:
        pytest.skip("has another shipped machine of the same kind and fewer nodes")
    for strategy in standard_strategies(inputs):
        if strategy.name in ("tp", "tp_both_ways", "ep_balanced", "hybrid_complete"):
            told = score(inputs, strategy, inputs.validation_batches, as_simulated=True)
            seen = replay(inputs, strategy, inputs.validation_batches, lambda *_: None).time
            np.testing.assert_allclose(told.compute, seen.compute, rtol=2e-3, err_msg=strategy.name)
            if strategy.name != "ep_balanced":  # rings
                np.testing.assert_allclose(told.communication, seen.communication, rtol=1e-2, err_msg=strategy.name)
