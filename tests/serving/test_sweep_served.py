"""`jaxmoe sweep` over requests and engines: each point as `serve` tells it, kills, what is left out, errors."""

import csv
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_serve import scenario
from typer.testing import CliRunner

from jaxmoe.cli.app import app
from jaxmoe.config import load_scenario
from jaxmoe.experiment.serving import answers
from jaxmoe.experiment.serving_inputs import serving_of
from jaxmoe.sweep.served import CHUNK, sweep_served
from jaxmoe.sweep.study import read_study

__all__ = ["scenario"]  # a fixture
AXES = {"serving.arrivals.rate_per_s": [50, 400], "serving.engine.seats": [2, 4], "deployment.tensor": [2, 3]}


@pytest.fixture
def study(scenario, tmp_path):
    def write(**sections: object) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({"name": "made up", "scenario": str(scenario), "axes": AXES} | sections))
        return path

    return write


def sweep(*arguments: object):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "served.csv").open() as file:
        return list(csv.DictReader(file))


def points(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "points").iterdir()}


def test_points_are_what_serve_tells_of_each_by_itself(study, scenario, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    done = sweep(study(), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 8
    for row in rows:
        if row["deployment.tensor"] == "3":
            assert row["left_out"].startswith("deployment.tensor is 3; expected a divisor of the 8 heads")
            assert not row["goodput_per_s"]
            continue
        own = serving_of(load_scenario(scenario, [f"{key}={row[key]}" for key in AXES]))
        told = answers(own, *own.at())
        for name in ("goodput_per_s", "output_tokens_per_s", "within_limits", "drains", "requests"):
            assert float(row[name]) == pytest.approx(float(told[name]), rel=1e-5)
        for wait in ("first_token", "per_token"):
            assert float(row[f"{wait}_p99_s"]) == pytest.approx(told["waits_s"][wait]["p99"], rel=1e-5)
        assert float(row["gpus"]) == 4  # two engines of two
        assert float(row["tokens_per_s_device"]) == pytest.approx(told["output_tokens_per_s"] / 4, rel=1e-5)
        keeps = told["drains"] and told["within_limits"] >= 0.9
        assert float(row["keeps_limits"]) == float(keeps)
    assert "4 left out: deployment.tensor is 3" in done.output.replace("\n", " ")
    page = CliRunner().invoke(app, ["report", str(tmp_path / "out"), "--out", str(tmp_path / "page")])
    assert "is of a sweep over serving, which has no page" in page.output.replace("\n", " ")


def test_the_front_is_of_points_that_keep_their_limits_and_none_beats_another(study, tmp_path):
    many = {"serving.arrivals.rate_per_s": [50, 3000], "serving.engine.seats": [1, 4], "deployment.tensor": [1, 2]}
    (tmp_path / "out").mkdir()
    found = sweep_served(read_study(study(axes=many)), tmp_path / "out", lambda done, total: None)
    assert len(found.front) >= 2
    speeds = [(row["tokens_per_s_user"], row["tokens_per_s_device"]) for row in found.front]
    kept = [row for row in found.served if row["drains"] and row["within_limits"] >= 0.9]
    assert 0 < len(kept) < len(found.served)
    for user, device in speeds:
        beaten = [row for row in kept if row["tokens_per_s_user"] > user and row["tokens_per_s_device"] >= device]
        assert not beaten
    assert max(user for user, _ in speeds) == max(row["tokens_per_s_user"] for row in kept)
    assert max(device for _, device in speeds) == max(row["tokens_per_s_device"] for row in kept)


def test_deployments_and_files_are_read_once(study, tmp_path, monkeypatch):
    from jaxmoe.experiment import serving_inputs

    made, table = [], serving_inputs.step_table
    monkeypatch.setattr(serving_inputs, "step_table", lambda *given: made.append(given) or table(*given))
    (tmp_path / "out").mkdir()
    axes = {"serving.arrivals.rate_per_s": [50, 100, 200], "deployment.tensor": [1, 2]}
    sweep_served(read_study(study(axes=axes)), tmp_path / "out", lambda done, total: None)
    assert len(made) == 2


REFUSED = {
    "strategy": ({"axes": AXES | {"strategy": ["tp"]}}, [], "strategy is given beside axes of serving"),
    "metrics": ({"metrics": ["total"]}, [], "metrics is given beside axes of serving"),
    "option": ({}, ["--elasticities"], "--elasticities is given, but"),
    "none": ({"set": {"deployment.tensor": 3}, "axes": {"serving.seed": [1, 2]}}, [], "no point can be served. The"),
    "key": ({"axes": {"serving.engine.seat": [1]}}, [], "serving.engine.seat"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_swept_is_told_before_any_file(study, tmp_path, case):
    sections, options, said = REFUSED[case]
    done = sweep(study(**sections), "--out", tmp_path / "out", *options)
    assert done.exit_code == 2, done.output
    assert said in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_an_axis_that_was_dropped_is_in_no_row(study, tmp_path, monkeypatch):
    """Its column stays in the files, of which a later run reads some points and adds others."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    rate = "serving.arrivals.rate_per_s"
    for axes in ({rate: [50], "serving.engine.seats": [2]}, {rate: [50]}, {rate: [50, 400]}):
        done = sweep(study(axes=axes), "--out", tmp_path / "out")
        assert done.exit_code == 0, done.output
    rows = rows_of(tmp_path / "out")
    assert [row[rate] for row in rows] == ["50", "400"]
    assert all("serving.engine.seats" not in row for row in rows)


def test_a_folder_of_another_base_is_refused(study, tmp_path):
    axes = {"serving.seed": [1]}
    assert sweep(study(axes=axes), "--out", tmp_path / "out").exit_code == 0
    done = sweep(study(axes=axes, set={"serving.engines": 1}), "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "holds results of another study" in done.output.replace("\n", " ")


def test_a_study_of_which_nothing_can_be_is_told_also_where_others_were_served(study, tmp_path):
    for tensors, code in (([2, 3], 0), ([3], 2)):
        done = sweep(study(axes={"serving.seed": [1], "deployment.tensor": tensors}), "--out", tmp_path / "out")
        assert done.exit_code == code, done.output
    assert "no point can be served. The first: deployment.tensor is 3" in done.output.replace("\n", " ")


# The command, with a line in a file for every point that is served.
SCRIPT = """
import os, sys
from jaxmoe.cli.app import app
from jaxmoe.experiment.serving import Serving

log, at = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), Serving.at

def logged(self, *given, **more):
    found = at(self, *given, **more)
    os.write(log, b"served\\n")
    return found

Serving.at = logged
app(sys.argv[2:])
"""
KILLS = 2


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sweep", "rates"])
def test_a_kill_loses_a_chunk_at_most_and_the_end_is_the_same_to_the_byte(study, scenario, tmp_path, verb):
    """kill -9 at moments drawn while points are served, then once more to the end."""
    rates = [10 + at for at in range(16)]
    many = "serving.arrivals.requests=10000"
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    if verb == "sweep":
        path = study(axes={"serving.arrivals.rate_per_s": rates}, set=dict([many.split("=")]))
        path.write_text(path.read_text().replace("'10000'", "10000"))
        given, table = ["sweep", str(path)], "served.csv"
    else:
        given = ["serve", "rates", str(scenario), "--rates", ",".join(map(str, rates)), "--set", many]
        table = "rates.csv"

    def command(out: Path) -> list[str]:
        return [sys.executable, "-c", SCRIPT, str(log), *given, "--out", str(out), "--quiet"]

    def served() -> int:
        return log.read_text().count("\n") if log.exists() else 0

    assert subprocess.run(command(whole), capture_output=True, check=False).returncode == 0
    assert served() == len(rates)
    draw, there, stopped = random.Random(0), 0, 0
    for _ in range(KILLS):
        log.unlink()
        process = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        begun = draw.randrange(1, len(rates) // KILLS)
        while process.poll() is None and served() < begun:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = CHUNK * len([*(killed / "points").glob("*.parquet")])
        stopped += kept < len(rates)
        assert there + served() - kept <= CHUNK + 2  # what was complete but for its chunk, and what ended meanwhile
        there = kept
    assert stopped == KILLS  # the moments are those that were meant
    assert there > 0
    log.unlink()
    assert subprocess.run(command(killed), capture_output=True, check=False).returncode == 0
    assert served() == len(rates) - there
    assert points(killed) == points(whole)
    assert (killed / table).read_bytes() == (whole / table).read_bytes()
    assert not list(killed.glob(".*"))
