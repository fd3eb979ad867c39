"""`jaxmoe trace fit` and `jaxmoe trace synth`: what they write, what runs on it, and what they say of bad input."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import synthesis as oracle
from refusal import refused_in_a_line

from jaxmoe.traces import read_trace, write_trace
from jaxmoe.traces.synthesis import PRESETS, GatingProcess, fitting, read_process, sample_trace, write_process
from jaxmoe.traces.synthesis.fidelity import TOLERANCES


def made_up(experts: int = 4, layers: int = 2) -> GatingProcess:
    """A process for the model of the small scenario: 4 experts, 2 choices, layers 3 and 5."""
    return oracle.random_process(0, layers, experts, 2, oracle.same_requests(8, 32, prompt=20))


@pytest.fixture
def recorded(tmp_path):
    write_trace(tmp_path / "t.npz", sample_trace(made_up(), 256, seed=0))
    return tmp_path / "t.npz"


@pytest.fixture
def process(tmp_path):
    (tmp_path / "fitted").mkdir()
    write_process(tmp_path / "fitted" / "process.npz", made_up())
    return tmp_path / "fitted" / "process.npz"


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(fitting, "STEPS", fitting.STEPS_PER_CALL)
    monkeypatch.setattr(fitting, "CORRECTIONS", 1)


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


@pytest.mark.usefixtures("_quick")
def test_fit_writes_a_process_and_how_like_it_is(run, recorded, out):
    result = run("trace", "fit", recorded, "--seed", 3, "--out", out)
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {"process.npz", "summary.json", "fidelity.png"}
    assert all(name in result.stdout for name in ("recorded", "synthetic", "zipf", *TOLERANCES))
    fitted, summary = read_process(out / "process.npz"), summary_of(out)
    assert (fitted.layer_ids, fitted.num_experts, fitted.top_k) == ((3, 5), 4, 2)
    assert fitted.requests.prompt.tolist() == [20] * 8
    assert (summary["command"], summary["seed"]) == ("trace fit", 3)
    trace = {"path": str(recorded), "tokens": 256, "fitted_tokens": 256, "facts": made_up().facts}
    assert summary["trace"] == trace
    shape = {"layers": 2, "num_experts": 4, "top_k": 2, "requests": 8}
    assert summary["process"].items() >= shape.items()
    assert {"versions", "device", "wall_s"} < summary.keys()
    fidelity = summary["fidelity"]
    assert fidelity["traces"].keys() == {"recorded", "synthetic", "zipf"}
    assert fidelity["traces"]["recorded"]["figures"]["load_kl"] == 0
    assert fidelity["tolerances"].keys() == TOLERANCES.keys()
    for name, told in fidelity["tolerances"].items():
        values = (fidelity["traces"][trace]["figures"][name] for trace in ("recorded", "synthetic"))
        assert told["met"] == TOLERANCES[name].met(*values)


def test_synth_writes_a_trace_that_can_be_read(run, process, out):
    result = run("trace", "synth", process, "--tokens", 100, "--seed", 5, "--out", out)
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {"trace.npz", "summary.json"}
    read, drawn = read_trace(out / "trace.npz"), sample_trace(made_up(), 100, seed=5)
    for name in ("experts", "seq_start", "phase", "layer_ids"):
        np.testing.assert_array_equal(getattr(read, name), getattr(drawn, name))
    assert read.facts == drawn.facts
    assert read.seq_start.tolist() == [0, 32, 64, 96]
    summary = summary_of(out)
    assert summary["process"] == {"source": str(process), "facts": made_up().facts}
    assert summary["trace"] == {"tokens": 100, "layers": 2, "num_experts": 4, "top_k": 2, "requests": 4, "logits": None}


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_what_was_fitted_can_be_drawn(run, recorded, tmp_path):
    assert run("trace", "fit", recorded, "--out", tmp_path / "fit").exit_code == 0
    result = run("trace", "synth", tmp_path / "fit" / "process.npz", "--tokens", 300, "--out", tmp_path / "synth")
    assert result.exit_code == 0, result.output
    assert read_trace(tmp_path / "synth" / "trace.npz").num_tokens == 300


@pytest.fixture
def _few_layers(monkeypatch):
    """A preset cut down to what the small scenario can use."""
    monkeypatch.setitem(PRESETS, "llama-4-maverick", SmallPreset())


class SmallPreset:
    @staticmethod
    def process() -> GatingProcess:
        return made_up()


@pytest.mark.usefixtures("_few_layers")
def test_a_preset_is_known_by_its_name(run, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("trace", "synth", "llama-4-maverick", "--tokens", 64, "--out", out)
    assert result.exit_code == 0, result.output
    assert summary_of(out)["process"]["source"] == "llama-4-maverick"
    np.testing.assert_array_equal(read_trace(out / "trace.npz").experts, sample_trace(made_up(), 64, 0).experts)


def test_an_unknown_preset_lists_the_names(run, out):
    refused_in_a_line(run("trace", "synth", "gpt-2", "--out", out), out, "'gpt-2'", *PRESETS)


def test_a_trace_cannot_be_drawn_from(run, recorded, out):
    refused_in_a_line(run("trace", "synth", recorded, "--out", out), out, "t.npz", "jaxmoe trace fit")


def test_a_damaged_process(run, process, out):
    process.write_bytes(process.read_bytes()[:-100])
    refused_in_a_line(run("trace", "synth", process, "--out", out), out, "process.npz", "not a readable npz")


def test_load_counts_cannot_be_fitted(run, tmp_path, out):
    np.savez(tmp_path / "l.npz", counts=np.ones((2, 4), int), top_k=2)
    refused_in_a_line(run("trace", "fit", tmp_path / "l.npz", "--out", out), out, "l.npz", "no token order")


def test_a_process_cannot_be_fitted(run, process, out):
    refused_in_a_line(run("trace", "fit", process, "--out", out), out, "process.npz", "has no array experts")


def test_a_trace_that_is_not_there(run, tmp_path, out):
    refused_in_a_line(run("trace", "fit", tmp_path / "none.npz", "--out", out), out, "none.npz", "no such trace file")


@pytest.mark.parametrize("options", [["--tokens", "0"], ["--seed", "-1"], ["--seed", "4294967296"], ["--logits", "0"]])
def test_numbers_out_of_range(run, process, out, options):
    result = run("trace", "synth", process, *options, "--out", out)
    assert result.exit_code == 2
    assert options[0] in result.stderr
    assert not out.parent.exists()


def test_logits_are_written_whose_largest_are_the_choices(run, process, out):
    for scale, folder in ((1, out / "one"), (2, out / "two")):
        done = run("trace", "synth", process, "--tokens", "100", "--logits", scale, "--out", folder)
        assert done.exit_code == 0, done.output
    one, two = (read_trace(out / name / "trace.npz") for name in ("one", "two"))
    np.testing.assert_array_equal(np.argsort(-one.logits, axis=2)[..., : one.top_k], one.experts)
    np.testing.assert_allclose(two.logits, 2 * one.logits)
    assert "synthetic" in one.facts["logit_source"]
    assert summary_of(out / "one")["trace"]["logits"] == 1
    assert [path.name for path in sorted((out / "one").iterdir())] == ["summary.json", "trace.npz"]


def test_a_failure_half_way_leaves_nothing_behind(run, process, out, monkeypatch):
    def fail(*_, **__):
        yield np.zeros((10, 2, 2), np.int16), np.zeros((10, 2, 0), np.float32)

    monkeypatch.setattr("jaxmoe.cli.trace.synthesis.sample_parts", fail)
    refused_in_a_line(run("trace", "synth", process, "--out", out), out, "twice")


def drawn_from(**trace):
    return f"workload.trace={json.dumps(trace)}"


def test_evaluate_draws_from_a_process(run, scenario, process, out, monkeypatch):
    monkeypatch.chdir(process.parent)
    result = run("evaluate", scenario, "--set", drawn_from(kind="process", path="process.npz", tokens=64), "--out", out)
    assert result.exit_code == 0, result.output
    assert summary_of(out)["scenario"]["workload"]["trace"]["path"] == str(process)
    assert summary_of(out)["trace"]["path"] == f"synthetic from {process}"


def test_the_path_of_a_process_starts_at_its_scenario(run, scenario, process, out):
    text = scenario.read_text().replace("{kind: synthetic, tokens: 64}", "{kind: process, path: fitted/process.npz}")
    scenario.write_text(text)
    result = run("evaluate", scenario, "--out", out)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.usefixtures("_few_layers")
def test_evaluate_draws_from_a_preset(run, scenario, process, tmp_path):
    """The same process by its path or by its name: the same figures."""
    kinds = ({"kind": "process", "path": str(process)}, {"kind": "preset", "preset": "llama-4-maverick"})
    totals = []
    for kind in kinds:
        out = tmp_path / kind["kind"]
        result = run("evaluate", scenario, "--set", drawn_from(tokens=64, seed=4, **kind), "--out", out)
        assert result.exit_code == 0, result.output
        totals.append(summary_of(out)["totals"])
    assert totals[0] == totals[1]


def test_a_process_of_another_model(run, scenario, tmp_path, out):
    write_process(tmp_path / "p.npz", made_up(experts=6))
    chosen = drawn_from(kind="process", path=str(tmp_path / "p.npz"))
    result = run("evaluate", scenario, "--set", chosen, "--out", out)
    refused_in_a_line(result, out, "p.npz", "6 experts", "model.num_experts is 4")


def test_a_process_of_other_layers(run, scenario, tmp_path, out):
    write_process(tmp_path / "p.npz", made_up(layers=1))
    chosen = drawn_from(kind="process", path=str(tmp_path / "p.npz"))
    refused_in_a_line(run("evaluate", scenario, "--set", chosen, "--out", out), out, "[3]", "model.moe_layer_ids")


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ({"kind": "preset", "preset": "gpt-2"}, ["'gpt-2'", "deepseek-v3"]),
        ({"kind": "process", "path": "none.npz"}, ["none.npz", "no such file"]),
    ],
)
def test_a_source_that_is_not_there(run, scenario, out, trace, expected):
    refused_in_a_line(run("evaluate", scenario, "--set", drawn_from(**trace), "--out", out), out, *expected)


@pytest.mark.parametrize(("options", "numbers"), [((), 16), (("--logits", "1"), 16 + 1024)])
def test_a_trace_that_the_disk_has_no_space_for_is_refused(run, options, numbers, tmp_path, monkeypatch):
    """deepseek-v3 has 58 layers of 256 experts, 8 of them chosen: 16 B a token and layer, and 1,024 B of logits."""
    usage = SimpleNamespace(free=1000 * 58 * numbers - 1)
    monkeypatch.setattr("jaxmoe.cli.trace.synthesis.disk_usage", lambda _: usage)
    monkeypatch.setattr("jaxmoe.cli.trace.synthesis.sample_parts", lambda *_: pytest.fail("work was begun"))
    done = run("trace", "synth", "deepseek-v3", "--tokens", "1000", *options, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "--tokens 1000 makes a file of about" in done.stderr
    assert not (tmp_path / "out").exists()
