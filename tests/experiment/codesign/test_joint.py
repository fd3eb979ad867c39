"""Token layout and copies of experts as parts of what descends beside machine and placement."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import yaml

from jaxmoe.config import ConfigError
from jaxmoe.config.hardware_space import read_space
from jaxmoe.experiment.codesign.placements import placement_on, relaxed_plans, rounded
from jaxmoe.experiment.codesign.problem import hardware_problem
from jaxmoe.experiment.evaluation import score

LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"
BOUNDS = {DIE: {"from": 0.01, "to": 10, "scale": "log"}, LINK: {"from": 0.1, "to": 100, "scale": "log"}}
SPACE = {"variables": BOUNDS, "constraints": [f"0.1 * {DIE} + {LINK} <= 1.5"], "placement": "tuned"}
EXPERT_GB = 3 * 64 * 128 * 4 / 1e9  # of the small scenario: four bytes a weight
EXCHANGES = ["least_loaded", "token_home"]


@pytest.fixture
def made(scenario, tmp_path):
    """A problem on one layer of the small scenario, and its inputs on the machine in the middle of the bounds."""

    def make(fixed, **sections):
        path = tmp_path / "space.yaml"
        path.write_text(yaml.safe_dump(SPACE | {"starts": 4, "steps": 50} | sections))
        fixed = {"costs.exchange": EXCHANGES[0], "tuning.exchanges": EXCHANGES} | fixed
        problem = hardware_problem(read_space(path), scenario, fixed, [3])
        return problem, problem.inputs_at(problem.reported_numbers(np.full(2, 0.5)))[0]

    return make


@pytest.mark.slow
def test_the_best_start_ends_at_the_faster_token_layout(made):
    """Tokens that go home pay for a way that those which meet at a host do not have: starts lean to either in turn."""
    problem, inputs = made({})
    ended = relaxed_plans(problem, inputs, np.full((4, 2), 0.5), lambda *_: None)
    last = ended.history[-10:].mean(axis=0)
    assert ended.exchanges[int(last.argmin())] == EXCHANGES[0]
    assert ended.shares.shape == (1, 4, 4, 4)
    np.testing.assert_allclose(ended.shares.sum(axis=3), 1, rtol=1e-4)


@pytest.mark.slow
def test_a_hot_expert_gets_copies_and_no_placement_without_copies_is_as_fast(made):
    """A die has room for two experts of the layer, and is slow: what most tokens choose pays to be on several.

    Against all 256 placements without copies, on 64 batches: the best of so many on a few would be best by chance.
    """
    room = {"hardware.die.memory_capacity_GB": 2.01 * 2 * EXPERT_GB}  # half of it is for the other layer
    problem, inputs = made(
        room | {"workload.trace.skew": 1.5, "tuning.refine_steps": 100, "evaluation.batches": 64}, copies=True
    )
    np.testing.assert_array_equal(placement_on(problem, inputs).room, 2)
    ended = relaxed_plans(problem, inputs, np.full((4, 2), 0.5), lambda *_: None)
    _, plans = rounded(problem, inputs, ended.shares, lambda *_: None, exchange=ended.exchanges[0])
    for plan in plans:
        assert plan.placement.mode == "replicated"
        assert plan.fits
        assert ((plan.placement.share > 0).sum(axis=1) <= 2).all()
    # What the search ended with comes first, then the best of it and of the usual ways to deal copies.
    hottest = np.bincount(inputs.trace.experts.ravel(), minlength=4).argmax()
    for plan in plans:
        hosts = (plan.placement.share > 0).sum(axis=2)[0]
        assert hosts[hottest] == hosts.max() > 1

    def seconds(plan, share):
        placement = replace(plan.placement, share=share)
        return float(score(inputs, replace(plan, placement=placement), inputs.evaluation_batches).total.mean())

    whole = [np.eye(4, dtype=np.float32)[list(nodes)][None] for nodes in itertools.product(range(4), repeat=4)]
    without = min(seconds(plans[0], share) for share in whole)
    assert plans[0].placement.exchange == plans[1].placement.exchange
    for plan in plans:
        assert seconds(plan, plan.placement.share) < without


def test_copies_need_a_placement_that_is_tuned(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(SPACE | {"copies": True, "placement": "usual"}))
    with pytest.raises(ConfigError, match="copies"):
        read_space(path)
