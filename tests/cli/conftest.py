"""A plan of the small scenario, and a way to call the command line in process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_plan import LAYERS, some_shares
from typer.testing import CliRunner, Result

from jaxmoe.cli.app import app
from jaxmoe.placement import Placement, write_plan


@pytest.fixture
def rendered() -> None:
    """Pictures are as people get them."""


@pytest.fixture
def unrendered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are made but not rendered, which takes a command as long as all else; `rendered` goes before."""
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())


@pytest.fixture(autouse=True)
def _unrendered_everyday(request: pytest.FixtureRequest) -> None:
    """Slow tests render pictures, but for those whose pictures others of them render."""
    if not request.node.get_closest_marker("slow"):
        request.getfixturevalue("unrendered")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results" / "run"


@pytest.fixture(scope="session")
def run() -> Callable[..., Result]:
    """Calls `jaxmoe` with these arguments."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "mine.npz"
    write_plan(path, Placement(some_shares(), (2, 2), "sharded", LAYERS))
    return path
