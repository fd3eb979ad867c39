"""`jaxmoe sweep`: what it writes and says, one clear error for bad input, and what Ctrl-C leaves."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from pyarrow import dataset, parquet

from jaxmoe.cli.session import Interrupts
from jaxmoe.cli.sweep_answers import label_of
from jaxmoe.config.files import shipped_names
from jaxmoe.files import read_table
from jaxmoe.registry import METRICS
from jaxmoe.run_folders import RECORD, locked
from jaxmoe.sweep import Space, evaluation
from jaxmoe.sweep.study import read_study

LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"
AXES = {LINK: [2, 8], DIE: [1, 2], "strategy": ["tp", "ep_balanced"]}
FILES = {"points", "points.csv", "study.yaml", "manifest.json", "summary.json"}


@pytest.fixture
def study(scenario, tmp_path):
    def write(**sections):
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({"scenario": scenario.name, "axes": AXES} | sections, sort_keys=False))
        return path

    return write


def rows_in(out):
    return dataset.dataset(out / "points").to_table().to_pylist()


def test_a_sweep_writes_points_and_tells_what_came_out(run, study, out, monkeypatch):
    result = run("sweep", study(), "--out", out, "--pareto", "total,utilisation", "--elasticities")
    assert result.exit_code == 0, result.output
    names = {file.name for file in out.iterdir()}
    assert names == FILES | {"elasticities.parquet"}
    rows = {row["hash"]: row for row in rows_in(out)}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["points"], summary["computed"], summary["groups"], summary["compiles"]) == (8, 8, 2, 2)
    best = min(rows.values(), key=lambda row: row["total_s"])
    assert summary["best"]["total"] == best
    assert sum(each["cases"] for each in summary["wins"].values()) == 4
    assert summary["pareto"][0]["hash"] == best["hash"]
    assert best["hash"] in result.stdout
    assert "Pareto front of total and utilisation" in result.stdout
    table = read_table(out / "points.csv")
    assert [row["hash"] for row in table] == [point.hash for point in Space(read_study(study())).points()]
    for row in table:
        whole = rows[row["hash"]]
        assert (row["limit"], float(row[LINK])) == (whole["busiest_kind"], whole[LINK])
        assert float(row["total_s"]) == pytest.approx(whole["total_s"], rel=1e-5)
    elasticities = parquet.read_table(out / "elasticities.parquet").to_pylist()
    assert len(elasticities) == 8 * 8 * 2
    assert {row["hash"] for row in elasticities} == set(rows)

    (out / "map.png").touch()
    monkeypatch.setattr("jaxmoe.cli.sweep.MOST_IN_TABLE", 7)  # of eight points
    again = run("sweep", study(), "--out", out)
    assert json.loads((out / "summary.json").read_text())["computed"] == 0, again.output
    # What an earlier run told of points, and this one does not, goes.
    assert {file.name for file in out.iterdir()} == FILES - {"points.csv"}


@pytest.mark.usefixtures("rendered")
def test_effects_and_a_map(run, study, out):
    """Two rates and two strategies, which change the logarithm of the time to compute by amounts that add up."""
    result = run("sweep", study(), "--out", out, "--effects", "--map", f"{LINK},compute_TFLOPs_per_s")
    assert result.exit_code == 0, result.output
    assert (out / "map.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "summary.json").read_text())
    assert {*summary["result_files"]} == {file.name for file in out.iterdir()}
    compute = summary["effects"]["compute"]
    assert compute["points"] == 8
    assert compute["main"][LINK] == pytest.approx(0, abs=1e-9)
    logs = {(row["strategy"], row[DIE]): np.log(row["compute_s"]) for row in rows_in(out)}
    rate, strategy = (logs["tp", 1] - logs["tp", 2]) ** 2, (logs["tp", 1] - logs["ep_balanced", 1]) ** 2
    assert compute["main"][DIE] == pytest.approx(rate / (rate + strategy), rel=1e-4)
    assert compute["total"]["strategy"] == pytest.approx(strategy / (rate + strategy), rel=1e-4)
    assert sum(sum(of.values()) for of in summary["limits"].values()) == 8
    for told in ("variance", "points by", "link bandwidth [GB/s]"):
        assert told in result.stdout


def test_without_a_slope_there_are_no_elasticities_but_all_else(run, study, out):
    out.mkdir(parents=True)
    (out / "elasticities.parquet").touch()
    given = study(axes={"f": [1, 2], "strategy": ["tp"]}, derived={LINK: "10 + (f > 1) * f"})
    result = run("sweep", given, "--out", out, "--pareto", "total, p95", "--elasticities")
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == FILES
    assert "elasticities.parquet" not in json.loads((out / "summary.json").read_text())["result_files"]
    assert "best by total of 2 points" in result.stdout
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
    assert min(stage["beside_s"] for stage in told["stages"].values()) >= 0  # rounding does not count
    assert "lower bound" in result.stdout


SLOW = {"compute_TFLOPs_per_s": 0.5, "memory_bandwidth_GB_per_s": 500, "memory_capacity_GB": 16}


def test_whole_mappings_fit_a_terminal_of_80_columns(run, study, out, monkeypatch):
    """A mapping of an axis stands once below the front; its rows name it by its number, and no cell is cut off."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    fast = SLOW | {"compute_TFLOPs_per_s": 5}
    axes = {"hardware.die": [SLOW, fast], LINK: [2, 8], "strategy": ["ep_balanced"]}
    result = run("sweep", study(axes=axes), "--out", out, "--pareto", "total,utilisation")
    assert result.exit_code == 0, result.output
    lines = re.sub(r"\x1b\[[\d;]*m", "", result.stdout).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    best = min(rows_in(out), key=lambda row: row["total_s"])
    front = lines[next(at for at, line in enumerate(lines) if "Pareto front" in line) :]
    (row,) = (line for line in front if line.startswith(f"│ {best['hash'][:8]} "))
    assert row.split("│")[-3].strip() == "#2"
    assert sum('hardware die #2: {"compute_TFLOPs_per_s": 5' in line for line in front) == 1


