"""The application: every verb with its options. What a verb does is in the module of its name, loaded when it runs."""

import os
import shlex
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jaxmoe.cli import calibrate_options, options
from jaxmoe.cli.early_end import INTERRUPTED, watch
from jaxmoe.cli.group_commands import plan_app, trace_app
from jaxmoe.cli.serve_commands import serve, serve_best, serve_rates
from jaxmoe.cli.session import command_line, errors_told, in_paragraphs, runs, session, tell_model
from jaxmoe.config import ConfigError, commented, new_scenario
from jaxmoe.files import atomic_write
from jaxmoe.sweep.study import check_sweep

SCENARIO = "scenario.yaml"


class _Verbs(TyperGroup):
    """Keeps what was typed, for the summary of the run. A verb's name may be of two words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        command_line.set(shlex.join(["jaxmoe", *args]))
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Verbs,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="How long Mixture-of-Experts layers take on machines of many chips, and where their experts should live.",
)
app.add_typer(trace_app, name="trace")
app.add_typer(plan_app, name="plan")


@app.command()
@runs("tune", scenario=True)
def tune(
    config: options.Config,
    out: options.Out,
    trace: options.Trace = None,
    plan: options.Plans = None,
    overrides: options.Overrides = None,
    layers: options.Layers = None,
    optimiser: options.Optimiser = "gradient",
    copies: options.Copies = 1,
    time_limit: options.TimeLimit = None,
    hardware: options.HardwareSpace = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Search for a placement, by gradient descent or otherwise, and compare it with the usual ones and given plans.

    With --hardware, search for numbers of the machine under constraints, alone or together with the placement.
    Ctrl-C ends the search and keeps the best plan so far; a second one gives up.

    Example: jaxmoe tune quickstart --time-limit 60 --out runs/tuned
    """


