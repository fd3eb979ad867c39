"""Studies of the small scenario, and a way to run them in process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jaxmoe.sweep import Space, Sweep, read_study, run_sweep


@pytest.fixture
def study(scenario: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a study of the small scenario with these sections, and gives its path."""

    def write(**sections: object) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({"scenario": str(scenario)} | sections, sort_keys=False))
        return path

    return write


@pytest.fixture
def space(study: Callable[..., Path]) -> Callable[..., Space]:
    return lambda **sections: Space(read_study(study(**sections)))


@pytest.fixture
def sweep(study: Callable[..., Path], tmp_path: Path) -> Callable[..., Sweep]:
    """Runs a study into the folder `out` beside it."""
    folder = tmp_path / "out"
    folder.mkdir()
    return lambda **sections: run_sweep(read_study(study(**sections)), folder, lambda done, total: None)
