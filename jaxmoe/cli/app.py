"""The application: every verb with its options. What a verb does is in the module of its name, loaded when it runs."""

import os
import shlex
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jaxmoe.cli import options
from jaxmoe.cli.session import INTERRUPTED, command_line, errors_told, session
from jaxmoe.codesign.space import read_space
from jaxmoe.config import load_scenario
from jaxmoe.sweep.study import read_study


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
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="How long Mixture-of-Experts layers take on meshes of chips, and where their experts should live.",
)
trace_app = typer.Typer(no_args_is_help=True, help="What traces and load counts tell, and how they compare.")
app.add_typer(trace_app, name="trace")
plan_app = typer.Typer(no_args_is_help=True, help="Placement files of serving engines: convert, show, compare, check.")
app.add_typer(plan_app, name="plan")


def runs(
    module: str,
    function: str = "run",
    scenario: bool = False,
    check: Callable[[Path], object] | None = None,
) -> Callable[[Callable], Callable]:
    """Give a signature the body `function(folder, interrupts, ...)` of a module of this package.

    Of a `scenario`, or what `check` reads, a wrong key is told before JAX is loaded; what is no file, such as a pipe,
    can be read but once.
    """

    def with_body(signature: Callable) -> Callable:
        @wraps(signature)
        def command(out: Path, verbose: bool, **given: Any) -> None:
            with session(out, verbose) as (folder, interrupts):
                if check is not None and not _is_pipe(given["config"]):
                    check(given["config"])
                if scenario and not _is_pipe(given["config"]):
                    load_scenario(given["config"], given["overrides"] or ())
                if given.get("hardware") is not None:
                    read_space(given["hardware"])
                body = getattr(import_module(f"jaxmoe.cli.{module}"), function)
                body(folder, interrupts, **given)

        return command

    return with_body


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
    time_limit: options.TimeLimit = None,
    hardware: options.HardwareSpace = None,
    verbose: options.Verbose = False,
) -> None:
    """Search for a placement, by gradient descent or otherwise, and judge it beside the usual ones and given plans.

    With --hardware, search for numbers of the machine under constraints, alone or together with the placement.
    Ctrl-C ends the search and keeps the best plan so far; a second one gives up.
    """


