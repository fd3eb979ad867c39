"""Groups of commands: `jaxmoe trace ...` and `jaxmoe plan ...`, with their options."""

import typer

from jaxmoe.cli import group_options, options
from jaxmoe.cli.session import runs

trace_app = typer.Typer(no_args_is_help=True, help="What traces and load counts tell, and how they compare.")
plan_app = typer.Typer(no_args_is_help=True, help="Placement files of serving engines: make, convert, compare, check.")


@trace_app.command("stats")
@runs("trace.stats")
def trace_stats(
    files: group_options.TraceFiles,
    out: options.Out,
    seed: options.Seed = 0,
    model: group_options.TraceModel = None,
    placement: group_options.TracePlan = None,
    nodes: group_options.Nodes = None,
    window: group_options.Window = 256,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell loads, pairs of experts over tokens and layers, reuse, and what they would be by chance.

    Example: jaxmoe trace stats trace.npz --model mixtral-8x7b --out runs/stats
    """


@trace_app.command("compare")
@runs("trace.compare")
def trace_compare(
    first: group_options.FirstTrace,
    second: group_options.SecondTrace,
    out: options.Out,
    model: group_options.TraceModel = None,
    nodes: group_options.Nodes = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell how alike two traces are, and whether a plan tuned on A serves B.

    Example: jaxmoe trace compare coding.npz chat.npz --out runs/compared
    """


@trace_app.command("convert")
@runs("trace.convert")
def trace_convert(
    source: group_options.Source,
    to: group_options.To,
    out: options.Out,
    model: group_options.TraceModel = None,
    num_experts: group_options.NumExperts = None,
    top_k: group_options.TopK = None,
    layer_ids: group_options.LayerIds = None,
    num_layers: group_options.NumLayers = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write a trace or load counts of any format in another one, and tell what was read.

    Example: jaxmoe trace convert trace.npz --to vllm --out runs/converted
    """


@trace_app.command("fit")
@runs("trace.synthesis", "fit", writes=("process.npz",))
def trace_fit(
    file: group_options.RecordedTrace,
    out: options.Out,
    model: group_options.TraceModel = None,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Fit a generator to a trace, write it as process.npz, and compare a trace of it with the recorded one.

    Example: jaxmoe trace fit trace.npz --out runs/fitted
    """


@trace_app.command("synth")
@runs("trace.synthesis", "synth", writes=("trace.npz",))
def trace_synth(
    process: group_options.Process,
    out: options.Out,
    tokens: group_options.Tokens = 8192,
    seed: options.Seed = 0,
    logits: group_options.Logits = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Draw a synthetic trace and write it as trace.npz, in pieces: its length is not bounded by memory.

    With --logits it has logits of its own, whose largest K are the choices: what a biased gate needs.

    Example: jaxmoe trace synth qwen3-30b-a3b --tokens 1024 --out runs/synthetic
    """


@plan_app.command("place")
@runs("plan", "place")
def plan_place(
    loads: group_options.PlacedLoads,
    to: group_options.PlanFormat,
    slots: group_options.Slots,
    placed_ranks: group_options.PlacedRanks,
    out: options.Out,
    model: group_options.PlanModel = None,
    nodes: group_options.ServerNodes = 1,
    repeats: group_options.Repeats = False,
    fast: group_options.Fast = False,
    machine: group_options.PlanMachine = None,
    choice: group_options.Choice = "nearest",
    tokens: group_options.StepTokens = 2048,
    before: group_options.Before = None,
    steps: group_options.Steps = 1000,
    weight_bytes: group_options.WeightBytes = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Place copies of experts for recorded loads, and write a file that an engine loads.

    Told beside it: EPLB on the same loads, and how well the first half of the windows serves the second. With --machine
    slots are tuned for the time of a layer there: network, nodes, and how the engine picks among copies.

    Example: jaxmoe plan place trace.npz --slots 16 --ranks 8 --to sglang --model mixtral-8x7b --out runs/placed
    """


@plan_app.command("advise")
@runs("plan_advise", "advise")
def plan_advise(
    trace: group_options.PlacedLoads,
    model: group_options.CheckedModel,
    machine: group_options.CheckedMachine,
    out: options.Out,
    to: group_options.PlanFormat = "plan",
    choice: group_options.Choice = "nearest",
    tokens: group_options.StepTokens = 2048,
    steps: group_options.Steps = 1000,
    context: group_options.Context = 1024,
    weight_bytes: group_options.WeightBytes = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell whether replicas or rebalancing would help, by how much end to end, and write the placement to deploy.

    Placements are made for the first half of the trace and evaluated on the second, moving and memory counted.

    Example: jaxmoe plan advise trace.npz --machine nmp_4x4 --model mixtral-8x7b --out runs/advice
    """


@plan_app.command("convert")
@runs("plan", "convert")
def plan_convert(
    source: group_options.PlanFile,
    to: group_options.PlanFormat,
    out: options.Out,
    model: group_options.PlanModel = None,
    ranks: group_options.Ranks = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write a placement of any format in another one, and tell what it cannot hold.

    Example: jaxmoe plan convert map.json --to eplb --out runs/converted_plan
    """


@plan_app.command("show")
@runs("plan", "show")
def plan_show(
    source: group_options.PlanFile,
    out: options.OutOrNone = None,
    model: group_options.PlanModel = None,
    ranks: group_options.Ranks = None,
    loads: group_options.Loads = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell what a placement holds, and how it balances given loads, with a picture.

    Example: jaxmoe plan show map.json --loads trace.npz
    """


@plan_app.command("diff")
@runs("plan", "diff")
def plan_diff(
    first: group_options.FirstPlan,
    second: group_options.SecondPlan,
    out: options.Out,
    model: group_options.PlanModel = None,
    ranks: group_options.Ranks = None,
    machine: group_options.PlanMachine = None,
    weight_bytes: group_options.WeightBytes = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell what has to move from placement A to B: copies, bytes, and over which links.

    Example: jaxmoe plan diff before.json after.json --model mixtral-8x7b --out runs/moved
    """


@plan_app.command("check")
@runs("plan", "check")
def plan_check(
    source: group_options.PlanFile,
    model: group_options.CheckedModel,
    machine: group_options.CheckedMachine,
    out: options.OutOrNone = None,
    ranks: group_options.Ranks = None,
    weight_bytes: group_options.WeightBytes = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Tell whether a placement is whole, is of the model, and fits the machine; exit code 2 where it does not.

    Example: jaxmoe plan check map.json --machine nmp_4x4 --model mixtral-8x7b
    """
