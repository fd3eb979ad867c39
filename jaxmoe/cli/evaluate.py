"""`jaxmoe evaluate`: the usual placements and given plans, side by side."""

from pathlib import Path

from jaxmoe.cli.comparison_output import (
    comparison_warnings,
    draw_comparison,
    print_comparison,
    print_warnings,
    write_comparison_loads,
)
from jaxmoe.cli.session import Interrupts, OutputFolder, progress_bars
from jaxmoe.experiment.comparison import compare
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import given_plans, standard_strategies
from jaxmoe.experiment.summary import comparison_report, provenance


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    trace: Path | None,
    plan: list[str] | None,
    overrides: list[str] | None,
    layers: str | None,
) -> None:
    """Time the usual placements, and given plans, on batches drawn from the trace."""
    with StageTimer() as clock:
        with clock.stage("load"):
            inputs = read_inputs(config, overrides, trace, layers)
            strategies = [*standard_strategies(inputs), *given_plans(plan, inputs)]
        with progress_bars(interrupts.check) as report:
            comparison = compare(inputs, strategies, clock, report)
        with clock.stage("draw"):
            draw_comparison(folder, inputs, comparison)
            write_comparison_loads(folder, inputs, comparison)
        summary = provenance("evaluate", inputs) | comparison_report(inputs, comparison)
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        title, scenario = f"{inputs.scenario.name}: mean over {len(inputs.layer_ids)} layers", inputs.scenario
        print_comparison(inputs, comparison, title)
        print_warnings(comparison_warnings(comparison, scenario.hardware))
