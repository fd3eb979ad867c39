"""Arguments and options of `jaxmoe trace` and `jaxmoe plan`, written out as those of the other verbs are."""

from pathlib import Path
from typing import Annotated

import typer

TraceModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME_OR_PATH",
        help="The model that the trace is of: the name of a file in models/, or a .yaml or config.json. It gives "
        "what the source does not state.",
    ),
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
Logits = Annotated[
    float | None,
    typer.Option(
        "--logits",
        metavar="SCALE",
        min=1e-3,
        help="Write logits of this scale, 1 for the log-odds that choices were drawn with.",
    ),
]
PlanFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A placement; its content says of which format. FILE.npz:NAME is phy2log_NAME of several in a file.",
        show_default=False,
    ),
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
    typer.Option(
        "--machine", metavar="NAME_OR_PATH", help="A machine: what links carry there, or to place for its time."
    ),
]
CheckedMachine = Annotated[
    Path,
    typer.Option(
        "--machine",
        metavar="NAME_OR_PATH",
        help="The machine: a YAML file, or the name of a shipped one (jaxmoe list machines).",
        show_default=False,
    ),
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
    float | None,
    typer.Option(
        "--weight-bytes",
        metavar="N",
        min=0.01,
        help="The bytes of one weight in memory; by default those that the model states.",
        show_default=False,
    ),
]