@app.command()
@runs("evaluate", scenario=True)
def evaluate(
    config: options.Config,
    out: options.Out,
    trace: options.Trace = None,
    plan: options.Plans = None,
    overrides: options.Overrides = None,
    layers: options.Layers = None,
    verbose: options.Verbose = False,
) -> None:
    """Judge the usual placements, and given plans, on batches drawn from the trace.

    Energies are told where the machine states them, as in hardware.link.energy_pJ_per_B or hardware.die.idle_W.
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
    verbose: options.Verbose = False,
) -> None:
    """Replay plans in the event simulator, and tell how far the model is off."""


@app.command()
@runs("simulate", scenario=True)
def simulate(
    config: options.Config,
    out: options.Out,
    plan: options.StartPlan = None,
    iterations: options.Iterations = 100,
    replay: options.Replays = None,
    trace: options.Trace = None,
    history: options.History = None,
    overrides: options.Overrides = None,
    layers: options.Layers = None,
    timeline: options.Timeline = None,
    verbose: options.Verbose = False,
) -> None:
    """Run a system over iterations, and tell what it gains over its plan left alone."""


@app.command()
@runs("network")
def network(
    config: options.Hardware,
    traffic: options.Traffic,
    out: options.Out,
    overrides: options.HardwareOverrides = None,
    order: options.Order = None,
    seed: options.Seed = 0,
    show: options.Show = None,
    verbose: options.Verbose = False,
) -> None:
    """Tell how long given traffic takes on a network of any kind, and which link or port limits it."""


@app.command("network profile")
@runs("network_profile")
def network_profile(
    config: options.Profiled,
    out: options.Out,
    overrides: options.HardwareOverrides = None,
    sizes: options.Sizes = None,
    noise: options.Noise = 0.0,
    outliers: options.Outliers = 0.0,
    seed: options.Seed = 0,
    verbose: options.Verbose = False,
) -> None:
    """Fit alpha and beta of every pair of nodes, way and phase, to a simulated network or to measured messages.

    A CSV of measurements has the columns source, destination, phase (metadata, dispatch or combine), bytes, seconds.
    """


@app.command()
@runs("sweep", check=read_study)
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
    verbose: options.Verbose = False,
) -> None:
    """Evaluate a study of many machines, models and strategies; a sweep that was stopped goes on where it was."""


@app.command()
def report(
    results: options.ResultFolder,
    out: options.ReportFile = None,
    verbose: options.Verbose = False,
) -> None:
    """Make one HTML page of a folder of results: figures to hover and filter, tables that sort, configuration.

    The page holds all it needs and opens without a network. Needs pip install 'jaxmoe[report]'.
    """
    with errors_told(verbose):
        import_module("jaxmoe.cli.report").run(results, out)


@trace_app.command()
@runs("trace.stats")
def stats(
    files: options.TraceFiles,
    out: options.Out,
    seed: options.Seed = 0,
    model: options.TraceModel = None,
    placement: options.TracePlan = None,
    nodes: options.Nodes = None,
    window: options.Window = 256,
    verbose: options.Verbose = False,
) -> None:
    """Tell loads, pairs of experts over tokens and layers, reuse, and what they would be by chance."""


@trace_app.command()
@runs("trace.compare")
def compare(
    first: options.FirstTrace,
    second: options.SecondTrace,
    out: options.Out,
    model: options.TraceModel = None,
    nodes: options.Nodes = None,
    verbose: options.Verbose = False,
) -> None:
    """Tell how alike two traces are, and whether a plan tuned on A serves B."""


@trace_app.command()
@runs("trace.convert")
def convert(
    source: options.Source,
    to: options.To,
    out: options.Out,
    model: options.TraceModel = None,
    num_experts: options.NumExperts = None,
    top_k: options.TopK = None,
    layer_ids: options.LayerIds = None,
    num_layers: options.NumLayers = None,
    verbose: options.Verbose = False,
) -> None:
    """Write a trace or load counts of any format in another one, and tell what was read."""


@trace_app.command()
@runs("trace.synthesis", "fit")
def fit(
    file: options.RecordedTrace,
    out: options.Out,
    model: options.TraceModel = None,
    seed: options.Seed = 0,
    verbose: options.Verbose = False,
) -> None:
    """Fit a generator to a trace, write it as process.npz, and compare a trace of it with the recorded one."""


@trace_app.command()
@runs("trace.synthesis", "synth")
def synth(
    process: options.Process,
    out: options.Out,
    tokens: options.Tokens = 8192,
    seed: options.Seed = 0,
    verbose: options.Verbose = False,
) -> None:
    """Draw a synthetic trace and write it as trace.npz, in pieces: its length is not bounded by memory."""


@plan_app.command("convert")
@runs("plan", "convert")
def plan_convert(
    source: options.PlanFile,
    to: options.PlanFormat,
    out: options.Out,
    model: options.PlanModel = None,
    ranks: options.Ranks = None,
    verbose: options.Verbose = False,
) -> None:
    """Write a placement of any format in another one, and tell what it cannot hold."""


@plan_app.command("show")
@runs("plan", "show")
def plan_show(
    source: options.PlanFile,
    out: options.Out,
    model: options.PlanModel = None,
    ranks: options.Ranks = None,
    loads: options.Loads = None,
    verbose: options.Verbose = False,
) -> None:
    """Tell what a placement holds, and how it balances given loads, with a picture."""


@plan_app.command("diff")
@runs("plan", "diff")
def plan_diff(
    first: options.FirstPlan,
    second: options.SecondPlan,
    out: options.Out,
    model: options.PlanModel = None,
    ranks: options.Ranks = None,
    machine: options.PlanMachine = None,
    weight_bytes: options.WeightBytes = 1.0,
    verbose: options.Verbose = False,
) -> None:
    """Tell what has to move from placement A to B: copies, bytes, and over which links."""


@plan_app.command("check")
@runs("plan", "check")
def plan_check(
    source: options.PlanFile,
    out: options.Out,
    model: options.CheckedModel,
    machine: options.CheckedMachine,
    ranks: options.Ranks = None,
    weight_bytes: options.WeightBytes = 1.0,
    verbose: options.Verbose = False,
) -> None:
    """Tell whether a placement is whole, is of the model, and fits the machine; exit code 2 where it does not."""


def _is_pipe(path: Path) -> bool:
    return path.exists() and not path.is_file()


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
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # All files are closed by now. A compilation cut short can crash the shutdown of the interpreter.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
