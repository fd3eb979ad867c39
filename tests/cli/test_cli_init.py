"""`jaxmoe init` writes a scenario that the other verbs run, and never over one that is there."""

import pytest

from jaxmoe.traces import synthetic_trace, write_trace

ANSWERS = ["--machine", "nmp_4x4", "--model", "tiny", "--batch-tokens", "8"]


def test_a_scenario_is_never_written_over(run, tmp_path, monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)
    folder = tmp_path / "mine"
    made = run("init", *ANSWERS, "--out", folder)
    assert made.exit_code == 0, made.output
    before = (folder / "scenario.yaml").read_text()
    again = run("init", *ANSWERS, "--out", folder)
    assert again.exit_code == 2
    assert "there is a scenario already" in again.output
    assert (folder / "scenario.yaml").read_text() == before


@pytest.mark.slow
def test_the_new_scenario_runs_as_its_message_says(run, tmp_path, monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)
    folder = tmp_path / "mine"
    made = run("init", *ANSWERS, "--out", folder)
    assert made.exit_code == 0, made.output
    advised = made.output.split("try: jaxmoe ")[1].split()
    assert advised[:2] == ["evaluate", str(folder / "scenario.yaml")]
    short = ["--set", "evaluation.batches=1", "--set", "validation.batches=1", "--layers", "0"]
    assert run(*advised, *short).exit_code == 0
    assert (folder / "results" / "summary.json").exists()


def test_a_wrong_name_leaves_nothing(run, tmp_path, monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)
    assert run("init", "--machine", "nmp_4", "--model", "tiny", "--out", tmp_path / "mine").exit_code == 2
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("experts", "top_k", "said"), [(7, 2, "the trace has 7"), (32, 3, "tokens chose 3 experts, but model.top_k is 2")]
)
def test_a_trace_of_another_model_is_told_before_anything_is_written(
    run, tmp_path, monkeypatch, pytestconfig, experts, top_k, said
):
    monkeypatch.chdir(pytestconfig.rootpath)
    write_trace(tmp_path / "trace.npz", synthetic_trace(64, (0, 1), experts, top_k, 0.5, 0.0, 0.0, 0))
    done = run("init", *ANSWERS, "--trace", tmp_path / "trace.npz", "--out", tmp_path / "mine")
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "mine").exists()
