"""Groups of commands: `jaxmoe trace ...` and `jaxmoe plan ...`, with their options."""

import typer

from jaxmoe.cli import options
from jaxmoe.cli.body import runs

trace_app = typer.Typer(no_args_is_help=True, help="What traces and load counts tell, and how they compare.")
plan_app = typer.Typer(no_args_is_help=True, help="Placement files of serving engines: make, convert, compare, check.")


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


@plan_app.command("place")
@runs("plan", "place")
def plan_place(
    loads: options.PlacedLoads,
    to: options.PlanFormat,
    slots: options.Slots,
    placed_ranks: options.PlacedRanks,
    out: options.Out,
    model: options.PlanModel = None,
    nodes: options.ServerNodes = 1,
    repeats: options.Repeats = False,
    fast: options.Fast = False,
    machine: options.PlanMachine = None,
    choice: options.Choice = "nearest",
    tokens: options.StepTokens = 2048,
    before: options.Before = None,
    steps: options.Steps = 1000,
    weight_bytes: options.WeightBytes = 1.0,
    verbose: options.Verbose = False,
) -> None:
    """Place copies of experts for recorded loads, and write a file that an engine loads.

    Told beside it: EPLB on the same loads, and how well the first half of the windows serves the second. With --machine
    slots are tuned for the time of a layer there: network, nodes, and how the engine picks among copies.
    """


@plan_app.command("advise")
@runs("plan_advise", "advise")
def plan_advise(
    trace: options.PlacedLoads,
    model: options.CheckedModel,
    machine: options.CheckedMachine,
    out: options.Out,
    to: options.PlanFormat = "plan",
    choice: options.Choice = "nearest",
    tokens: options.StepTokens = 2048,
    steps: options.Steps = 1000,
    context: options.Context = 1024,
    weight_bytes: options.WeightBytes = 1.0,
    verbose: options.Verbose = False,
) -> None:
    """Tell whether replicas or rebalancing would help, by how much end to end, and write the placement to deploy.

    Placements are made for the first half of the trace's windows and judged on the second, moving and memory counted.
    """


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
