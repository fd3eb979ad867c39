"""`jaxmoe serve`: what it prints and writes against its own files, and what it refuses before any work."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernels_by_hand import kernel_file
from typer.testing import CliRunner

from jaxmoe.cli.app import app
from jaxmoe.config import load_scenario
from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.serving import Serving, ends_late
from jaxmoe.experiment.serving_inputs import serving_of
from jaxmoe.hardware.gpu.files import write_kernels
from jaxmoe.report.style import digits
from jaxmoe.serving.online.capacity import drained_rate

SCENARIO = """
name: served
hardware:
  kind: switch
  nodes: 4
  die: {compute_TFLOPs_per_s: 100, memory_capacity_GB: 20, gemm: {kind: fitted, path: kernels.json, backend: sglang,
        precision: bfloat16}}
  link: {bandwidth_GB_per_s: 100, latency_ns: 0}
model: {hidden_size: 256, expert_size: 128, num_experts: 8, top_k: 2, moe_layer_ids: {count: 3}, vocabulary_size: 500,
        attention: {kind: grouped_query, heads: 8, kv_heads: 2, head_size: 32}}
workload: {trace: {kind: synthetic, tokens: 64}, batch_tokens: 16}
deployment: {backend: sglang, tensor: 2, concurrency: 16, prompt_tokens: 128, output_tokens: 64}
serving:
  arrivals: {kind: random, rate_per_s: 200, requests: 60}
  lengths: {prompt_tokens: 128, output_tokens: 16}
  prefixes: {count: 2, tokens: 64}
  engines: 2
  engine: {seats: 4}
  limits: {first_token_s: 0.02, per_token_ms: 5, part: 0.9}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return described(tmp_path)


def described(folder: Path) -> Path:
    write_kernels(folder / "kernels.json", replace(kernel_file(), system="made_up"))
    path = folder / "served.yaml"
    path.write_text(SCENARIO)
    return path


def serve(*arguments: object):
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One run, that several tests look at: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
        run = serve(described(folder), "--out", folder / "out")
    assert run.exit_code == 0, run.output
    return folder / "out", run.output


def table(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}


def test_a_run_writes_its_requests_steps_timeline_and_pictures(done):
    folder, _ = done
    files = {"summary.json", "requests.csv", "steps.csv", "timeline.json", "over_time.png", "waits.png"}
    assert {path.name for path in folder.iterdir()} == files
    assert set(json.loads((folder / "summary.json").read_text())["result_files"]) == files


def test_the_summary_follows_from_the_table_of_requests(done):
    folder, _ = done
    summary, requests = json.loads((folder / "summary.json").read_text()), table(folder / "requests.csv")
    first = requests["first_token_s"] - requests["sent_s"]
    further = requests["output_tokens"] > 1
    each = (requests["finish_s"] - requests["first_token_s"])[further] / (requests["output_tokens"][further] - 1)
    span = requests["finish_s"].max() - requests["sent_s"].min()
    for values, name in ((first, "first_token"), (each, "per_token")):
        told = summary["waits_s"][name]
        assert told["mean"] == pytest.approx(values.mean(), rel=1e-6)
        assert told["p95"] == pytest.approx(np.percentile(values, 95), rel=1e-6)
    slow = np.zeros(60, bool)
    slow[further] = each > 0.005
    within = (first <= 0.02) & ~slow
    assert summary["goodput_per_s"] == pytest.approx(within.sum() / span, rel=1e-6)
    assert summary["output_tokens_per_s"] == pytest.approx(requests["output_tokens"].sum() / span, rel=1e-6)
    hits = requests["cached_tokens"].sum() / requests["prompt_tokens"].sum()
    assert summary["prompt_tokens_from_cache"] == pytest.approx(hits)
    assert 0.2 < hits < 64 / requests["prompt_tokens"].mean()  # all but the first of each text on an engine
    assert sum(summary["binds"].values()) == pytest.approx(1)


