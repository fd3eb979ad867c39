"""Energy in tables and summaries: where the machine states it, and nothing where it does not."""

import pytest

from jaxmoe.cli.comparison_output import comparison_warnings, print_comparison
from jaxmoe.config import load_scenario
from jaxmoe.experiment import standard_strategies
from jaxmoe.experiment.comparison import Comparison, compare
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import comparison_report

SPENT = ["hardware.link.energy_pJ_per_B=400", "hardware.die.idle_W=2"]
FEW = ["tuning.exchanges=[reduce_scatter]"]


def compared(scenario, *overrides: str) -> tuple[Inputs, Comparison]:
    """Balanced expert parallelism alone, on one layer."""
    inputs = inputs_of(load_scenario(scenario, [*overrides, *FEW]), layers="3")
    strategies = [strategy for strategy in standard_strategies(inputs) if strategy.name == "ep_balanced"]
    with StageTimer() as clock:
        return inputs, compare(inputs, strategies, clock, lambda stage, done, total: None)


def test_energy_is_told_where_it_is_stated(scenario, capsys):
    inputs, comparison = compared(scenario, *SPENT)
    strategy = comparison_report(inputs, comparison)["strategies"]["ep_balanced"]
    energy, seconds = strategy["energy"], strategy["mean"]["total_s"]
    parts = energy["by_resource_J"]
    assert parts.keys() == {"link", "idle"}
    assert parts["idle"] == pytest.approx(2 * 4 * seconds, rel=1e-5)  # watts, dies
    assert energy["total_J"] == pytest.approx(sum(parts.values()))
    assert energy["per_token_J"] == pytest.approx(energy["total_J"] / 8)
    assert energy["des_total_J"] == pytest.approx(energy["des_model_total_J"], rel=0.3)
    assert [layer["total_J"] for layer in energy["layers"]] == pytest.approx([energy["total_J"]])
    assert energy["not_stated"] == ["die.energy_pJ_per_FLOP", "die.memory_energy_pJ_per_B"]
    print_comparison(inputs, comparison, "one layer", wide=True)
    printed = capsys.readouterr().out
    assert "energy of a token" in printed
    assert f"{energy['per_token_J'] * 1e9:.4g}" in printed
    (note,) = comparison_warnings(comparison, inputs)
    assert "energy counts nothing for what the machine does not state: die.energy_pJ_per_FLOP" in note


def test_a_front_of_a_metric_that_is_not_stated_is_one_clear_error(run, scenario, tmp_path, out):
    study = tmp_path / "study.yaml"
    study.write_text(f"{{scenario: {scenario}, axes: {{strategy: [tp]}}}}")
    result = run("sweep", study, "--pareto", "total,energy", "--out", out)
    assert result.exit_code == 2
    assert "the metric energy is wanted, but no machine of the study states any energy" in result.stderr
