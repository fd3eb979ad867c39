"""`jaxmoe sweep`: what it writes and says, one clear error for bad input, and what a kill leaves."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml
from pyarrow import dataset, parquet

from jaxmoe.cli.session import Interrupts
from jaxmoe.sweep import evaluation
from jaxmoe.sweep.metrics import METRICS
from jaxmoe.sweep.results import locked

LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"
AXES = {LINK: [2, 8], DIE: [1, 2], "strategy": ["tp", "ep_balanced"]}


@pytest.fixture
def study(scenario, tmp_path):
    def write(**sections):
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({"scenario": scenario.name, "axes": AXES} | sections, sort_keys=False))
        return path

    return write


def rows_in(out):
    return dataset.dataset(out / "points").to_table().to_pylist()


def test_a_sweep_writes_points_and_tells_what_came_out(run, study, out):
    result = run("sweep", study(), "--out", out, "--pareto", "total,utilisation", "--elasticities")
    assert result.exit_code == 0, result.output
    names = {file.name for file in out.iterdir()}
    assert names == {"points", "study.yaml", "manifest.json", "summary.json", "elasticities.parquet"}
    rows = {row["hash"]: row for row in rows_in(out)}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["points"], summary["computed"], summary["groups"], summary["compiles"]) == (8, 8, 2, 2)
    best = min(rows.values(), key=lambda row: row["total_s"])
    assert summary["best"]["total"] == best
    assert sum(each["cases"] for each in summary["wins"].values()) == 4
    assert summary["pareto"][0]["hash"] == best["hash"]
    assert best["hash"] in result.stdout
    assert "Pareto front of total and utilisation" in result.stdout
    elasticities = parquet.read_table(out / "elasticities.parquet").to_pylist()
    assert len(elasticities) == 8 * 8 * 2
    assert {row["hash"] for row in elasticities} == set(rows)

    again = run("sweep", study(), "--out", out)
    assert json.loads((out / "summary.json").read_text())["computed"] == 0, again.output


def test_without_a_slope_there_are_no_elasticities_but_all_else(run, study, out):
    out.mkdir(parents=True)
    (out / "elasticities.parquet").touch()
    given = study(axes={"f": [1, 2], "strategy": ["tp"]}, derived={LINK: "10 + (f > 1) * f"})
    result = run("sweep", given, "--out", out, "--pareto", "total, p95", "--elasticities")
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {"points", "study.yaml", "manifest.json", "summary.json"}
    assert "best by total" in result.stdout
    assert result.stderr.count("no elasticities:") == 1
    assert "Traced" not in result.stderr


def test_a_point_is_explained(run, study, out):
    run("sweep", study(), "--out", out)
    row = rows_in(out)[0]
    result = run("sweep", study(), "--out", out, "--explain", row["hash"])
    assert result.exit_code == 0, result.output
    told = json.loads((out / f"explain-{row['hash']}.json").read_text())
    assert told["total_s"] == pytest.approx(row["total_s"], rel=1e-5)
    assert told["resources"][0]["total_s"] == pytest.approx(row["busiest_s"], rel=1e-5)
    assert told["bound_s"] <= told["total_s"]
    assert "lower bound" in result.stdout


@pytest.mark.parametrize(
    ("sections", "options", "told"),
    [
        ({"axes": {"hardware.link.bandwith_GB_per_s": [1]}}, [], "Did you mean bandwidth_GB_per_s?"),
        ({"axes": {LINK: []}}, [], "at least one value"),
        ({"where": [f"{LINK} > 100"]}, [], "where leaves no point"),
        ({"metrics": ["watts"]}, [], "expected one of total, p95"),
        ({}, ["--pareto", "total"], "expected two or three of total"),
        ({}, ["--explain", "nothing"], "a row number from 0 to 7"),
        ({"scenario": "none.yaml"}, [], "no such file"),
    ],
)
def test_bad_input_is_one_clear_error(run, study, out, sections, options, told):
    result = run("sweep", study(**sections), "--out", out, *options)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr
    assert not out.parent.exists()


def test_results_of_another_study(run, study, out):
    run("sweep", study(), "--out", out)
    result = run("sweep", study(layers=[3]), "--out", out)
    assert result.exit_code == 2
    assert "holds results of another study" in result.stderr


def test_ctrl_c_before_anything_is_written_says_so(run, study, out, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Interrupts, "check", interrupt)
    result = run("sweep", study(), "--out", out)
    assert result.stderr.strip() == "interrupted; nothing was written"


def test_two_sweeps_at_once_are_one_clear_error(run, study, out):
    out.mkdir(parents=True)
    with locked(out):
        result = run("sweep", study(), "--out", out)
    assert result.exit_code == 2
    assert "another sweep is writing to" in result.stderr


def test_metrics_that_are_no_numbers_make_a_summary_all_the_same(run, study, out, monkeypatch):
    monkeypatch.setitem(METRICS, "p95", replace(METRICS["p95"], of=lambda seen: seen.times.p95.mean() * jnp.nan))
    result = run("sweep", study(), "--out", out)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "summary.json").read_text())["best"]["total"]["p95_s"] is None


def test_ctrl_c_keeps_whole_chunks(run, study, out, monkeypatch):
    monkeypatch.setattr(evaluation, "MOST", 2)
    checks = []

    def interrupt(self):
        checks.append(None)
        if any((out / "points").glob("*.parquet")):
            raise KeyboardInterrupt

    monkeypatch.setattr(Interrupts, "check", interrupt)
    result = run("sweep", study(), "--out", out)
    assert result.exit_code == 130
    assert f"complete in {out}: points, manifest.json, study.yaml; run again to go on" in result.stderr
    assert checks
    assert len(rows_in(out)) == 2
    assert not list(out.glob(".*"))


SCRIPT = """
import sys
from jaxmoe.cli.app import app
from jaxmoe.sweep import evaluation
evaluation.MOST = 10
app(sys.argv[1:])
"""


@pytest.mark.slow
def test_kills_lose_no_chunk_but_the_last(study, tmp_path):
    """kill -9 at five moments; what it ends with is what an undisturbed sweep has."""
    path = study(axes={LINK: {"from": 1, "to": 9, "points": 400}, "strategy": ["tp", "ep_balanced"]})
    out, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-c", SCRIPT, "sweep", str(path), "--out"]
    assert subprocess.run([*command, str(whole)], capture_output=True, check=False).returncode == 0
    seen = 0
    for chunks in (1, 5, 12, 30, 55):
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(files(out)) < chunks:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(files(out)) >= max(seen, min(chunks, 80))
        seen = len(files(out))
    assert subprocess.run([*command, str(out)], capture_output=True, check=False).returncode == 0
    one, other = ({row["hash"]: row for row in rows_in(folder)} for folder in (whole, out))
    assert len(rows_in(out)) == len(one) == 800
    assert one.keys() == other.keys()
    for key, row in one.items():
        assert other[key]["total_s"] == pytest.approx(row["total_s"], rel=1e-6)
    assert not list(out.glob(".*"))


def files(out: Path) -> list[Path]:
    return list((out / "points").glob("*.parquet"))