def test_the_timeline_has_the_steps_of_each_engine_in_their_order(done):
    folder, _ = done
    steps, trace = table(folder / "steps.csv"), json.loads((folder / "timeline.json").read_text())
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(shown) == len(steps["start_s"])
    for engine in (0, 1):
        own = [event for event in shown if event["pid"] == engine]
        ends = [event["ts"] + event["dur"] for event in own]
        assert all(later["ts"] >= end - 1e-6 for end, later in zip(ends, own[1:], strict=False))
    assert sum(event["ph"] == "b" and event["name"] == "output" for event in trace["traceEvents"]) == 60


def test_tables_are_printed_and_the_highest_rate_is_the_summarys(done):
    folder, output = done
    for said in ("served: 60 requests", "time to first token", "requests/s that are served", "fullest while some wait"):
        assert said in output
    (rate,) = re.findall(r"highest rate with 0.9 of requests .*: ([\d.]+) requests/s;", output)
    highest = json.loads((folder / "summary.json").read_text())["highest_rate_per_s"]
    assert float(rate) == pytest.approx(highest, rel=0.01)
    serving = serving_of(load_scenario(folder.parent / "served.yaml"))
    trials = RateTrials(serving, ends_early=False)
    assert trials.meets(highest)
    assert not trials.meets(highest * 1.011)
    assert all(np.isfinite(term.values).all() for term in serving.table.terms)


def test_few_requests_with_long_answers_are_told_to_end_late(scenario, tmp_path, done):
    few = ("--set", "serving.arrivals.requests=6", "--set", "serving.lengths.output_tokens=400", "--quiet")
    run = serve(scenario, *few, "--out", tmp_path / "few")
    assert run.exit_code == 0, run.output
    told = json.loads((tmp_path / "few" / "summary.json").read_text())
    requests = table(tmp_path / "few" / "requests.csv")
    came = requests["sent_s"].max() - requests["sent_s"].min()
    assert told["span_s"] > 3 * came
    assert f"until the last answer, and requests come for {digits(6 / told['sent_per_s'])} s" in " ".join(
        run.output.split()
    )
    assert "until the last answer" not in done[1].replace("\n", " ")


@pytest.mark.parametrize(
    ("told", "late"),
    [
        ({"sent_per_s": 10, "requests_per_s": 8.9, "drains": True}, True),
        ({"sent_per_s": 10, "requests_per_s": 9.1, "drains": True}, False),
        ({"sent_per_s": 10, "requests_per_s": 5, "drains": False}, False),  # they cannot keep up: another note
        ({"sent_per_s": None, "requests_per_s": 5, "drains": True}, False),  # users send when they are answered
    ],
)
def test_who_ends_late(told, late):
    assert ends_late(told) is late


def test_the_same_seed_writes_the_same_bytes(scenario, tmp_path, done, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    assert serve(scenario, "--out", tmp_path / "again").exit_code == 0
    for name in ("requests.csv", "steps.csv", "timeline.json"):
        assert (tmp_path / "again" / name).read_bytes() == (done[0] / name).read_bytes()


def test_of_many_tokens_no_step_is_kept_and_the_rest_is_the_same(scenario, tmp_path, done, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    monkeypatch.setattr("jaxmoe.cli.serve.MOST_TOKENS", 100)
    monkeypatch.setattr("jaxmoe.cli.serve_files.ROWS", 7)
    run = serve(scenario, "--out", tmp_path / "out")
    assert run.exit_code == 0, run.output
    assert "tokens are not kept; take requests of 100 at most" in run.output.replace("\n", " ")
    assert (tmp_path / "out" / "requests.csv").read_bytes() == (done[0] / "requests.csv").read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"summary.json", "requests.csv", "waits.png"}
    brief, whole = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "out", done[0]))
    assert brief["highest_rate_per_s"] == whole["highest_rate_per_s"]
    assert brief["waits_s"] == whole["waits_s"] | {"between": None}


