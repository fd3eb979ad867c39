"""Studies of the small scenario, and a way to run them in process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
import yaml

from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.sweep import Space, Sweep, evaluation, read_study, run_sweep
from jaxmoe.sweep.evaluation import Compiled, SweepEvaluator
from jaxmoe.sweep.points import _files
from jaxmoe.tune.machine.designs import EvaluationArguments


@pytest.fixture(autouse=True, scope="session")
def _compiled_once() -> Iterator[None]:
    """Most tests sweep the same small machine: what one has compiled serves the others, with files as they are."""
    real, kept = SweepEvaluator._compile, {}

    def compile_once(
        self: SweepEvaluator, run: ParametricRun, common: EvaluationArguments, points: int
    ) -> tuple[Compiled, float]:
        leaves, structure = jax.tree.flatten(common)
        whole = run.inputs.scenario.model_dump(mode="json")
        metrics = tuple(evaluation.METRICS.items())
        key = (
            *(str(whole), str(_files(whole)), tuple(run.numbers.leaves.items()), structure, metrics),
            *(points, evaluation.TOGETHER, self.devices, *((leaf.shape, leaf.dtype) for leaf in leaves)),
        )
        if key in kept:
            self.compiles += 1
        else:
            kept[key] = real(self, run, common, points)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SweepEvaluator, "_compile", compile_once)
        yield


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
