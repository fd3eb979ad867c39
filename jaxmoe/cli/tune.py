"""`jaxmoe tune`: find a placement, then judge it beside the usual ones."""

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import typer

from jaxmoe.cli import options
from jaxmoe.cli.clock import StageClock
from jaxmoe.cli.comparison import Comparison, compare, placement_problem
from jaxmoe.cli.inputs import Inputs, read_inputs
from jaxmoe.cli.interrupts import INTERRUPTED
from jaxmoe.cli.output import OutputFolder
from jaxmoe.cli.pictures import draw_comparison, draw_tuning
from jaxmoe.cli.plans import given_plans
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.provenance import provenance
from jaxmoe.cli.report import comparison_report, per_layer
from jaxmoe.cli.search import check_optimiser, search
from jaxmoe.cli.session import session
from jaxmoe.cli.strategies import GATHERED, STANDARD, TUNED, Strategy, standard_strategies, strategy
from jaxmoe.cli.tables import comparison_warnings, print_comparison, print_warnings
from jaxmoe.placement import write_plan
from jaxmoe.tune import History, TuneResult


def command(
    config: options.Config,
    out: options.Out,
    trace: options.Trace = None,
    plan: options.Plans = None,
    overrides: options.Overrides = None,
    layers: options.Layers = None,
    optimiser: options.Optimiser = "gradient",
    time_limit: options.TimeLimit = None,
    verbose: options.Verbose = False,
) -> None:
    """Search for a placement, by gradient descent or otherwise, and judge it beside the usual ones and given plans.

    Ctrl-C ends the search and keeps the best plan so far; a second one gives up.
    """
    with session(out, verbose) as (folder, interrupts), StageClock() as clock:
        with clock.stage("load"):
            check_optimiser(optimiser)
            limit = [] if time_limit is None else [f"tuning.time_limit_s={time_limit}"]
            inputs = read_inputs(config, [*(overrides or ()), *limit], trace, layers)
            others = [*standard_strategies(inputs), *given_plans(plan, inputs, (*STANDARD, GATHERED, TUNED))]
            problem = placement_problem(inputs)
        with progress_bars(interrupts.check) as report:
            with clock.stage("tune"):
                result = search(optimiser, inputs, problem, report)
            tuned = _tuned_strategies(inputs, result)
            # First of all: judging takes a while, and this is what the time was spent on.
            _write_plans(folder, inputs, tuned, result, optimiser)
            _announce_stop(folder, result)
            comparison = compare(inputs, [*others, *tuned], clock, report)
        with clock.stage("draw"):
            draw_comparison(folder, inputs, comparison)
            draw_tuning(folder, inputs, comparison, result)
        summary = provenance("tune", inputs) | comparison_report(inputs, comparison)
        summary |= {"tuning": {"optimiser": optimiser} | _tuning_report(result, comparison), "wall_s": clock.report()}
        folder.write_json("summary.json", summary)
        print_comparison(comparison, f"{inputs.scenario.name}: mean over {len(inputs.layer_ids)} layers")
        print_warnings(comparison_warnings(comparison))
        if result.stopped == "interrupted":
            raise typer.Exit(INTERRUPTED)


def _tuned_strategies(inputs: Inputs, result: TuneResult) -> list[Strategy]:
    """The tuned plan; before it, where tensor parallelism took over layers, the best that gathers everywhere."""
    tuned = strategy(inputs, TUNED, result.share)
    taken = int((result.share != result.gathered).any(axis=(1, 2)).sum())
    if not taken:
        return [tuned]
    note = f"tensor parallel with a ring in {taken} of {len(result.share)} layers, where no plan that gathers is faster"
    return [strategy(inputs, GATHERED, result.gathered), replace(tuned, note=note)]


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
        name = "plan.npz" if plan.name == TUNED else "plan_gathered.npz"
        write_plan(folder.target(name), plan.placement)


def _announce_stop(folder: OutputFolder, result: TuneResult) -> None:
    if result.stopped:
        plan = folder.path / "plan.npz"
        print_warnings([f"tuning stopped early ({result.stopped}); the best plan so far is in {plan}"])


def _tuning_report(result: TuneResult, comparison: Comparison) -> dict[str, Any]:
    """How the plan came about. Stages and the bound are as the tuner saw them, on its own batches."""
    return {
        "stages": {f"{name}_s": per_layer(seconds) for name, seconds in result.stages.items()},
        "bound_s": per_layer(result.bound),
        "gap": _gap(comparison),
        "stopped": result.stopped,
        "seed": result.seed,
        "wall_s": result.seconds,
        "history": {stage: _history(history) for stage, history in result.history.items()},
    }


def _gap(comparison: Comparison) -> float | None:
    """How far the tuned plan is above the bound, both on the evaluation batches: 0.1 is 10 %."""
    if comparison.bound is None:
        return None
    return float(comparison.scores[TUNED].layer_total.mean() / comparison.bound.mean() - 1)


def _history(history: History) -> dict[str, list[int] | list[float]]:
    """Mean over layers."""
    return {"step": list(history.step), "mean_s": [float(np.mean(seconds)) for seconds in history.seconds]}
