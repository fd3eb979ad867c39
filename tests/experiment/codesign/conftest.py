"""Spaces of the small scenario."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jaxmoe.config.hardware_space import read_space
from jaxmoe.experiment.codesign.problem import HardwareProblem, hardware_problem


@pytest.fixture
def problem(scenario: Path, tmp_path: Path) -> Callable[..., HardwareProblem]:
    """A problem on one layer of the small scenario from the sections of a space file."""

    def make(**sections: object) -> HardwareProblem:
        path = tmp_path / "space.yaml"
        path.write_text(yaml.safe_dump(sections, sort_keys=False))
        return hardware_problem(read_space(path), scenario, {}, [3])

    return make
