"""Progress without a terminal, hints of what to install, and results that are printed alone."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxmoe import extras
from jaxmoe.cli import progress
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.placement.engine_files import write_slot_plan
from jaxmoe.placement.slots import SlotPlan


@pytest.mark.parametrize("quiet", [False, True])
def test_a_line_now_and_then_tells_what_a_run_is_at(capsys, monkeypatch, quiet):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    with progress.progress_lines(quiet):
        time.sleep(0.1)
        with progress.progress_bars(lambda: None) as report:
            report("roll out", 2, 3)
            time.sleep(0.2)
    told = capsys.readouterr().err.splitlines()
    if quiet:
        assert told == []
    else:
        assert told[0] == "0 s: reading"
        assert told[-1] == "0 s: roll out, 2 of 3"


def test_a_stage_is_told_as_it_begins(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    with progress.progress_lines(False), StageTimer() as clock, clock.stage("highest rate"):
        time.sleep(0.1)
    assert capsys.readouterr().err.splitlines()[-1] == "0 s: highest rate"
    with StageTimer() as clock, clock.stage("after"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_lines_end_with_the_run(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    with pytest.raises(ZeroDivisionError), progress.progress_lines(False):
        raise ZeroDivisionError
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.fixture
def _activated(monkeypatch):
    """The environment of the tests is the shell's."""
    monkeypatch.setattr(extras, "which", lambda _: str(Path(sys.executable).parent / "pip"))


@pytest.mark.usefixtures("_activated")
def test_in_a_clone_an_extra_is_installed_from_it(monkeypatch, tmp_path, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)
    assert extras.install_command("report", "plotly") == "pip install '.[report]'"
    monkeypatch.chdir(tmp_path)
    assert extras.install_command("report", "plotly") == f"pip install '{pytestconfig.rootpath}[report]'"
    assert extras.install_command("of_another", "package") == "pip install 'package'"


@pytest.mark.usefixtures("_activated")
def test_without_a_clone_packages_are_named(monkeypatch, tmp_path):
    needed = ["jax>=0.10", 'plotly>=6; extra == "report"', "pyarrow>=15; extra == 'sweep'", "ray; extra == 'ray'"]
    monkeypatch.setattr(extras, "requires", lambda _: [*needed, "jaxmoe[sweep]; extra == 'ray'"])
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "jaxmoe" / "extras.py"))
    assert extras.install_command("report", "plotly") == "pip install 'plotly>=6'"
    assert extras.install_command("ray", "ray") == "pip install 'ray' 'pyarrow>=15'"


def test_packages_go_where_jaxmoe_is(monkeypatch, tmp_path):
    """Where that environment is not activated, `pip` alone would be another one's, or none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras.sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    for others in (None, "/usr/bin/pip"):
        monkeypatch.setattr(extras, "which", lambda _, found=others: found)
        assert extras.install_command("of_another", "package") == ".venv/bin/python -m pip install 'package'"
    monkeypatch.setattr(extras.sys, "executable", "/opt/my env/bin/python")
    assert extras.install_command("of_another", "package") == "'/opt/my env/bin/python' -m pip install 'package'"


def test_the_peak_of_memory_is_of_what_was_taken_and_given_back():
    code = (
        "import numpy; from jaxmoe.memory import peak_memory as peak; a = peak(); numpy.ones(2**25); print(peak() - a)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(8 * 2**25, rel=0.1)


def test_show_and_check_print_where_no_folder_is_given(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = SlotPlan(np.tile(np.arange(32), (4, 1)), 16, 32, tuple(range(4)), 4)
    write_slot_plan(Path("map.json"), "vllm_ascend", plan)
    shown = run("plan", "show", "map.json")
    checked = run("plan", "check", "map.json", "--machine", "nmp_4x4", "--model", "tiny")
    assert shown.exit_code == checked.exit_code == 0, shown.output + checked.output
    assert "ranks" in shown.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["map.json"]


def test_help_shows_what_stands_in_brackets(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert "pip install '.[ray]'" in run("sweep", "--help").stdout
