"""What else than placement could be changed: beside it, the same slots take the same time, however they are named."""

from pathlib import Path

import numpy as np
import pytest

from jaxmoe.experiment.advice import Case
from jaxmoe.experiment.advice_alternatives import MOST_LAYERS, alternatives
from jaxmoe.experiment.replica_plans import serving_scenario
from jaxmoe.placement.replica_choice import choice_of

HARDWARE = Path(__file__).resolve().parents[2] / "configs" / "hardware"


@pytest.mark.parametrize("machine", ["nmp_4x4", "h200_sxm_8"])
def test_experts_as_numbered_take_as_long_as_slots_in_that_order(machine):
    """Also where a fitted kernel launches all experts of a node at once, and in layers of unlike loads."""
    scenario = serving_scenario(HARDWARE / f"{machine}.yaml", "deepseek-v2-lite", 64)
    case = Case(scenario, 64, 10, choice_of("nearest"))
    windows = np.random.default_rng(0).gamma(0.5, 100, (3, MOST_LAYERS + 3, 64))
    in_order = np.tile(np.arange(64), (MOST_LAYERS + 3, 1))
    told, layers = alternatives(case, in_order, windows)
    assert layers == MOST_LAYERS
    assert told["as advised"] == pytest.approx(told["as numbered"], rel=1e-5)
