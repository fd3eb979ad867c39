"""`jaxmoe tune` and `jaxmoe evaluate`: find a placement, and compare it or given ones with the usual ones."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from jaxmoe.cli.comparison_figures import LOADS, draw_comparison, draw_tuning
from jaxmoe.cli.comparison_output import (
    comparison_warnings,
    print_comparison,
    print_front,
    print_topics,
    print_warnings,
)
from jaxmoe.cli.early_end import INTERRUPTED, end_within, last_words
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import element_bytes
from jaxmoe.experiment.comparison import (
    Comparison,
    check_budget,
    check_optimiser,
    compare,
    placement_problem,
    replaying_beside,
    search,
    topic_means,
    tuned_strategies,
)
from jaxmoe.experiment.inputs import Inputs, OptionError, read_inputs
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import (
    GATHERED,
    TUNED,
    Strategy,
    check_capacity,
    given_plans,
    placed,
    standard_strategies,
)
from jaxmoe.experiment.summary import comparison_report, front_report, provenance, tuning_report
from jaxmoe.placement import Placement, write_plan
from jaxmoe.placement.named import compared_strategies
from jaxmoe.tune import TuneResult
from jaxmoe.tune.results import BestSoFar, best_so_far

PLAN = "plan.npz"
# With `--time-limit` the search has a part of the time, the comparison the rest; it may go on for a little longer.
SEARCH_PART, PAST_LIMIT_S = 2 / 3, 3.5
OUT_OF_TIME = 1  # the exit code where there is no plan yet


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
        from jaxmoe.cli import tune_hardware  # what `tune` and `evaluate` can do without takes a second to import

        tune_hardware.run(folder, interrupts, config, hardware, trace, overrides, layers, refused)
        return
    with StageTimer() as clock:
        with clock.stage("load"):
            for name in (PLAN, LOADS):
                folder.check(name)
            check_optimiser(optimiser)
            inputs = read_inputs(config, [*(overrides or ()), *_limited(time_limit)], trace, layers)
            given = given_plans(plan, inputs, (*compared_strategies(), GATHERED, TUNED))
            others = [*standard_strategies(inputs), *given]
            check_capacity(inputs)
            problem = placement_problem(inputs)
            check_budget(problem, copies)
            limit_s = None if time_limit is None else _searching(folder, time_limit)
        with progress_bars(interrupts.check) as report, replaying_beside(inputs, others, report) as begun:
            with clock.stage("tune"), _kept_in_time(folder, inputs, optimiser):
                problem, result, front = search(optimiser, inputs, problem, report, copies, limit_s)
                tuned = tuned_strategies(inputs, result, problem)
                # First of all: the comparison takes a while, and this is what the time was spent on.
                _write_plans(folder, inputs, tuned, result, optimiser)
            if result.stopped == "interrupted":
                interrupts.spend()
            _announce_stop(folder, result)
            comparison = compare(inputs, [*others, *tuned], clock, report, problem, begun)
            topics = topic_means(inputs, comparison) if inputs.topics else {}
        with clock.stage("draw"):
            draw_comparison(folder, inputs, comparison)
            draw_tuning(folder, inputs, comparison, result)
        copied = front_report(inputs, problem, front)
        tuning = {"optimiser": optimiser} | copied | tuning_report(result, comparison) | {"topics": topics}
        summary = provenance("tune", inputs) | comparison_report(inputs, comparison) | {"tuning": tuning}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        _print(inputs, comparison, topics, wide)
        print_front(**copied)
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
    elasticities: bool,
    wide: bool,
) -> None:
    """Time the usual placements, and given plans, on batches drawn from the trace; with `phase`, the whole model."""
    if phase is not None:
        refused = {"--trace": trace, "--plan": plan, "--layers": layers, "--wide": wide}
        from jaxmoe.cli import evaluate_phase

        evaluate_phase.run(folder, config, overrides, phase, elasticities, refused)
        return
    if elasticities:
        raise OptionError("--elasticities tells what a whole model gains; give --phase decode, or sweep with it")
    with StageTimer() as clock:
        with clock.stage("load"):
            folder.check(LOADS)
            inputs = read_inputs(config, overrides, trace, layers)
            strategies = [*standard_strategies(inputs), *given_plans(plan, inputs)]
            if not any(each.fits for each in strategies):
                check_capacity(inputs)
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


# Plans are written as soon as they are found, and what there is of them where the command ends before the search does.


def _limited(time_limit: float | None) -> list[str]:
    """The time limit as an override of the scenario."""
    if time_limit is None:
        return []
    if not time_limit > 0:
        raise OptionError(f"--time-limit is {time_limit:g}; expected seconds above 0")
    return [f"tuning.time_limit_s={time_limit}"]


def _searching(folder: OutputFolder, limit_s: float) -> float:
    """How much of the command's time limit is left to the search; a while after it, the command ends in any case."""
    used_s = time.monotonic() - folder.begun
    end_within(limit_s + PAST_LIMIT_S - used_s, "time limit", lambda: 0 if PLAN in folder.written else OUT_OF_TIME)
    return SEARCH_PART * limit_s - used_s


@contextmanager
def _kept_in_time(folder: OutputFolder, inputs: Inputs, optimiser: str) -> Iterator[None]:
    """Where the process is ended in here, the best plan so far is written first."""
    best = BestSoFar()

    def keep(reason: str) -> None:
        if (found := best.found) is not None and PLAN not in folder.written:
            share, mode = found.problem.placed(found.plan), found.problem.model.mode
            placement = placed(inputs, share, found.exchange.tolist(), mode)
            _write_plan(folder, PLAN, inputs, placement, optimiser=optimiser, stopped=reason)

    token = best_so_far.set(best)
    try:
        with last_words(keep):
            yield
    finally:
        best_so_far.reset(token)


def _write_plans(
    folder: OutputFolder, inputs: Inputs, tuned: list[Strategy], result: TuneResult, optimiser: str
) -> None:
    """`plan.npz`, and `plan_gathered.npz` where that is another."""
    stages = {f"{name}_s": float(seconds.mean()) for name, seconds in result.stages.items()}
    for plan in tuned:
        name = PLAN if plan.name == TUNED else "plan_gathered.npz"
        _write_plan(folder, name, inputs, plan.placement, optimiser=optimiser, stages_s=stages, stopped=result.stopped)


def _write_plan(folder: OutputFolder, name: str, inputs: Inputs, placement: Placement, **made: Any) -> None:
    placement.meta.update(
        model=inputs.moe.name,
        scenario=inputs.scenario.name,
        trace=inputs.trace_path,
        seed=inputs.scenario.tuning.seed,
        version=version("jaxmoe"),
        **made,
    )
    write_plan(folder.target(name), placement)


def _announce_stop(folder: OutputFolder, result: TuneResult) -> None:
    if result.stopped:
        plan = folder.path / PLAN
        print_warnings([f"tuning stopped early ({result.stopped}); the best plan so far is in {plan}"])
