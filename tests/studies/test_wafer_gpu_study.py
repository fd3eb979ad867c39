"""The breakdown of decode steps: its rows, what weights take, and the command that gives the same."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxmoe.cli.app import app
from jaxmoe.config import load_scenario
from jaxmoe.experiment.deployment import deployed
from jaxmoe.files import read_table

STUDY = Path(__file__).parents[2] / "studies" / "wafer_gpu"
ROWS = read_table(STUDY / "breakdown.csv")


@pytest.fixture(scope="module")
def breakdown():
    sys.path.insert(0, str(STUDY))
    import breakdown

    yield breakdown
    sys.path.remove(str(STUDY))
    sys.modules.pop("breakdown")


def test_parts_are_the_whole_step():
    for row in ROWS:
        parts = [float(row[name]) for name in row if name.endswith("_percent") and name != "weights_percent"]
        assert sum(parts) == pytest.approx(100, abs=0.03)  # of four digits each


def test_weights_at_the_full_rate_are_part_of_what_their_experts_take():
    assert all(float(row["weights_percent"]) < float(row["experts_percent"]) for row in ROWS)


def test_half_of_all_experts_of_mixtral_is_read_by_each_of_two_gpus(breakdown):
    """512 choices fall on each of 8 experts: 32 layers of 8 x 3 x 4,096 x 14,336 weights of 2 B, at 3.35 TB/s."""
    served = breakdown.Serving(breakdown.MIXTRAL, "h100_sxm_8", 2, 128.0, 1024, precision="bfloat16")
    own = deployed(load_scenario(breakdown.SCENARIO, served.options))
    seconds = breakdown.weights_seconds(own.step, 256.0)
    assert seconds == pytest.approx(32 * 8 * 3 * 4096 * 14336 * 2 / 2 / 3.35e12, rel=1e-5)


def test_every_row_is_a_configuration_in_its_turn(breakdown):
    assert [shlex.split(row["options"])[1::2] for row in ROWS] == [served.options for served in breakdown.SERVED]


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 8, 13])
def test_evaluate_tells_the_step_of_a_row(at, tmp_path, breakdown):
    row = ROWS[at]
    told = [*shlex.split(row["options"]), "--phase", "decode", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["evaluate", str(breakdown.SCENARIO), *told])
    assert done.exit_code == 0, done.output
    step = json.loads((tmp_path / "summary.json").read_text())["step"]
    assert 1e3 * step["seconds"] == pytest.approx(float(row["step_ms"]), rel=1e-3)
    assert 100 * step["parts_s"]["experts"] / step["seconds"] == pytest.approx(float(row["experts_percent"]), rel=1e-3)
