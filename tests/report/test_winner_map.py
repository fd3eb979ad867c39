"""The map of winners: tiles for a grid, points for drawn numbers."""

import numpy as np
import pytest
from matplotlib.collections import PolyQuadMesh

from jaxmoe.report import plot_wins, style, winner_map


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws, and gives the axes."""
    kept = []
    monkeypatch.setattr(style, "save", lambda figure, path: kept.append(figure.axes[0]))

    def draw(x, y, winner, logarithmic=(False, False), behind=None):
        places = np.array(x, float), np.array(y, float)
        behind = np.ones(len(winner)) if behind is None else np.array(behind)
        plot_wins(tmp_path / "map.png", *places, winner, behind, ("x", "y"), logarithmic, "t")
        return kept[-1]

    return draw


def tiles(axes):
    """How many tiles each winner has."""
    meshes = [each for each in axes.collections if isinstance(each, PolyQuadMesh)]
    names = [each.get_label() for each in axes.patches]
    return dict(zip(names, [each.get_array().count() for each in meshes], strict=True))


def test_a_grid_has_a_tile_for_every_place(drawn):
    axes = drawn([1, 1, 10, 10, 100, 100], [1, 2] * 3, ["tp", "ep", "tp", "tp", "ep", "tp"], (True, False))
    assert tiles(axes) == {"tp": 4, "ep": 2}
    assert axes.get_xscale() == "log"
    assert winner_map._edges(np.array([1.0, 100.0, 10_000.0]), True) == pytest.approx([0.1, 10, 1000, 100_000])


def test_who_wins_most_cases_of_a_place_has_it(drawn):
    axes = drawn([1, 1, 1, 2, 1, 2], [1, 1, 1, 1, 2, 2], ["ep", "tp", "tp", "tp", "ep", "ep"])
    assert tiles(axes) == {"ep": 2, "tp": 2}


def test_a_winner_of_all_is_named_and_its_lead_is_drawn(drawn):
    axes = drawn([1, 2, 1, 2, 2], [1, 1, 2, 2, 2], ["ep"] * 5, behind=[0.1, 0.25, np.inf, 0.3, 0.5])
    (mesh,) = axes.collections
    assert mesh.get_array().filled(-1).ravel().tolist() == pytest.approx([10, 25, -1, 40])
    assert axes.figure.get_suptitle() == "t: ep everywhere"
    assert axes.figure.axes[1].get_ylabel() == "next strategy behind by, %"
    points = drawn([1, 2, 3], [3, 1, 2], ["ep"] * 3, behind=[0.1, 0.2, np.inf]).collections[0]
    assert points.get_array().filled(-1).tolist() == pytest.approx([10, 20, -1])


def test_drawn_numbers_are_points(drawn):
    axes = drawn([1, 2, 3], [3, 1, 2], ["tp", "ep", "tp"])
    counts = {each.get_label(): len(each.get_offsets()) for each in axes.collections}
    assert counts == {"tp": 2, "ep": 1}
