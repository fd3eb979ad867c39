"""`jaxmoe simulate`: a system over iterations, beside the same plan left alone."""

from collections import Counter
from pathlib import Path

import numpy as np
from rich.markup import escape

from jaxmoe.cli.comparison_output import (
    NONE,
    as_factor,
    kernel_bytes_notes,
    new_table,
    print_memory,
    print_steps,
    print_table,
    print_warnings,
)
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.cli.timeline import ShownLayer, check_target, write_layer, write_layers
from jaxmoe.config import Scenario, element_bytes, load_scenario
from jaxmoe.experiment.inputs import Inputs, OptionError, inputs_of
from jaxmoe.experiment.simulation import (
    Simulation,
    batch_at,
    check_iterations,
    iterations_of,
    mean_stages,
    simulate,
    simulation_report,
    steps_of,
)
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import Strategy, plan_of_system
from jaxmoe.experiment.summary import provenance
from jaxmoe.experiment.whole_model import WholeModel
from jaxmoe.methods import PlannedRun
from jaxmoe.report import plot_iterations
from jaxmoe.report.style import aligned, time_unit
from jaxmoe.traces import GatingTrace


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    plan: str | None,
    iterations: int | None,
    replay: int | None,
    trace: Path | None,
    history: Path | None,
    overrides: list[str] | None,
    layers: str | None,
    timeline: Path | None,
    wide: bool,
) -> None:
    """Run a system over iterations, and tell what it gains over what it is compared with."""
    with StageTimer() as clock:
        with clock.stage("load"):
            check_target(timeline, None)
            given = [] if iterations is None else [f"evaluation.iterations={iterations}"]
            scenario = load_scenario(config, [*(overrides or ()), *given])
            replays = _replays(replay, scenario)
            check_iterations(scenario, trace, layers)
            inputs = inputs_of(scenario, trace, layers)
            seen = None if history is None else inputs_of(scenario, history, layers).trace
            steps = iterations_of(inputs, scenario.evaluation.iterations, seen)
            strategy = _plan(inputs, plan, steps.history)
        with progress_bars(interrupts.check) as report:
            simulation = simulate(inputs, strategy, steps, replays, clock, report)
        with clock.stage("draw"):
            _draw(folder, inputs, simulation)
        if timeline is not None:
            with clock.stage("timeline"):
                _write_timeline(timeline, inputs, simulation)
        summary = provenance("simulate", inputs) | simulation_report(inputs, simulation)
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        _print(inputs, simulation, wide)
        print_memory(inputs, [simulation.strategy])
        print_warnings(_warnings(inputs, simulation))


def _replays(replay: int | None, scenario: Scenario) -> int:
    """Number of iterations to replay in the simulator: `replay`, or as many as batches are validated on."""
    iterations = scenario.evaluation.iterations
    if replay is not None and replay > iterations:
        raise OptionError(f"--replay is {replay}, expected at most --iterations, {iterations}")
    return min(scenario.validation.batches, iterations) if replay is None else replay


def _plan(inputs: Inputs, plan: str | None, history: GatingTrace) -> Strategy:
    """The plan of the option or of the scenario; a strategy places experts by their loads in the history."""
    system = inputs.scenario.system
    if plan is not None and not system.uses_plan:
        raise OptionError(f"--plan is {plan}, but system {system.name} takes no plan; leave it out")
    return plan_of_system(inputs, system.plan if plan is None else plan, history)


def _write_timeline(path: Path, inputs: Inputs, simulation: Simulation) -> None:
    """Write the timeline that the system recorded, or that of the slowest layer of its first replayed iteration.

    Raises `OptionError` for a system that runs no plan and recorded nothing.
    """
    run, step = simulation.runs[simulation.system], simulation.replayed[0]
    if not isinstance(run.system, PlannedRun):
        recorded = run.system.record(run.rolled, lambda row, step: batch_at(simulation.iterations, row, step))
        if recorded is None:
            raise OptionError(
                f"--timeline shows a layer of a plan, which system {simulation.system} has not; leave it out"
            )
        write_layers(path, inputs, recorded)
        return
    row = int(run.simulated[0].argmax())
    served = run.system.served(run.rolled, step, row)
    batch = batch_at(simulation.iterations, row, step)
    facts = {"system": simulation.system, "iteration": step}
    placement, name = simulation.strategy.placement, simulation.strategy.name
    write_layer(
        path,
        inputs,
        ShownLayer(f"{simulation.system} on {name}, iteration {step}", row, placement, batch, served, facts),
    )


