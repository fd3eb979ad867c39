"""`jaxmoe list KIND`: a line for each of what can be named, and nothing that cannot be."""

import sys

import pytest

from jaxmoe.cli import listing
from jaxmoe.config import load_hardware, load_model, load_scenario
from jaxmoe.config.files import shipped_names
from jaxmoe.experiment.metrics import columns
from jaxmoe.placement.exchange import Registered, exchange_of
from jaxmoe.registry import ENGINES, STRATEGIES, TRACES, example_of


@pytest.fixture
def told(run):
    """Lines of a kind: name to what it stands for."""

    def lines(kind: str) -> dict[str, str]:
        done = run("list", kind)
        assert done.exit_code == 0, done.output
        return {name: about.strip() for name, _, about in (line.partition(" ") for line in done.stdout.splitlines())}

    return lines


@pytest.mark.parametrize(
    ("kind", "load", "folder"),
    [
        ("machines", load_hardware, "hardware"),
        ("models", lambda name: load_model(name, "--model"), "models"),
        ("scenarios", load_scenario, "scenarios"),
    ],
)
def test_every_shipped_file_is_listed_and_loads_by_its_name(told, configs, kind, load, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = told(kind)
    assert len(lines) == len([*(configs / folder).rglob("*.yaml")])
    assert all(lines.values())
    for name in [*lines][:: 1 if kind != "scenarios" else 8]:
        load(name)


def test_a_scenario_is_listed_with_its_command(told):
    lines = told("scenarios")
    assert lines["moentwine/deepseek-v3_6x6"].startswith("simulate: moentwine; deepseek-v3 on moentwine_6x6")
    assert lines["hd_moe/mixtral-8x7b_8x8_2.5TFLOPs_75GBps"].startswith("tune, evaluate; mixtral-8x7b on nmp_8x8_2.5")

    assert lines["served/deepseek-v3_h200_8"].startswith("serve, evaluate --phase; deepseek-v3 on h200_sxm_8_fp8")
    assert lines["deployed/deepseek-v3_h200_8"].startswith("tune, evaluate --phase; deepseek-v3 on h200_sxm_8_fp8")


def test_a_description_goes_on_after_a_figure(told):
    assert not [name for kind in ("machines", "models") for name, about in told(kind).items() if about.endswith("Fig.")]


def test_exchanges_formats_and_systems_are_listed(told):
    exchanges = told("exchanges")
    assert [name for name in exchanges if isinstance(exchange_of(name), Registered)] == ["two_level_4"]
    assert "has to know the batch" in exchanges["least_loaded"]
    assert "has to know the batch" not in exchanges["token_home"]
    assert {*TRACES, *ENGINES, "plan"} <= told("formats").keys()
    assert told("systems")["static"] == "The plan as it is, in every iteration."


def test_every_strategy_and_metric_is_told(told):
    strategies, metrics = told("strategies"), told("metrics")
    assert {*STRATEGIES.names} <= strategies.keys() == {*map(example_of, STRATEGIES)}
    assert {*columns()} == metrics.keys()
    assert all(strategies.values())
    assert all(metrics.values())


def test_an_unknown_kind_is_one_clear_error(run):
    done = run("list", "machine")
    assert done.exit_code == 2
    assert "KIND is 'machine', expected one of machines, models, scenarios" in " ".join(done.stderr.split())


def test_lists_are_as_wide_as_the_terminal_and_piped_lines_are_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listing.run(None)
    assert 60 < max(map(len, capsys.readouterr().out.splitlines())) <= 80
    listing.run("machines")
    piped = capsys.readouterr().out.splitlines()
    assert len(piped) == len(shipped_names("hardware"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    listing.run("machines")
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80 < max(map(len, piped))
    assert " ".join(told.split()) == " ".join(" ".join(piped).split())