def test_of_many_requests_the_first_tell_the_highest_rate(scenario, tmp_path, done, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    monkeypatch.setattr("jaxmoe.cli.serve.MOST_TRIED", 20)
    run = serve(scenario, "--out", tmp_path / "out")
    assert run.exit_code == 0, run.output
    assert "Found on the first 20 of 60 requests, within 1%" in run.output.replace("\n", " ")
    assert "Found on" not in done[1]
    few, whole = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "out", done[0]))
    assert (few["highest_rate_requests"], whole["highest_rate_requests"]) == (20, 60)
    assert few["highest_rate_tolerance"] == 0.01
    assert few["waits_s"] == whole["waits_s"]  # of all requests
    trials = RateTrials(serving_of(load_scenario(scenario)).first(20), ends_early=False)
    assert trials.meets(few["highest_rate_per_s"])
    assert not trials.meets(few["highest_rate_per_s"] * 1.011)
    assert few["highest_rate_per_s"] != whole["highest_rate_per_s"]


CLOSED = "serving.arrivals={kind: users, users: 3, requests: 30}"


def test_a_deployment_on_gpus_needs_no_workload(scenario):
    """Its experts have loads by `deployment.gating_spread`: no trace is read."""
    before = serving_of(load_scenario(scenario)).identity
    scenario.write_text(re.sub(r"workload: .*\n", "", scenario.read_text()))
    assert serving_of(load_scenario(scenario)).identity == before


def test_users_wait_from_when_they_send_and_have_no_highest_rate(scenario, tmp_path):
    run = serve(scenario, "--set", CLOSED, "--json", "--out", tmp_path / "out")
    assert run.exit_code == 0, run.output
    summary, requests = json.loads(run.stdout), table(tmp_path / "out" / "requests.csv")
    assert summary["highest_rate_per_s"] is None
    moments = requests["sent_s"][:, None]
    in_flight = (requests["sent_s"] <= moments) & (requests["finish_s"] > moments)
    assert in_flight.sum(axis=1).max() == 3


def test_a_decode_pool_takes_requests_after_their_first_token(scenario, tmp_path):
    pool = "serving.decode={engines: 2, bandwidth_GB_per_s: 1, latency_us: 500}"
    run = serve(scenario, "--set", pool, "--out", tmp_path / "out")
    assert run.exit_code == 0, run.output
    requests = table(tmp_path / "out" / "requests.csv")
    several = requests["output_tokens"] > 1
    assert set(requests["decode_engine"][several]) == {2, 3}
    # 2 layers' worth of keys and values of each of 3 layers, cut over 2 GPUs: 2 B * 2 * 32 elements a token and GPU
    sent = requests["prompt_tokens"] * 3 * 2 * 32 * 2 / 1e9 + 500e-6
    assert (requests["finish_s"] - requests["first_token_s"] > sent)[several].all()


def test_recorded_requests_start_at_the_file_and_scale_to_a_rate(scenario, tmp_path):
    rows = [{"timestamp": 10 * at, "input_length": 128, "output_length": 4, "hash_ids": [at]} for at in range(20)]
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = scenario.read_text()
    arrivals = "arrivals: {kind: file, path: trace.jsonl, rate_per_s: 50, requests: 10}"
    text = re.sub(r"arrivals: .*", arrivals, re.sub(r"  (lengths|prefixes): .*\n", "", text))
    scenario.write_text(text)
    requests = serving_of(load_scenario(scenario)).requests
    assert requests.arrival == pytest.approx(np.arange(10) / 50)
    assert requests.prompt.tolist() == [128] * 10


