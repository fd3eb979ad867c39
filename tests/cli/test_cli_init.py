"""`jaxmoe init` writes a scenario that the other verbs run, and never over one that is there."""

import pytest

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
