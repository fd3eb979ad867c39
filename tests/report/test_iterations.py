"""Times by iteration: a system beside its baseline, or the baseline alone."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from jaxmoe.report import plot_iterations, style

STEPS = 6
STATIC, FASTER = np.full(STEPS, 3e-3), np.linspace(2e-3, 1e-3, STEPS)
REPLAYED = np.array([0, 5])


def shows(path, colour: str) -> bool:
    same = np.abs(imread(path)[:, :, :3] - to_rgb(colour)) < 1e-2
    return bool(same.all(axis=-1).sum() > 200)


@pytest.mark.parametrize("runs", [{"static": STATIC}, {"static": STATIC, "hd_moe": FASTER}])
def test_every_run_has_its_colour(tmp_path, runs):
    path = tmp_path / "iterations.png"
    plot_iterations(path, runs, {name: seconds[REPLAYED] for name, seconds in runs.items()}, REPLAYED, "runs")
    assert [file.name for file in tmp_path.iterdir()] == ["iterations.png"]
    assert all(shows(path, colour) for colour in style.strategy_colours(runs).values())


def test_lengths_have_to_agree(tmp_path):
    path = tmp_path / "iterations.png"
    with pytest.raises(ValueError, match="hd_moe has 5 values but static has 6"):
        plot_iterations(path, {"static": STATIC, "hd_moe": FASTER[1:]}, {}, REPLAYED, "runs")
    with pytest.raises(ValueError, match="replays of static has 1 values"):
        plot_iterations(path, {"static": STATIC}, {"static": STATIC[:1]}, REPLAYED, "runs")
    assert [*tmp_path.iterdir()] == []
