"""Descents from many starts."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from jaxmoe.report import plot_starts, style


def test_starts_and_the_best_are_drawn(tmp_path):
    path = tmp_path / "starts.png"
    plot_starts(path, np.geomspace(1e-3, 3e-4, 20)[:, None] * np.array([1, 1.5]), 2.5e-4, "total_s", "two starts")
    best = np.abs(imread(path)[:, :, :3] - to_rgb(style.PALETTE[1])) < 1e-2
    assert best.all(axis=-1).sum() > 200
    assert [file.name for file in tmp_path.iterdir()] == ["starts.png"]


def test_no_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="history is empty"):
        plot_starts(tmp_path / "starts.png", np.zeros((0, 2)), 1e-3, "total_s", "none")
