"""Arguments and options that verbs share."""

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
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]