def _draw(folder: OutputFolder, inputs: Inputs, simulation: Simulation) -> None:
    title = f"{inputs.scenario.name}: {len(inputs.layer_ids)} MoE layers, plan {simulation.strategy.name}"
    runs = simulation.runs
    seconds = {name: run.seconds for name, run in runs.items()}
    simulated = {name: run.simulated.sum(axis=1) for name, run in runs.items()}
    plot_iterations(folder.target("iterations.png"), seconds, simulated, np.array(simulation.replayed), title)


def _print(inputs: Inputs, simulation: Simulation, wide: bool) -> None:
    """An iteration of every run, what limits it, and a step of the whole model; `wide`, its stages and replays too."""
    runs, baseline = simulation.runs, simulation.runs[simulation.baseline]
    factor, unit = time_unit(max(float(run.seconds.mean()) for run in runs.values()))
    count = simulation.iterations.count
    title = f"{inputs.scenario.name}: {len(inputs.layer_ids)} layers, mean of {count} iterations, "
    title += f"{_plan_of(inputs, simulation)}; {element_bytes(inputs.scenario).told()}"
    table = new_table(title, "system", (f"total\n{unit}", f"p95\n{unit}", f"speed-up over\n{simulation.baseline}"))
    table.add_column("limit", overflow="fold")
    totals = aligned(float(run.seconds.mean()) * factor for run in runs.values())
    p95 = aligned(float(np.quantile(run.seconds, 0.95)) * factor for run in runs.values())
    for (name, run), *row in zip(runs.items(), totals, p95, strict=True):
        limit = run.limit(inputs.model.machine.topology)
        speedup = as_factor(float(baseline.seconds.sum() / run.seconds.sum()))
        table.add_row(escape(name), *row, speedup, "not kept" if limit is None else escape(limit.text))
    print_table(table)
    if wide:
        _print_stages(simulation)
    print_steps(WholeModel.of(inputs), steps_of(inputs, simulation))


def _print_stages(simulation: Simulation) -> None:
    """Stages of an iteration, and how far model and simulator agree on those replayed."""
    runs = simulation.runs
    factor, unit = time_unit(max(float(run.seconds.mean()) for run in runs.values()))
    means = [mean_stages(simulation, name) for name in runs]
    there = [float(run.rolled.compared[list(simulation.replayed)].sum(axis=1).mean()) for run in runs.values()]
    simulated = [float(run.simulated.sum(axis=1).mean()) for run in runs.values()]
    columns = {stage: [mean[stage] for mean in means] for stage in simulation.stages}
    columns |= {"simulated": simulated, "model there": there}
    table = new_table(
        f"stages, and the replayed iterations [{unit}]", "system", (*columns, "model's mean abs\nerror, %")
    )
    texts = [aligned(seconds * factor for seconds in column) for column in columns.values()]
    for name, row in zip(runs, zip(*texts, strict=True), strict=True):
        error = simulation.agreement(name)["mean_abs_error_percent"]
        table.add_row(escape(name), *row, NONE if error is None else f"{error:.3f}")
    print_table(table)


def _plan_of(inputs: Inputs, simulation: Simulation) -> str:
    """The plan, and its exchange where the system has none of its own, or how many layers have each."""
    system = inputs.scenario.system
    if not system.uses_plan:
        return "no plan"
    plan = f"plan {simulation.strategy.name}"
    return f"{plan}, {_exchanges(simulation)}" if system.statement.takes_exchange else plan


def _exchanges(simulation: Simulation) -> str:
    counted = Counter(simulation.strategy.placement.exchange)
    if len(counted) == 1:
        return f"exchange {next(iter(counted))}"
    return "exchanges " + ", ".join(f"{name} x{layers}" for name, layers in counted.items())


def _warnings(inputs: Inputs, simulation: Simulation) -> list[str]:
    """Warnings on the plan, on tokens that are reused or known before the run, and those of the system itself."""
    run, steps = simulation.runs[simulation.system], simulation.iterations
    notes = [f"{simulation.strategy.name}: {simulation.strategy.note}"] if simulation.strategy.note else []
    notes += kernel_bytes_notes(inputs.scenario)
    if not steps.successive:
        needed = steps.count * inputs.scenario.workload.batch_tokens
        notes.append(
            f"the trace has {inputs.trace.num_tokens} tokens, fewer than the {needed} of all iterations: "
            "batches are drawn from all of it, and so are like each other"
        )
    if steps.foresight:
        notes.append(
            "no tokens are left before the run, so the system was prepared on the tokens of the run itself; "
            "give earlier ones with --history"
        )
    return notes + run.system.notes(run.rolled)