@app.command()
@runs("tune", "evaluate", scenario=True)
def evaluate(
    config: options.Config,
    out: options.Out,
    trace: options.Trace = None,
    plan: options.Plans = None,
    overrides: options.Overrides = None,
    layers: options.Layers = None,
    phase: options.Phase = None,
    elasticities: options.Elasticities = False,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Time the usual placements, and given plans, on batches drawn from the trace.

    With --phase, time a step of the whole model as the scenario's deployment serves it, by kernels that were measured:
    its parts, time to first token and per token, memory, other layouts, and the line that starts the engine.
    --elasticities tells there by how many % output tokens/s change with 1 % of each number of the machine.

    Energies are told where the machine states them, as in hardware.link.energy_pJ_per_B or hardware.die.idle_W.

    Example: jaxmoe evaluate quickstart --plan mine=plan.npz --out runs/evaluated
    """


@app.command()
@runs("validate", scenario=True)
def validate(
    config: options.Config,
    out: options.Out,
    plan: options.Plans = None,
    standard: options.Standard = False,
    batch_tokens: options.BatchTokens = None,
    trace: options.Trace = None,
    overrides: options.Overrides = None,
    layers: options.Layers = None,
    timeline: options.Timeline = None,
    timeline_of: options.TimelineOf = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Replay plans in the event simulator, and tell how far the model is off.

    Example: jaxmoe validate quickstart --plan ep_balanced --out runs/validated
    """


@app.command()
@runs("simulate", scenario=True)
def simulate(
    config: options.Config,
    out: options.Out,
    plan: options.StartPlan = None,
    iterations: options.Iterations = None,
    replay: options.Replays = None,
    trace: options.Trace = None,
    history: options.History = None,
    overrides: options.Overrides = None,
    layers: options.Layers = None,
    timeline: options.Timeline = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Run a system over iterations, and tell what it gains over what it is compared with.

    Example: jaxmoe simulate quickstart --set system.name=hd_moe --iterations 9 --out runs/system
    """


for verb, serves in (("serve", serve), ("serve rates", serve_rates), ("serve best", serve_best)):
    app.command(verb)(serves)


@app.command()
@runs("network", writes=("loads.npz",))
def network(
    config: options.Hardware,
    traffic: options.Traffic,
    out: options.Out,
    overrides: options.HardwareOverrides = None,
    order: options.Order = None,
    seed: options.Seed = 0,
    show: options.Show = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell how long given traffic takes on a network of any kind, and which link or port limits it.

    Example: jaxmoe network torus_8x8 --traffic matrices.npz --out runs/network
    """


@app.command("network profile")
@runs("network_profile", writes=("profile.csv", "timings.csv"))
def network_profile(
    config: options.Profiled,
    out: options.Out,
    overrides: options.HardwareOverrides = None,
    sizes: options.Sizes = None,
    noise: options.Noise = 0.0,
    outliers: options.Outliers = 0.0,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Fit alpha and beta of every pair of nodes, way and phase, to a simulated network or to measured messages.

    A CSV of measurements has the columns source, destination, phase (metadata, dispatch or combine), bytes, seconds.

    Example: jaxmoe network profile camoe_4nodes --noise 0.03 --out runs/profile
    """


@app.command()
@runs("sweep", check=check_sweep, resumes=True)
def sweep(
    config: options.StudyFile,
    out: options.Out,
    explain: options.Explain = None,
    pareto: options.Pareto = None,
    elasticities: options.Elasticities = False,
    effects: options.Effects = False,
    wins_map: options.Map = None,
    memory: options.Memory = None,
    ray: options.Ray = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Evaluate a study of many machines, models and strategies; a sweep that was stopped goes on where it was.

    A study with axes under deployment prices whole models as they are served: fronts of a user's and a GPU's tokens.
    One with axes under serving serves requests over time at each point.

    Example: jaxmoe sweep studies/dse/quickstart.yaml --pareto total,utilisation --out runs/sweep
    """


@app.command()
@runs("calibrate", writes=("machine.yaml",))
def calibrate(
    config: calibrate_options.CalibratedMachine,
    measured: calibrate_options.Measured,
    out: options.Out,
    fit: calibrate_options.Fit = None,
    base: calibrate_options.BaseMachine = None,
    overrides: options.HardwareOverrides = None,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Fit numbers of a machine to measured matrix products, reads of memory, messages and all-to-alls.

    Says how well each number is known, and writes machine.yaml. Every fifth measurement is held out. With a folder of
    measured GPU kernels, fits a model of each kernel and writes kernels.json as well; whole shapes are held out. Tables
    of DeepEP's exchanges go to kernels_deepep.json.

    Example: jaxmoe calibrate dojo_5x5 --measured messages.csv --out runs/calibrated
    """


@app.command("calibrate predict")
@in_paragraphs
def calibrate_predict(
    config: calibrate_options.CalibratedMachine,
    table: calibrate_options.PredictedTable,
    out: calibrate_options.PredictedFile,
    verbose: options.Verbose = False,
) -> None:
    """Write the times of the kernels or exchanges in a table, by a machine's fitted ones, each with its 90 % interval.

    The rows stay as they are; new columns are predicted_latency, predicted_low and predicted_high, in the unit of the
    measured tables, ms. Tables of DeepEP get predicted_dispatch_avg_t_us, predicted_low_dispatch_avg_t_us and the
    like, us. A time that the table states is not read.

    Example: jaxmoe calibrate predict h100_sxm_8 moe_perf.parquet --out predicted.parquet
    """
    with errors_told(verbose):
        import_module("jaxmoe.cli.calibrate_kernels").run_predict(config, table, out)


@app.command()
def init(
    machine: options.NewMachine,
    model: options.NewModel,
    out: options.Out,
    trace: options.NewTrace = None,
    system: options.NewSystem = "static",
    batch_tokens: options.NewBatch = None,
    all_keys: options.AllKeys = False,
    verbose: options.Verbose = False,
) -> None:
    """Write a scenario of your own, scenario.yaml, in which every key is explained.

    Example: jaxmoe init --machine dojo_5x5 --model mixtral-8x7b --trace trace.npz --out runs/mine
    """
    with session(out, verbose, "init") as (folder, _):
        path = out / SCENARIO
        if path.exists():
            raise ConfigError(f"--out: there is a scenario already, {path}. Give another folder, or remove it first.")
        name = f"{Path(model).stem}_{Path(machine).stem}"
        scenario = new_scenario(name, machine, model, trace, system, batch_tokens)
        tell_model(scenario.model)
        if trace is not None:
            import_module("jaxmoe.experiment.gating").check_recorded(trace, scenario)
        text = commented(scenario, all_keys)
        with atomic_write(folder.target(SCENARIO)) as aside:
            aside.write_text(f"# Written by {command_line.get()}\n\n{text}", encoding="utf-8")
        verb = "evaluate" if system == "static" else "simulate"
        hint = shlex.join(["jaxmoe", verb, str(path), "--out", str(out / "results")])
        typer.echo(f"{path} is ready; try: {hint}")


@app.command()
@in_paragraphs
def report(
    results: options.ResultFolders,
    out: options.ReportFile = None,
    verbose: options.Verbose = False,
) -> None:
    """Make one HTML page of a folder of results: figures to hover and filter, tables that sort, configuration.

    Of several folders it compares the runs: times, keys that differ, pictures side by side.
    Of a folder of studies, such as studies/, it is a gallery: every claim, its pictures, and what was measured.
    The page holds all it needs and opens without a network. Needs the extra report.

    Example: jaxmoe report runs/evaluated
    """
    with errors_told(verbose):
        import_module("jaxmoe.cli.report").run(results, out)


@app.command("list")
def list_parts(kind: options.Kind = None, verbose: options.Verbose = False) -> None:
    """List every part that can be named, also those of your packages, and shipped files; or one kind, a line for each.

    Example: jaxmoe list machines
    """
    with errors_told(verbose):
        import_module("jaxmoe.cli.listing").run(kind)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"jaxmoe {version('jaxmoe')}")
        raise typer.Exit()
    return wanted


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Global options."""


def main() -> None:
    """Run the command line of this process."""
    # GPUs multiply float32 matrices with 10-bit mantissas unless told otherwise: an error of 1e-3.
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    # XLA reports slow compilations to its developers; errors that matter are raised as well.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    watch()
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # All files are closed by now. A compilation cut short can crash the shutdown of the interpreter.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
