"""Arguments and options of the commands. Choices are listed here, so that they are checked before JAX is loaded."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from jaxmoe.extras import install_command
from jaxmoe.methods.settings import STATEMENTS

Config = Annotated[
    Path,
    typer.Argument(
        metavar="SCENARIO",
        help="The scenario: a YAML file, or the name of a shipped one (jaxmoe list scenarios).",
        show_default=False,
    ),
]


def _folder(text: str) -> Path:
    """The folder of a text that may not be empty, as a shell makes of a variable that is not set."""
    if not text:
        raise typer.BadParameter("is empty; give a folder, or . for this one")
    return Path(text)


Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="DIR", parser=_folder, help="The folder for results; made if need be.", show_default=False
    ),
]
OutOrNone = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="A folder for the same as files; made if need be.", show_default=False),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="A recorded trace of any format in place of workload.trace."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a value of the scenario. May be repeated."),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers", metavar="N,N,..", help="These layers, as numbered in the full model, in place of evaluation.layers."
    ),
]
Phase = Annotated[
    Literal["prefill", "decode"] | None,
    typer.Option("--phase", help="Time a step of the whole model as its deployment serves it.", show_default=False),
]
Optimiser = Annotated[
    str,
    typer.Option("--optimiser", metavar="NAME", help="gradient, milp-bayes, anneal, greedy or random."),
]
Copies = Annotated[
    int,
    typer.Option(
        "--copies", metavar="N", min=1, help="Place up to so many copies of every expert, in equal regions; tell each."
    ),
]
HardwareSpace = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        metavar="SPACE.yaml",
        help="Choose numbers of the machine as well: variables: {KEY: {from: .., to: .., scale: log}}, constraints: "
        "[EXPRESSION <= LIMIT], objective: total|p95|.., placement: usual|tuned|[NAMES], gate_loss: PART, starts: "
        "64, steps: 50, seed: 0. Writes the best machine as scenario.yaml, and what each limit is worth.",
        show_default=False,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="End after this time and keep the best plan so far; two thirds of it are for the search.",
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
    typer.Option(
        "--timeline",
        metavar="FILE.json",
        help="Write a replayed layer, or two of moentwine, for trace viewers, and draw it.",
    ),
]
TimelineOf = Annotated[
    str | None,
    typer.Option(
        "--timeline-of",
        metavar="STRATEGY:LAYER",
        help="What --timeline shows; by default the slowest layer of the first plan.",
    ),
]
Iterations = Annotated[
    int | None,
    typer.Option("--iterations", metavar="N", help="Iterations to run, in place of evaluation.iterations.", min=1),
]
Replays = Annotated[
    int | None,
    typer.Option(
        "--replay",
        metavar="N",
        help="Iterations that the event simulator replays, in place of validation.batches.",
        min=1,
    ),
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
    Path,
    typer.Argument(
        metavar="MACHINE",
        help="The machine: a YAML file, or the name of a shipped one (jaxmoe list machines).",
        show_default=False,
    ),
]
HardwareOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a value of the machine. May be repeated."),
]
Profiled = Annotated[
    Path,
    typer.Argument(
        metavar="MACHINE|CSV",
        help="The machine: a YAML file, or the name of a shipped one (jaxmoe list machines); or a table of measured "
        "messages.",
        show_default=False,
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
StudyFile = Annotated[
    Path,
    typer.Argument(
        metavar="STUDY",
        help="The study, a YAML file: scenario: FILE_OR_NAME, axes: {KEY: [..], KEY: {from: .., to: .., points: .., "
        "scale: log}, strategy: [tp, ep_balanced]}, set: {KEY: VALUE}, metrics: [total, ..].",
        show_default=False,
    ),
]
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
        "this machine is in, local starts one here. Needs the same versions on all hosts, and ray "
        f"({escape(install_command('ray', 'ray'))}).",
        show_default=False,
    ),
]
Kind = Annotated[
    str | None,
    typer.Argument(
        metavar="KIND",
        help="machines, models, scenarios, strategies, exchanges, systems, metrics or formats: a line for each.",
        show_default=False,
    ),
]
ResultFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        help="The folder of results of any command or sweep, or a folder of studies; or several to compare, of "
        "evaluate and tune or of simulate.",
        show_default=False,
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="The page to write; by default report.html in DIR, of several compared.html in the first.",
        show_default=False,
    ),
]
Wide = Annotated[
    bool, typer.Option("--wide", help="Print all columns: stages, p95, the simulator, energy; best at 120 columns.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Tell no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]
NewMachine = Annotated[
    str,
    typer.Option(
        "--machine", metavar="NAME_OR_PATH", help="The name of a file in hardware/, or a .yaml.", show_default=False
    ),
]
NewModel = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME_OR_PATH",
        help="The name of a file in models/, or a .yaml or config.json of Hugging Face.",
        show_default=False,
    ),
]
NewTrace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="A recorded trace; by default a synthetic one.", show_default=False),
]
NewSystem = Annotated[
    str,
    typer.Option(
        "--system",
        metavar="NAME",
        help=f"{', '.join(STATEMENTS)}, or one of your own.",
    ),
]
NewBatch = Annotated[
    int | None, typer.Option("--batch-tokens", metavar="N", min=1, help="Tokens in a batch.", show_default=False)
]
AllKeys = Annotated[
    bool, typer.Option("--all-keys", help="Write what the files of machine and model leave to defaults, too.")
]