def test_times_of_a_sweep_have_a_handy_unit(run, study, out):
    result = run("sweep", study(), "--out", out)
    best = min(rows_in(out), key=lambda row: row["total_s"])
    unit, cell = re.search(r"│ total \[(.*?)\] +│ ([\d.]+)", result.stdout).groups()
    assert float(cell) == pytest.approx({"ms": 1e3, "µs": 1e6, "ns": 1e9}[unit] * best["total_s"], rel=1e-3)
    assert 1 <= float(cell) < 1000


def test_a_shipped_scenario_is_named(study):
    """Its name finds it from any folder, but for a file of that name beside the study."""
    path = study(scenario="quickstart")
    assert read_study(path).scenario == shipped_names("scenarios")["quickstart"]
    (own := path.parent / "quickstart").touch()
    assert read_study(path).scenario == own


@pytest.mark.parametrize(
    ("sections", "options", "told"),
    [
        ({"axes": {"hardware.link.bandwith_GB_per_s": [1]}}, [], "Did you mean bandwidth_GB_per_s?"),
        ({"axes": {LINK: []}}, [], "at least one value"),
        ({"where": [f"{LINK} > 100"]}, [], "where leaves no point"),
        ({"metrics": ["watts"]}, [], "expected one of total, p95"),
        ({}, ["--pareto", "total"], "expected two or three of total"),
        ({}, ["--pareto", "total,utilization"], "Did you mean utilisation?"),
        ({}, ["--map", LINK], "expected two axes of numbers, separated by a comma: hardware.link"),
        ({}, ["--map", "strategy,bandwidth_GB_per_s"], "expected two axes of numbers"),
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
    with ThreadPoolExecutor(1) as other:
        holder = locked(out)
        other.submit(holder.__enter__).result()
        result = run("sweep", study(), "--out", out)
        other.submit(holder.__exit__, None, None, None).result()
    assert result.exit_code == 2
    assert "another run is writing to" in result.stderr


def test_metrics_that_are_no_numbers_make_a_summary_all_the_same(run, study, out, monkeypatch):
    nan = replace(METRICS["p95"], of=lambda seen: seen.times.p95.mean() * jnp.nan)
    monkeypatch.setattr(evaluation, "METRICS", {**METRICS, "p95": nan})
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
    assert [*out.glob(".*")] == [out / RECORD]


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("hardware.link.bandwidth_GB_per_s", "link bandwidth [GB/s]"),
        ("hardware.die.compute_TFLOPs_per_s", "die compute [TFLOP/s]"),
        ("hardware.link.latency_ns", "link latency [ns]"),
        ("workload.batch_tokens", "workload batch tokens"),
        ("total_GB_per_s", "total [GB/s]"),
    ],
)
def test_axes_have_units(key, label):
    assert label_of(key) == label
