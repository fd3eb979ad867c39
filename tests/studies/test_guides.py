"""The guides run as they stand, and print what their text says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "studies" / "guides").glob("*.py"))


def printed_by(name: str, folder: Path) -> str:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, ROOT / "studies" / "guides" / f"{name}.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert not any(folder.iterdir())  # nothing is left where it was run
    return done.stdout


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_is_in_percent_format_and_listed(path):
    text = path.read_text()
    assert text.startswith("# %% [markdown]\n# # ")
    assert len(re.findall(r"^# %%$", text, re.M)) >= 3
    assert f"[{path.name}]({path.name})" in (path.parent / "README.md").read_text()


@pytest.mark.slow
def test_placed_experts_are_more_even_than_in_order(tmp_path):
    told = printed_by("place_experts", tmp_path)
    placed, _, in_order = (float(cell) for cell in re.findall(r"\d\.\d{4}", told)[:3])
    assert 1 <= placed < in_order
    assert "for the engine: placement.json" in told


@pytest.mark.slow
def test_of_the_machines_the_one_with_slow_links_is_limited_by_them(tmp_path):
    told = printed_by("choose_machine", tmp_path)
    limits = {(int(a), int(b)): kind for a, b, _, kind in re.findall(r"^ +(\d+) +(\d+) +([\d.]+)  (\w+)$", told, re.M)}
    assert len(limits) == 9
    assert limits[1, 50] == "link"
    assert limits[100, 2] == "compute"
    slopes = [float(value) for value in re.findall(r"([+-][\d.]+) % time", told)]
    assert len(slopes) == 2
    assert -1 < min(slopes) <= max(slopes) < 0


@pytest.mark.slow
def test_the_method_agrees_with_the_simulator(tmp_path):
    told = printed_by("write_method", tmp_path)
    model, simulator = (
        [float(value) for value in re.findall(r"[\d.]+", line)]
        for line in re.findall(r"(?:model|simulator), µs: +\[(.*)\]", told)
    )
    assert len(model) == 2
    assert simulator == pytest.approx(model, rel=0.02)
