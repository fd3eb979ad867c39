"""Sizes that are chosen beside numbers that descend: against optima worked out by hand on every one of them."""

import pytest
import yaml
from test_codesign import BOUNDS, DIE, LINK, PRICE, QUICK, parts, quiet

from jaxmoe.config.hardware_space import read_space
from jaxmoe.experiment.codesign.discrete import STARTS, TRYING, short_search, tune_space
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.tune.machine.augmented_lagrangian import MET
from jaxmoe.tune.machine.problem import MachineSearchError

MESH = "hardware.mesh_shape"
LIMIT = 6.0  # of dies and their links together: two dies may have twice as much each as four
SPACE = QUICK | {
    "variables": BOUNDS,
    "choices": {MESH: [[2, 2], [1, 2]]},
    "constraints": [f"{MESH}[0] * {MESH}[1] * ({PRICE}) <= {LIMIT}"],
    "steps": 25,
}


@pytest.fixture
def searched(scenario, tmp_path):
    def search(fixed=None, **sections):
        path = tmp_path / "space.yaml"
        path.write_text(yaml.safe_dump(SPACE | sections, sort_keys=False))
        with StageTimer() as clock:
            return tune_space(read_space(path), scenario, fixed or {}, [3], quiet, clock)

    return search


def by_hand(problem, nodes):
    """Least a/x + b/y with n (3 x + 0.2 y) = C is n (sqrt(3 a) + sqrt(0.2 b))^2 / C."""
    a, b = parts(problem)
    return nodes * ((3 * a) ** 0.5 + (0.2 * b) ** 0.5) ** 2 / LIMIT


@pytest.mark.slow
def test_every_choice_comes_to_its_optimum_and_the_best_is_searched_in_full(searched):
    result, tried = searched(choices={MESH: [[2, 2], [1, 2], [8, 16]]})
    four, two, many = tried
    assert [each.values for each in tried] == [{MESH: [2, 2]}, {MESH: [1, 2]}, {MESH: [8, 16]}]
    best = min(four.metric, two.metric)
    chosen = result.best.scenarios[0].hardware.mesh_shape
    assert list(chosen) == ([2, 2] if four.metric == best else [1, 2])
    assert best == pytest.approx(by_hand(result.problem, chosen[0] * chosen[1]), rel=0.01)
    assert result.best.metric == pytest.approx(by_hand(result.problem, chosen[0] * chosen[1]), rel=1e-3)
    assert result.best.metric <= best * (1 + MET)
    (met,) = result.best.constraints
    assert met.left == pytest.approx(LIMIT, rel=1e-3)
    # 128 dies cost more than there is, whatever their numbers.
    assert many.metric is None
    assert "no machine inside the bounds" in many.reason
    # Two combinations, one strategy each, forward and backward.
    assert result.evaluations[TRYING] >= 2 * 2 * STARTS
    assert result.evaluations["descend"] == 2 * 4 * 25


@pytest.mark.slow
def test_the_slower_choice_is_slower_by_hand_as_well(problem):
    """Both ends of the comparison, each on a mesh that is fixed."""
    sections = {key: value for key, value in SPACE.items() if key != "choices"}
    made = problem(**sections)
    found = short_search(made, quiet)
    assert made.metric(found.value) == pytest.approx(by_hand(made, 4), rel=0.01)


def test_choices_are_not_fixed_as_well(searched):
    with pytest.raises(MachineSearchError, match=r"--set hardware\.mesh_shape: space.yaml has it among its choices"):
        searched(fixed={MESH: [2, 2]})


def test_no_choice_that_can_be_is_the_error_of_the_first(searched):
    with pytest.raises(MachineSearchError, match=rf"no machine inside the bounds.*{LINK}"):
        searched(choices={MESH: [[8, 8], [4, 8]]}, constraints=[f"{MESH}[0] * {MESH}[1] * {DIE} <= 0.1"])
