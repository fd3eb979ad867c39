"""`jaxmoe validate`: the analytic model against the event simulator, batch by batch."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.comparison_figures import draw_scatter
from jaxmoe.cli.comparison_output import exchange_names, print_memory, print_table, print_warnings
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.cli.timeline import check_target, chosen_layer, write_timeline
from jaxmoe.config import Scenario, element_bytes
from jaxmoe.experiment.evaluation import unwitnessed
from jaxmoe.experiment.inputs import Inputs, OptionError, read_inputs
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import given_plans, standard_strategies
from jaxmoe.experiment.summary import provenance
from jaxmoe.experiment.validation import Figures, Trial, run_trial, trials_agreement, validation_report


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    plan: list[str] | None,
    standard: bool,
    batch_tokens: str | None,
    trace: Path | None,
    overrides: list[str] | None,
    layers: str | None,
    timeline: Path | None,
    timeline_of: str | None,
) -> None:
    """Replay plans in the event simulator, and tell how far the model is off."""
    with StageTimer() as clock:
        with clock.stage("load"):
            check_target(timeline, timeline_of)
            inputs = read_inputs(config, overrides, trace, layers)
            usual = standard_strategies(inputs) if standard else []
            given = given_plans(plan, inputs, compared=[strategy.name for strategy in usual])
            strategies = [*usual, *given]
            if not strategies:
                raise OptionError("nothing to validate: give plans with --plan FILE_OR_STRATEGY, or --standard")
            sizes = _sizes(batch_tokens, inputs)
            shown, row = chosen_layer(timeline_of, strategies, inputs) or ((given or usual)[0].name, None)
        with progress_bars(interrupts.check) as report:
            trials = [run_trial(inputs, s, tokens, clock, report) for tokens in sizes for s in strategies]
        with clock.stage("draw"):
            _draw(folder, f"{inputs.scenario.name}: dispatch and combine", trials)
        if timeline is not None:
            with clock.stage("timeline"):
                write_timeline(timeline, inputs, next(t for t in trials if t.strategy.name == shown), row)
        summary = provenance("validate", inputs) | validation_report(inputs.layer_ids, trials)
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        _print(inputs.scenario, trials)
        print_memory(inputs, strategies)
        print_warnings(unwitnessed(inputs.model))


def _print(scenario: Scenario, trials: list[Trial]) -> None:
    """How model and simulator agree, by strategy and batch size, and how long it takes without barriers."""
    few = (
        "network: dispatch and combine; error: mean absolute; R2 goes by the spread of the simulated times: of few, or "
        "of times that are alike, it says little"
    )
    table = Table(title=f"model against event simulation; {element_bytes(scenario).told()}", caption=few)
    table.add_column("strategy", no_wrap=True)
    table.add_column("exchange")
    for column in ("tokens", "network\nR2", "network\nerror, %", "total\nR2", "total\nerror, %"):
        table.add_column(column, justify="right")
    table.add_column("without\nbarriers", justify="right")
    for trial in trials:
        exchange = exchange_names(trial.strategy.placement.exchange)
        table.add_row(escape(trial.strategy.name), exchange, str(trial.tokens), *_figures([trial]))
    table.add_row("all", "", "", *_figures(trials))
    print_table(table)


def _figures(trials: list[Trial]) -> tuple[str, ...]:
    """R2 and error of communication and of the total, and the part of the time without barriers."""
    texts = [text for figures in trials_agreement(trials).values() for text in _agreement_cells(figures)]
    free = sum(float(trial.replay.free_running.sum()) for trial in trials)
    whole = sum(float(trial.simulated.total.sum()) for trial in trials)
    return *texts, f"{100 * free / whole:.1f} %"


def _agreement_cells(figures: Figures) -> tuple[str, str]:
    r2, error = figures["r2"], figures["mean_abs_error_percent"]
    return "-" if r2 is None else f"{r2:.6f}", "-" if error is None else f"{error:.3f}"


def _draw(folder: OutputFolder, title: str, trials: list[Trial]) -> None:
    several = len({trial.tokens for trial in trials}) > 1
    key = [f"{t.strategy.name}, {t.tokens} tokens" if several else t.strategy.name for t in trials]
    model = {name: trial.model.communication for name, trial in zip(key, trials, strict=True)}
    simulated = {name: trial.simulated.communication for name, trial in zip(key, trials, strict=True)}
    draw_scatter(folder, title, model, simulated)


def _sizes(text: str | None, inputs: Inputs) -> list[int]:
    """Tokens of a batch, each size once."""
    if text is None:
        return [inputs.scenario.workload.batch_tokens]
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1 or sizes[-1] > inputs.trace.num_tokens:
        raise OptionError(
            f"--batch-tokens is {text!r}, expected sizes such as 32,128,512, each from 1 to the tokens of the trace, "
            f"{inputs.trace.num_tokens}"
        )
    return sizes
