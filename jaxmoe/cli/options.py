"""Arguments and options of the verbs. Choices are written out here: the command line answers before JAX is loaded."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The scenario, a YAML file.", show_default=False)]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder for results; made if need be.", show_default=False)
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="A recorded trace of any format in place of workload.trace."),
]
TraceModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME_OR_PATH",
        help="The model that the trace is of: the name of a file in models/, or a .yaml or config.json. It gives "
        "what the source does not state.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a value of the scenario. May be repeated."),
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="N,N,..", help="Only these layers, as numbered in the full model."),
]
Optimiser = Annotated[
    str,
    typer.Option("--optimiser", metavar="NAME", help="gradient, milp-bayes, anneal, greedy or random."),
]
HardwareSpace = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        metavar="SPACE.yaml",
        help="Choose numbers of the machine as well: variables: {KEY: {from: .., to: .., scale: log}}, constraints: "
        "[EXPRESSION <= LIMIT], objective: total|p95|.., placement: usual|tuned|[NAMES], starts: 64, steps: 50, "
        "seed: 0. Writes the best machine as scenario.yaml, and what each limit is worth.",
        show_default=False,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Stop after this time and keep the best plan so far: tuning.time_limit_s.",
    ),
]
Plans = Annotated[
    list[str] | None,
    typer.Option(
        "--plan",
        metavar="[NAME=]FILE",
        help="A plan to compare, by default named as its file, or a usual strategy. Repeatable.",
    ),
]
Timeline = Annotated[
    Path | None,
    typer.Option("--timeline", metavar="FILE.json", help="Write one replayed layer for trace viewers, and draw it."),
]
TimelineOf = Annotated[
    str | None,
    typer.Option(
        "--timeline-of",
        metavar="STRATEGY:LAYER",
        help="What --timeline shows; by default the slowest layer of the first plan.",
    ),
]
Iterations = Annotated[int, typer.Option("--iterations", metavar="N", help="Iterations to run.", min=1)]
Replays = Annotated[
    int | None,
    typer.Option("--replay", metavar="N", help="Iterations that the event simulator replays; by default 3.", min=1),
]
StartPlan = Annotated[
    str | None,
    typer.Option("--plan", metavar="FILE|STRATEGY", help="The plan that the system starts from, for system.plan."),
]
History = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="FILE",
        help="A trace that forecasts and strategies are fitted on; by default what comes before the run.",
    ),
]
BatchTokens = Annotated[
    str | None,
    typer.Option("--batch-tokens", metavar="N,N,..", help="Sizes of batch in place of workload.batch_tokens."),
]
Standard = Annotated[bool, typer.Option("--standard", help="Replay the usual placements as well.")]
Hardware = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The description of a machine, a YAML file.", show_default=False)
]
HardwareOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a value of the machine. May be repeated."),
]
Profiled = Annotated[
    Path,
    typer.Argument(
        metavar="MACHINE|CSV", help="The description of a machine, or a table of measured messages.", show_default=False
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option("--sizes", metavar="B,B,..", help="Sizes of messages in B; by default 24 from 1 kB to 64 MB."),
]
Noise = Annotated[
    float, typer.Option("--noise", metavar="PART", min=0, max=0.5, help="Relative noise of simulated times.")
]
Outliers = Annotated[
    float,
    typer.Option("--outliers", metavar="PART", min=0, max=0.3, help="Part of simulated times that is 2 to 10 times."),
]
Traffic = Annotated[
    Path,
    typer.Option(
        "--traffic",
        metavar="FILE",
        help="An npz of matrices [N, N], bytes from source (row) to destination (column), under any names.",
        show_default=False,
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        "--order",
        metavar="staggered|by_destination|in_turns|shuffled",
        help="How the simulator orders a source's messages: to the next nodes first, to node 0 first, a chunk to each "
        "in turns, or by chance. "
        "By default chance with cut-through, where packets mix, and the next nodes with store-and-forward.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="The seed of all that is drawn by chance.")
]
Show = Annotated[
    str | None,
    typer.Option("--show", metavar="NAME", help="The matrix to draw; without it the one that takes longest."),
]
TraceFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Traces or load counts of any kind. Several are taken for topics of one model.",
        show_default=False,
    ),
]
TracePlan = Annotated[
    Path | None,
    typer.Option(
        "--placement",
        metavar="PLAN.npz",
        help="The plan whose nodes to load. Without it, whole experts in equal runs over --nodes nodes.",
        show_default=False,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        metavar="N",
        min=1,
        help="Nodes that share the experts; by default 8, or as many as get two experts each.",
        show_default=False,
    ),
]
Window = Annotated[
    int, typer.Option("--window", metavar="TOKENS", min=1, help="Tokens of a window, or a batch, that loads the nodes.")
]
FirstTrace = Annotated[Path, typer.Argument(metavar="A", help="A trace or load counts.", show_default=False)]
SecondTrace = Annotated[Path, typer.Argument(metavar="B", help="Another of the same model.", show_default=False)]
RecordedTrace = Annotated[
    Path, typer.Argument(metavar="FILE", help="A recorded trace of any format.", show_default=False)
]
Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A file or a folder; its content says of what.", show_default=False)
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="npz|tensorrt_llm|flame_moe|megatron|hd_moe|data_movement|vllm|sglang",
        help="The format to write.",
        show_default=False,
    ),
]
NumExperts = Annotated[int | None, typer.Option("--num-experts", metavar="N", min=1, help="Routed experts of a layer.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", min=1, help="Experts that a token chooses.")]
LayerIds = Annotated[
    str | None,
    typer.Option("--layer-ids", metavar="N,N,..", help="Layers with experts, as numbered in the full model."),
]
NumLayers = Annotated[
    int | None, typer.Option("--num-layers", metavar="N", min=1, help="All layers of the model, dense ones counted.")
]
Process = Annotated[
    str,
    typer.Argument(
        metavar="PROCESS",
        help="A process.npz of jaxmoe trace fit, or a preset: deepseek-v3, qwen3-235b-a22b, llama-4-maverick, "
        "qwen3-30b-a3b, kimi-k2.",
        show_default=False,
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="The number of tokens to draw.")]
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="The study, a YAML file.", show_default=False)]
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="POINT",
        help="Tell why one point, by its hash or row number, is as fast as it is, in place of the sweep.",
        show_default=False,
    ),
]
Pareto = Annotated[
    str | None,
    typer.Option("--pareto", metavar="A,B[,C]", help="Show the Pareto front of metrics.", show_default=False),
]
Elasticities = Annotated[
    bool,
    typer.Option("--elasticities", help="Tell by how many % every metric changes with 1 % of each number."),
]
Effects = Annotated[
    bool,
    typer.Option(
        "--effects", help="Tell which part of every metric's variance each axis explains, alone and with another one."
    ),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="X,Y",
        help="Draw which strategy wins where over two axes of numbers, as map.png.",
        show_default=False,
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        "--memory",
        metavar="GB",
        min=1e-6,
        help="What the points that are evaluated at once may take; by default a quarter of the memory.",
        show_default=False,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS|local",
        help="Evaluate on all hosts of the Ray cluster at HOST:PORT, each with its own devices; auto is the one that "
        "this machine is in, local starts one here. Needs pip install '.[ray]', of the same versions on all hosts.",
        show_default=False,
    ),
]
ResultFolder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="The folder of results of any command, or of a sweep.", show_default=False),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="The page to write; by default report.html in DIR.", show_default=False),
]
PlanFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A placement; its content says of which format.", show_default=False),
]
FirstPlan = Annotated[Path, typer.Argument(metavar="A", help="The placement before.", show_default=False)]
SecondPlan = Annotated[Path, typer.Argument(metavar="B", help="The placement after.", show_default=False)]
PlanFormat = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="eplb|sglang|vllm_ascend|tensorrt_llm|vllm|plan",
        help="The format to write. vllm is the list of an open proposal, which no release reads yet.",
        show_default=False,
    ),
]
PlanModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME_OR_PATH",
        help="The model: the name of a file in models/, or a .yaml or config.json. It gives experts and layers.",
    ),
]
CheckedModel = Annotated[
    str,
    typer.Option("--model", metavar="NAME_OR_PATH", help="The model, by name or file.", show_default=False),
]
PlacedLoads = Annotated[
    Path, typer.Argument(metavar="LOADS", help="A trace or load counts of any format.", show_default=False)
]
Slots = Annotated[
    int, typer.Option("--slots", metavar="P", min=1, help="Slots of a layer on all ranks together.", show_default=False)
]
PlacedRanks = Annotated[
    int, typer.Option("--ranks", metavar="N", min=1, help="Ranks that share the slots.", show_default=False)
]
ServerNodes = Annotated[
    int,
    typer.Option(
        "--nodes", metavar="N", min=1, help="Server nodes, on each of which the model's groups of experts stay whole."
    ),
]
Repeats = Annotated[bool, typer.Option("--repeats", help="Let a rank have an expert twice, as EPLB does.")]
Fast = Annotated[bool, typer.Option("--fast", help="One short descent: milliseconds for a whole model.")]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", metavar="N", min=1, help="The ranks that share the slots, where the file does not say."),
]
Loads = Annotated[
    Path | None,
    typer.Option("--loads", metavar="FILE", help="A trace or load counts of any format, to tell the balance of."),
]
PlanMachine = Annotated[
    Path | None,
    typer.Option("--machine", metavar="FILE", help="A machine: what links carry there, or to place for its time."),
]
CheckedMachine = Annotated[
    Path, typer.Option("--machine", metavar="FILE", help="The description of a machine.", show_default=False)
]
Before = Annotated[
    Path | None,
    typer.Option("--before", metavar="FILE", help="The placement in use: what moves from it costs time."),
]
Steps = Annotated[
    int,
    typer.Option("--steps", metavar="N", min=1, help="Steps until slots change again, or of a window of the trace."),
]
Choice = Annotated[
    str, typer.Option("--choice", metavar="even|nearest|fixed", help="How the engine picks among copies of an expert.")
]
StepTokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Tokens of all ranks in a step.")]
Context = Annotated[int, typer.Option("--context", metavar="N", min=0, help="Tokens of context before each token.")]
WeightBytes = Annotated[
    float, typer.Option("--weight-bytes", metavar="N", min=0.01, help="The bytes of one weight in memory.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]
