"""The picture of claims by reading: which claims are there, and that every study has one."""

import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "figures"))
from fig_claims import TABLES, apart, draw

sys.path.pop(0)


def test_claims_are_those_on_which_readings_differ():
    told = [
        ("a", "one", "1"),
        ("a", "two", "2"),
        ("b", "one", "3"),
        ("b", "two", "3"),
        ("c", "one", ""),
        ("c", "two", "4"),
    ]
    rows = [dict(zip(("claim", "reading", "here"), each, strict=True)) for each in told]
    assert [(row["claim"], row["reading"]) for row in apart(rows)] == [
        ("a", "one"),
        ("a", "two"),
        ("c", "one"),
        ("c", "two"),
    ]


@pytest.mark.parametrize("study", [*TABLES])
def test_every_study_has_a_picture(study, tmp_path):
    draw(study, tmp_path / "picture.png")
    height, width, _ = imread(tmp_path / "picture.png").shape
    assert min(height, width) > 400
