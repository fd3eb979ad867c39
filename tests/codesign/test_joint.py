"""Token layout and copies of experts as parts of what descends beside machine and placement."""

import numpy as np
import pytest
import yaml

from jaxmoe.codesign import joint
from jaxmoe.codesign.design import inputs_at, written
from jaxmoe.codesign.problem import hardware_problem
from jaxmoe.codesign.space import read_space
from jaxmoe.config import ConfigError

LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"
BOUNDS = {DIE: {"from": 0.01, "to": 10, "scale": "log"}, LINK: {"from": 0.1, "to": 100, "scale": "log"}}
SPACE = {"variables": BOUNDS, "constraints": [f"0.1 * {DIE} + {LINK} <= 1.5"], "placement": "tuned"}
EXPERT_GB = 3 * 64 * 128 * 2 / 1e9  # of the small scenario: two bytes a weight
EXCHANGES = ["least_loaded", "token_home"]


@pytest.fixture
def made(scenario, tmp_path):
    """A problem on one layer of the small scenario, and its inputs on the machine in the middle of the bounds."""

    def make(fixed, **sections):
        path = tmp_path / "space.yaml"
        path.write_text(yaml.safe_dump(SPACE | {"starts": 4, "steps": 50} | sections))
        fixed = {"costs.exchange": EXCHANGES[0], "tuning.exchanges": EXCHANGES} | fixed
        problem = hardware_problem(read_space(path), scenario, fixed, [3])
        return problem, inputs_at(problem, written(problem, np.full(2, 0.5)))[0]

    return make


def test_the_best_start_ends_at_the_faster_token_layout(made):
    """Tokens that go home pay for a way that those which meet at a host do not have: starts lean to either in turn."""
    problem, inputs = made({})
    ended = joint.descend(problem, inputs, np.full((4, 2), 0.5), lambda *_: None)
    last = ended.history[-10:].mean(axis=0)
    assert ended.exchanges[int(last.argmin())] == EXCHANGES[0]
    assert ended.shares.shape == (1, 4, 4, 4)
    np.testing.assert_allclose(ended.shares.sum(axis=3), 1, rtol=1e-4)


def test_copies_need_a_placement_that_is_tuned(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(SPACE | {"copies": True, "placement": "usual"}))
    with pytest.raises(ConfigError, match="copies"):
        read_space(path)
