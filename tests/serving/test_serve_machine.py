"""`jaxmoe serve` on machines that the engine times: its steps, requests that wait at layers, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_serve import scenario as on_gpus
from test_serve import serve, table

from jaxmoe.config import load_scenario
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.machine_deployment import deployed_on_machine, experts_timed
from jaxmoe.experiment.serving_inputs import ServingReader
from jaxmoe.experiment.serving_machine import expert_seconds
from jaxmoe.experiment.simulation import iterations_of
from jaxmoe.serving.online.step_table import FEATURES
from jaxmoe.serving.step import StepLoad

__all__ = ["on_gpus"]  # a fixture
SCENARIO = """
name: chiplets
hardware:
  kind: mesh
  mesh_shape: [2, 2]
  die: {compute_TFLOPs_per_s: 1}
  link: {bandwidth_GB_per_s: 100, latency_ns: 5}
  memory: [{name: sram, bandwidth_GB_per_s: 1000, capacity_GB: 0.01}, {name: ddr, bandwidth_GB_per_s: 10}]
model: {hidden_size: 64, expert_size: 32, num_experts: 16, top_k: 2, moe_layer_ids: {count: 3}, vocabulary_size: 500,
        attention: {kind: grouped_query, heads: 4, kv_heads: 2, head_size: 16}}
workload: {trace: {kind: synthetic, tokens: 256, skew: 1}, batch_tokens: 16}
costs: {exchange: token_home}
evaluation: {batches: 2, iterations: 2}
system: {name: expert_streaming, strategy: fse_paired, micro_slices: 2}
deployment: {backend: vllm, concurrency: 16, prompt_tokens: 16, output_tokens: 16}
serving:
  arrivals: {kind: random, rate_per_s: 2000, requests: 40}
  lengths: {prompt_tokens: 8, output_tokens: 16}
  engine: {seats: 8, token_budget: 8, cache_tokens: 4096}
"""
BUFFERED = "serving.buffering={slack: 0.25, least_tokens: 2}"


@pytest.fixture(scope="module")
def chiplets(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chiplets") / "chiplets.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture(scope="module")
def reader() -> ServingReader:
    return ServingReader()


def features(**numbers: float) -> np.ndarray:
    return np.array([[[numbers.get(name, 0.0) for name in FEATURES]]])


def test_steps_that_decode_or_read_alone_take_what_the_engine_says(chiplets, reader):
    """On the grid and of all decoding sequences; a chunk attends to what came before it and half of itself."""
    scenario = load_scenario(chiplets)
    own, steps = deployed_on_machine(scenario), reader(scenario).table
    for tokens, context in ((1, 32), (4, 32), (16, 0)):
        numbers = {"tokens": tokens, "sequences": tokens, "routed": tokens, "decoding": tokens, "context": context}
        expected = float(own.step.seconds(StepLoad(float(tokens), max(context, 1.0))))
        assert steps.seconds(features(**numbers))[0] == pytest.approx(expected, rel=1e-5)
    numbers = {"tokens": 8, "routed": 8, "prefill": 8, "prefill_context": 32, "sequences": 8}
    load = StepLoad(0.0, 1.0, 8.0, 72.0)
    expected = own.step.parts(load)
    assert {*expected} == {"attention", "stream", "head"}
    head = own.step.parts(StepLoad(8.0, 1.0))["head"]
    expected = float(expected["attention"] + expected["stream"] + head)
    assert steps.seconds(features(**numbers))[0] == pytest.approx(expected, rel=1e-5)


def test_experts_take_longer_the_more_are_loaded_and_as_long_as_batches_of_the_trace(chiplets, reader):
    scenario = load_scenario(chiplets, (BUFFERED,))
    term = next(term for term in reader(scenario).table.terms if term.name == "experts")
    assert term.features == ("routed", "loaded")
    assert term.grids[1][[0, -1]].tolist() == [2, 16]
    assert (np.diff(term.values[1:], axis=1) >= -1e-9).all()
    assert term.values[-1, -1] > 3 * term.values[-1, 0]
    inputs = inputs_of(scenario)
    batches = iterations_of(inputs, 8).batches  # of 16 tokens
    seconds = expert_seconds(experts_timed(inputs)(batches), 3)
    loaded = np.mean([len(np.unique(batch)) for layer in np.asarray(batches.experts) for batch in layer])
    steps = replace(reader(scenario).table, terms=(term,))
    assert steps.seconds(features(routed=16, loaded=loaded))[0] == pytest.approx(seconds, rel=0.1)


def test_requests_wait_as_often_as_slack_allows_and_the_run_tells(chiplets, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    run = serve(chiplets, "--set", BUFFERED, "--out", tmp_path / "out")
    assert run.exit_code == 0, run.output
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    outputs = table(tmp_path / "out" / "requests.csv")["output_tokens"]
    assert 0 < told["deferrals"] <= (outputs // 4).sum()
    assert f"{told['deferrals']}" in next(line for line in run.output.splitlines() if "waited at a layer" in line)


def test_another_slack_is_another_run_with_the_same_experts(chiplets, reader):
    some, none = (reader(load_scenario(chiplets, (f"serving.buffering={{slack: {each}}}",))) for each in (0.25, 0))
    assert some.table is none.table
    assert some.identity != none.identity
    assert some.buffering is not None
    assert none.buffering is not None
    np.testing.assert_array_equal(some.buffering.first, none.buffering.first)
    assert some.buffering.experts.shape == (256, 3, 2)
    assert not none.at()[1].deferrals.any()
    assert some.at()[1].deferrals.any()


REFUSED = {
    "slack": (["serving.buffering={slack: 2}"], "serving.buffering.slack is 2"),
    "static": ([BUFFERED, "system={name: static}"], "system.name is static, whose experts stay where they are"),
    "twice": ([BUFFERED, "system.strategy=fse_buffered"], "fse_buffered, which is for closed batches; expected"),
    "cache": (["serving.engine.cache_tokens=null"], "serving.engine.cache_tokens is not given, and the machine"),
    "topics": (["serving.topics={count: 2}"], "serving.topics is given, but"),
    "pool": (["serving.decode={engines: 1}"], "serving.decode is given, but"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_told_before_any_work(chiplets, tmp_path, case, monkeypatch):
    monkeypatch.setattr("jaxmoe.experiment.serving_inputs.machine_table", lambda *_: pytest.fail("work was begun"))
    given, said = REFUSED[case]
    done = serve(chiplets, *(text for each in given for text in ("--set", each)), "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_gpus_whose_experts_stay_have_no_use_for_waiting(on_gpus, tmp_path):
    done = serve(on_gpus, "--set", BUFFERED, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "serving.buffering is given, but system.name is static" in " ".join(done.output.split())
