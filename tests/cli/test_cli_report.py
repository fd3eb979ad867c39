"""`jaxmoe report`: a page of every command's folder, and one clear error for what is none."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from pyarrow import parquet
from report_folders import write_evaluated, write_sweep

from jaxmoe.traces import write_trace
from jaxmoe.traces.synthetic import synthetic_trace

MADE_OF = "What the time is made of"


@pytest.fixture
def evaluated(tmp_path):
    return write_evaluated(tmp_path / "evaluated")


@pytest.fixture
def swept(tmp_path):
    return write_sweep(tmp_path / "swept")


def figures_of(page: Path):
    """Data of the figures of a page, by title."""
    text = page.read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1])
    titles = re.findall(r'<figure id="(figure-\d+)"[^>]*><h3>(.*?)</h3>', text)
    assert [key for key, _ in titles] == list(data)
    return {title: data[key] for key, title in titles}


def headings_of(page: Path):
    return re.findall(r"<h2>(.*?)</h2>", page.read_text(encoding="utf-8"))


def refused(result, folder, *expected):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr
    for text in expected:
        assert text in result.stderr
    assert not [file for file in folder.rglob("*") if file.suffix in (".html", ".part")]


def test_a_comparison_has_its_figures_and_how_it_was_made(run, evaluated):
    result = run("report", evaluated)
    assert result.exit_code == 0, result.output
    page = evaluated / "report.html"
    assert result.stdout.strip() == str(page)
    assert headings_of(page) == ["Strategies", "Machine", "Layers", "Model against simulator", "How it was made"]
    figures = figures_of(page)
    dispatch, compute, combine, p95, best, own = (each["x"] for each in figures[MADE_OF]["figure"]["data"])
    np.testing.assert_allclose([dispatch, compute, combine], [[2.0, 6.0], [10.0, 4.0], [2.0, 2.0]])  # µs
    np.testing.assert_allclose([p95, best, own], [[15.0, 14.0], [14.0, 12.0], [15.0, 17.0]])
    assert figures["Under every exchange"]["figure"]["data"][0]["z"] == [[15.0, 14.0], [17.0, 12.0]]
    options = figures["Stages of every layer"]["choices"]["options"]
    assert [option["name"] for option in options] == ["ep", "tp"]  # the fastest first: ep, under its best exchange
    np.testing.assert_allclose(options[1]["update"]["y"], [[1.0, 3.0], [10.0, 10.0], [2.0, 2.0]])
    text = page.read_text(encoding="utf-8")
    for told in ("jaxmoe evaluate by_hand.yaml", "bandwidth_GB_per_s: 10", "9.8.7", "1.168", "ring (1), tree (1)"):
        assert told in text


def test_a_run_of_old_has_its_stages_under_own_exchanges(run, evaluated):
    summary = json.loads((evaluated / "summary.json").read_text())
    for of in summary["strategies"].values():
        for times in (of["mean"], *of["layers"]):
            for key in [key for key in times if key.startswith("best_") and key.endswith("_s")]:
                if key != "best_total_s":
                    del times[key]
    (evaluated / "summary.json").write_text(json.dumps(summary))
    assert run("report", evaluated).exit_code == 0
    data = figures_of(evaluated / "report.html")[MADE_OF]["figure"]["data"]
    _, _, combine, p95, best, _ = (each["x"] for each in data)
    np.testing.assert_allclose([combine, p95, best], [[3.0, 7.0], [16.0, 19.0], [14.0, 12.0]])
    assert "under the strategy&#x27;s own exchange" in (evaluated / "report.html").read_text(encoding="utf-8")


def test_the_machine_is_shown_frame_by_frame(run, evaluated):
    assert run("report", evaluated).exit_code == 0
    machine = figures_of(evaluated / "report.html")["Load of nodes and links"]
    assert (machine["frames"], machine["names"]) == (["layer 3", "layer 5"], ["tp", "ep"])
    assert machine["node"] == [[[10.0, 10.0], [10.0, 10.0]], [[4.0, 1.0], [2.0, 4.0]]]


@pytest.mark.slow
def test_the_page_of_the_command_itself_agrees_with_its_summary(run, scenario, tmp_path):
    out = tmp_path / "out"
    assert run("evaluate", scenario, "--out", out).exit_code == 0
    assert run("report", out).exit_code == 0
    summary, figures = json.loads((out / "summary.json").read_text()), figures_of(out / "report.html")
    stacked = np.sum([bar["x"] for bar in figures[MADE_OF]["figure"]["data"][:3]], axis=0)
    told = [of["mean"]["best_total_s"] for of in summary["strategies"].values()]
    np.testing.assert_allclose(stacked / stacked[0], np.array(told) / told[0], rtol=1e-3)  # a serial schedule
    busiest = np.array(figures["Load of nodes and links"]["node"]).argmax(axis=-1)
    limits = [[layer["best_limit"] for layer in of["layers"]] for of in summary["strategies"].values()]
    at_nodes = [(at, row) for at, of in enumerate(limits) for row in range(len(of)) if of[row]["resource"] == "compute"]
    assert at_nodes
    assert all(busiest[at, row] == limits[at][row]["place"] for at, row in at_nodes)


def test_without_loads_the_rest_is_shown(run, evaluated):
    (evaluated / "loads.npz").unlink()
    assert run("report", evaluated).exit_code == 0
    assert "Machine" not in headings_of(evaluated / "report.html")


def test_damaged_loads_are_one_error(run, evaluated):
    (evaluated / "loads.npz").write_bytes(b"nothing")
    refused(run("report", evaluated), evaluated, "loads.npz is not as jaxmoe writes it", "run the command again")


@pytest.mark.slow
def test_every_command_has_a_page(run, scenario, plan, tmp_path):
    tuned, validated, simulated = (tmp_path / name for name in ("tuned", "validated", "simulated"))
    assert run("tune", scenario, "--out", tuned).exit_code == 0
    assert run("validate", scenario, "--plan", plan, "--batch-tokens", "4,8", "--out", validated).exit_code == 0
    assert run("simulate", scenario, "--iterations", 4, "--out", simulated).exit_code == 0
    expected = {
        tuned: {"Under every exchange", "Load of nodes and links", "The search"},
        validated: {"Model against event simulator"},
        simulated: {"Iterations", "What the time is made of"},
    }
    for folder, titles in expected.items():
        result = run("report", folder, "--out", tmp_path / "page.html")
        assert result.exit_code == 0, result.output
        assert titles <= figures_of(tmp_path / "page.html").keys()
        assert not (folder / "report.html").exists()


@pytest.mark.slow
def test_traffic_is_shown_on_its_network(run, tmp_path):
    machine, traffic, out = tmp_path / "ring.yaml", tmp_path / "traffic.npz", tmp_path / "network"
    machine.write_text("{kind: ring, nodes: 4, link: {bandwidth_GB_per_s: 1}, router: {chunk_B: 64}}")
    one = np.zeros((4, 4))
    one[0, 1] = 640.0
    np.savez(traffic, one=one, two=2 * one)
    assert run("network", machine, "--traffic", traffic, "--out", out).exit_code == 0
    assert run("report", out).exit_code == 0
    shown = figures_of(out / "report.html")["Load of nodes and links"]
    assert shown["frames"] == ["one", "two"]
    assert shown["node"] == [[[0.0, 0.64, 0.0, 0.0], [0.0, 1.28, 0.0, 0.0]]]  # kB received
    assert sorted(shown["link"][0][1])[-2:] == [0.0, 1.28]


@pytest.mark.slow
def test_a_trace_has_its_figures_by_layer(run, tmp_path):
    trace, out = tmp_path / "trace.npz", tmp_path / "stats"
    write_trace(trace, synthetic_trace(64, (3, 5, 9), 8, 2, 1.5, 0.2, 0.2, 0))
    result = run("trace", "stats", trace, "--out", out)
    assert result.exit_code == 0, result.output
    assert run("report", out).exit_code == 0
    figure = next(iter(figures_of(out / "report.html").values()))
    summary = json.loads((out / "summary.json").read_text())
    assert figure["figure"]["data"][0]["x"] == [layer["layer_id"] for layer in summary["layers"]] == [3, 5, 9]


@pytest.mark.slow
def test_a_sweep_of_the_command_itself_has_a_page(run, scenario, tmp_path):
    study, out = tmp_path / "study.yaml", tmp_path / "out"
    axes = {"hardware.link.bandwidth_GB_per_s": [2, 8], "strategy": ["tp", "ep_balanced"]}
    study.write_text(yaml.safe_dump({"scenario": scenario.name, "axes": axes}))
    result = run("sweep", study, "--out", out, "--elasticities")
    assert result.exit_code == 0, result.output
    result = run("report", out)
    assert result.exit_code == 0, result.output
    assert figures_of(out / "report.html").keys() == {
        "Select in one, see in the other",
        "Map of winners",
        "Elasticities",
    }
    text = (out / "report.html").read_text(encoding="utf-8")
    assert f"jaxmoe sweep {study} --out {out} --elasticities" in text
    assert "bandwidth_GB_per_s" in text


def test_a_sweep_has_its_fronts_and_winners(run, swept):
    result = run("report", swept)
    assert result.exit_code == 0, result.output
    figures = figures_of(swept / "report.html")
    assert figures.keys() == {"Select in one, see in the other", "Map of winners", "Elasticities"}
    rows = [row for file in (swept / "points").iterdir() for row in parquet.read_table(file).to_pylist()]
    linked = figures["Select in one, see in the other"]
    assert set(linked["hash"]) == {row["hash"] for row in rows}
    best = min(rows, key=lambda row: row["total_s"])
    assert all(
        linked["hash"][front["rows"][0]] == best["hash"] for front in linked["fronts"] if front["pair"][0] == "total"
    )
    assert len(figures["Map of winners"]["winner"]) == 8


def test_a_sweep_that_was_stopped_has_a_page_and_says_so(run, swept):
    (swept / "summary.json").unlink()
    assert run("report", swept).exit_code == 0
    assert "was stopped before it was done" in (swept / "report.html").read_text(encoding="utf-8")


def test_of_many_points_a_sample_and_the_whole_front_are_drawn(run, swept, monkeypatch):
    run("report", swept)
    whole = figures_of(swept / "report.html")["Select in one, see in the other"]
    monkeypatch.setattr("jaxmoe.cli.report_sweep.DRAWN", 3)
    assert run("report", swept).exit_code == 0
    sample = figures_of(swept / "report.html")["Select in one, see in the other"]
    assert len(sample["hash"]) < len(whole["hash"])
    for some, every in zip(sample["fronts"], whole["fronts"], strict=True):
        assert [sample["hash"][row] for row in some["rows"]] == [whole["hash"][row] for row in every["rows"]]
    text = (swept / "report.html").read_text(encoding="utf-8")
    assert f"Figures show {len(sample['hash'])} of 16 points" in text
    assert "3 of 8 cases are drawn" in text


def test_a_sweep_without_points_is_one_error(run, swept):
    shutil.rmtree(swept / "points")
    refused(run("report", swept), swept, "holds no points of a sweep yet")


def test_a_damaged_file_of_points_is_named(run, swept):
    damaged = next((swept / "points").iterdir())
    damaged.write_bytes(b"nothing")
    refused(run("report", swept), swept, damaged.name, "cannot be read", "run the sweep again")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"metrics": 3}'])
def test_a_damaged_manifest_is_one_error(run, swept, text):
    (swept / "manifest.json").write_text(text)
    refused(run("report", swept), swept, "manifest.json is not that of a sweep")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "summary.json is damaged"),
        ("\x00\xff", "summary.json is damaged"),
        ("[1]", "does not say which command wrote it"),
        ('{"command": 3}', "does not say which command wrote it"),
        ('{"command": "cook"}', "command is 'cook', expected one of tune, tune --hardware, evaluate"),
        ('{"command": "evaluate"}', "is not as jaxmoe evaluate writes it (KeyError: 'strategies')"),
        ('{"command": "evaluate", "strategies": {}, "bound_s": null}', "is not as jaxmoe evaluate writes it"),
        ('{"command": "simulate", "runs": [1], "replayed": {}}', "is not as jaxmoe simulate writes it"),
        ('{"command": "network", "matrices": {"a": 1}}', "is not as jaxmoe network writes it"),
        ('{"command": "validate", "strategies": 1}', "is not as jaxmoe validate writes it"),
    ],
)
def test_a_damaged_summary_is_one_error(run, tmp_path, text, expected):
    (tmp_path / "summary.json").write_bytes(text.encode("latin-1"))
    refused(run("report", tmp_path), tmp_path, expected, "run the command again" if "cook" not in text else "")


def test_what_is_no_folder_of_results_is_one_error(run, tmp_path):
    refused(run("report", tmp_path), tmp_path, "holds no summary.json: it is no folder of results")
    refused(run("report", tmp_path / "none"), tmp_path, "there is no folder")
    (tmp_path / "file").touch()
    refused(run("report", tmp_path / "file"), tmp_path, "there is no folder")


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_page_that_cannot_be_written_is_one_error(run, evaluated, tmp_path, monkeypatch):
    refused(run("report", evaluated, "--out", tmp_path), tmp_path, "--out is", "a folder; give the name of a file")
    refused(run("report", evaluated, "--out", tmp_path / "no" / "page.html"), tmp_path, "there is no folder", "no")
    monkeypatch.setattr("jaxmoe.report.html.page.in_script", full_disk)
    refused(run("report", evaluated), tmp_path, "--out: cannot write", "No space left on device; give another file")


def test_without_plotly_it_says_what_to_install(run, evaluated, monkeypatch):
    monkeypatch.setattr("jaxmoe.report.html.page.find_spec", lambda name: None)
    refused(run("report", evaluated), evaluated, "needs plotly; install it with: ", "pip install '.[report]'")