REFUSED = {
    "drafts": (["--set", "deployment.speculative={acceptance: 0.8}"], "deployment.speculative drafts tokens, which"),
    "none": (["--set", "serving=null"], "the scenario has no serving, so there are no requests. Write for example"),
    "deployment": (["--set", "deployment=null"], "the scenario has no deployment"),
    "engines": (["--set", "serving.engines=0"], "serving.engines is 0; expected at least 1"),
    "pool": (["--set", "serving.decode={engines: 0}"], "serving.decode.engines is 0; expected at least 1"),
    "rate": (["--set", "serving.arrivals.rate_per_s=0"], "serving.arrivals.rate_per_s is 0; expected a number greater"),
    "context": (["--set", "serving.context_tokens=100"], "tokens; expected 100 together at most, and"),
    "memory": (
        ["--set", "serving.engine.cache_tokens=64"],
        "expected 65 together at most, and 60 of 60 have more. Leave them out, or raise serving.engine.cache_tokens",
    ),
    "blocks": (["--set", "serving.engine.block_tokens=48"], "serving.prefixes.tokens is 64; expected a multiple of"),
    "file": (["--set", "serving={arrivals: {kind: file, path: none.csv}}"], "serving.arrivals: there is no file"),
    "profile": (["--profile", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_told_before_any_work(scenario, tmp_path, case, monkeypatch):
    monkeypatch.setattr("jaxmoe.experiment.serving_inputs.step_table", lambda *_: pytest.fail("work was begun"))
    given, said = REFUSED[case]
    done = serve(scenario, "--out", tmp_path / "out", *given)
    assert done.exit_code == 2, done.output
    assert said in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def rates(*arguments: object):
    return CliRunner().invoke(app, ["serve", "rates", *map(str, arguments)])


def points(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "points").iterdir()}


def test_a_run_over_rates_goes_on_where_it_was_stopped(scenario, tmp_path, monkeypatch):
    """As after a kill: a part of a file that was being written, and no summary. What is there is not run again."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    monkeypatch.setattr("jaxmoe.sweep.served.CHUNK", 1)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert rates(scenario, "--rates", "100,20,50", "--out", whole).exit_code == 0
    assert rates(scenario, "--rates", "20,50", "--out", stopped).exit_code == 0
    (stopped / "summary.json").unlink()
    lost = max((stopped / "points").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    lost.rename(stopped / f".{lost.name}.part")
    ran, at = [], Serving.at
    monkeypatch.setattr(Serving, "at", lambda serving, rate: ran.append(rate) or at(serving, rate))
    done = rates(scenario, "--rates", "20,50,100", "--out", stopped)
    assert done.exit_code == 0, done.output
    assert sorted(ran) == [50, 100]
    assert points(stopped) == points(whole)
    assert (stopped / "rates.csv").read_bytes() == (whole / "rates.csv").read_bytes()
    assert not list(stopped.glob(".*.part"))
    told = table(whole / "rates.csv")
    assert told["rate_per_s"].tolist() == [20, 50, 100]
    assert told["sent_per_s"] == pytest.approx([20, 50, 100])
    ran.clear()
    other = rates(scenario, "--rates", "20", "--set", "serving.seed=1", "--out", stopped)
    assert other.exit_code == 0, other.output
    assert ran == [20]  # other requests are another run


@pytest.mark.parametrize(
    ("given", "said"), [("2,x", "--rates is '2,x'; expected numbers"), ("0,1", "--rates is '0,1'")]
)
def test_rates_that_cannot_be_are_told(scenario, tmp_path, given, said):
    done = rates(scenario, "--rates", given, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert said in done.output


def test_files_of_a_sweep_are_left_alone(scenario, tmp_path):
    points = tmp_path / "points"
    points.mkdir()
    (points / "a.parquet").write_bytes(b"of a sweep")
    (tmp_path / "manifest.json").write_text("{}")
    done = rates(scenario, "--rates", "20", "--out", tmp_path)
    assert done.exit_code == 2
    assert "holds results of a sweep; give another folder" in done.output.replace("\n", " ")
    assert [path.name for path in points.iterdir()] == ["a.parquet"]


def test_a_rate_that_never_drains_is_refused_with_one_that_does(scenario, tmp_path):
    fast = ["--set", "serving.arrivals.rate_per_s=1e5", "--set", "serving.arrivals.requests=400"]
    done = serve(scenario, *fast, "--out", tmp_path / "out")
    assert done.exit_code == 2
    (most,) = re.findall(r"rate_per_s is 100000; expected less than ([\d.e+]+),", done.output.replace("\n", " "))
    assert not (tmp_path / "out").exists()
    serving = serving_of(load_scenario(scenario, [f"serving.arrivals.rate_per_s={0.8 * float(most)}", fast[3]]))
    assert drained_rate(serving.at()[1]) is None
