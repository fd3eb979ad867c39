"""`jaxmoe validate`: the analytic model against the event simulator, batch by batch."""

from pathlib import Path

from jaxmoe.cli.comparison_output import draw_scatter, print_agreement, print_warnings
from jaxmoe.cli.session import Interrupts, OutputFolder, progress_bars
from jaxmoe.cli.timeline import check_target, chosen_layer, write_timeline
from jaxmoe.experiment.evaluation import unwitnessed
from jaxmoe.experiment.inputs import Inputs, OptionError, read_inputs
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.strategies import given_plans, standard_strategies
from jaxmoe.experiment.summary import provenance
from jaxmoe.experiment.validation import Trial, run_trial, validation_report


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
        print_agreement(trials)
        print_warnings(unwitnessed(inputs.model))


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
