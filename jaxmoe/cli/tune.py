"""`jaxmoe tune` and `jaxmoe evaluate`: find a placement, and compare it or given ones with the usual ones."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from jaxmoe.cli import evaluate_phase, tune_hardware
from jaxmoe.cli.comparison_figures import draw_comparison, draw_tuning
from jaxmoe.cli.comparison_output import comparison_warnings, print_comparison, print_topics, print_warnings
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import INTERRUPTED, Interrupts, OutputFolder
from jaxmoe.config import element_bytes
from jaxmoe.experiment.comparison import (
    Comparison,
    check_copies,
    check_optimiser,
    compare,
    placement_problem,
    search,
    topic_means,
    tuned_strategies,
)
from jaxmoe.experiment.inputs import Inputs, read_inputs
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import GATHERED, TUNED, Strategy, given_plans, standard_strategies
from jaxmoe.experiment.summary import comparison_report, provenance, tuning_report
from jaxmoe.placement import write_plan
from jaxmoe.placement.named import compared_strategies
from jaxmoe.tune import TuneResult

PLAN = "plan.npz"


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    trace: Path | None,
    plan: list[str] | None,
    overrides: list[str] | None,
    layers: str | None,
    optimiser: str,
    copies: int,
    time_limit: float | None,
    hardware: Path | None,
    wide: bool,
) -> None:
    """Search for a placement, by gradient descent or otherwise, and compare it with the usual ones and given plans.

    Ctrl-C ends the search and keeps the best plan so far; a second one gives up. With a file for `hardware`, numbers
    of the machine are searched for.
    """
    if hardware is not None:
        refused: dict[str, Any] = {"--plan": plan, "--optimiser": optimiser != "gradient", "--copies": copies > 1}
        refused |= {"--time-limit": time_limit}
        tune_hardware.run(folder, interrupts, config, hardware, trace, overrides, layers, refused)
        return
    with StageTimer() as clock:
        with clock.stage("load"):
            check_optimiser(optimiser)
            limit = [] if time_limit is None else [f"tuning.time_limit_s={time_limit}"]
            inputs = read_inputs(config, [*(overrides or ()), *limit], trace, layers)
            others = [
                *standard_strategies(inputs),
                *given_plans(plan, inputs, (*compared_strategies(), GATHERED, TUNED)),
            ]
            problem = placement_problem(inputs)
            check_copies(problem, copies)
            folder.check(PLAN)  # before hours of search
        with progress_bars(interrupts.check) as report:
            with clock.stage("tune"):
                problem, result = search(optimiser, inputs, problem, report, copies)
            if result.stopped == "interrupted":
                interrupts.spend()
            tuned = tuned_strategies(inputs, result, problem)
            # First of all: the comparison takes a while, and this is what the time was spent on.
            _write_plans(folder, inputs, tuned, result, optimiser)
            _announce_stop(folder, result)
            comparison = compare(inputs, [*others, *tuned], clock, report, problem)
            topics = topic_means(inputs, comparison) if inputs.topics else {}
        with clock.stage("draw"):
            draw_comparison(folder, inputs, comparison)
            draw_tuning(folder, inputs, comparison, result)
        tuning = {"optimiser": optimiser, "copies": copies} | tuning_report(result, comparison) | {"topics": topics}
        summary = provenance("tune", inputs) | comparison_report(inputs, comparison) | {"tuning": tuning}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        _print(inputs, comparison, topics, wide)
        if result.stopped == "interrupted":
            raise typer.Exit(INTERRUPTED)


def evaluate(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    trace: Path | None,
    plan: list[str] | None,
    overrides: list[str] | None,
    layers: str | None,
    phase: str | None,
    wide: bool,
) -> None:
    """Time the usual placements, and given plans, on batches drawn from the trace; with `phase`, the whole model."""
    if phase is not None:
        refused = {"--trace": trace, "--plan": plan, "--layers": layers, "--wide": wide}
        evaluate_phase.run(folder, config, overrides, phase, refused)
        return
    with StageTimer() as clock:
        with clock.stage("load"):
            inputs = read_inputs(config, overrides, trace, layers)
            strategies = [*standard_strategies(inputs), *given_plans(plan, inputs)]
        with progress_bars(interrupts.check) as report:
            comparison = compare(inputs, strategies, clock, report)
        with clock.stage("draw"):
            draw_comparison(folder, inputs, comparison)
        summary = provenance("evaluate", inputs) | comparison_report(inputs, comparison)
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        _print(inputs, comparison, {}, wide)


def _print(inputs: Inputs, comparison: Comparison, topics: Mapping[str, Mapping[str, float]], wide: bool) -> None:
    title = f"{inputs.scenario.name}: mean over {len(inputs.layer_ids)} layers; {element_bytes(inputs.scenario).told()}"
    print_comparison(inputs, comparison, title, wide)
    if topics:
        print_topics(topics)
    print_warnings(comparison_warnings(comparison, inputs))


def _write_plans(
    folder: OutputFolder, inputs: Inputs, tuned: list[Strategy], result: TuneResult, optimiser: str
) -> None:
    """`plan.npz`, and `plan_gathered.npz` where that is another."""
    for plan in tuned:
        plan.placement.meta.update(
            model=inputs.moe.name,
            scenario=inputs.scenario.name,
            trace=inputs.trace_path,
            optimiser=optimiser,
            seed=result.seed,
            version=version("jaxmoe"),
            stages_s={f"{name}_s": float(seconds.mean()) for name, seconds in result.stages.items()},
            stopped=result.stopped,
        )
        name = PLAN if plan.name == TUNED else "plan_gathered.npz"
        write_plan(folder.target(name), plan.placement)


def _announce_stop(folder: OutputFolder, result: TuneResult) -> None:
    if result.stopped:
        plan = folder.path / PLAN
        print_warnings([f"tuning stopped early ({result.stopped}); the best plan so far is in {plan}"])
