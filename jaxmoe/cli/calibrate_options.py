"""Arguments and options of `jaxmoe calibrate`, written out as those of the other verbs are."""

from pathlib import Path
from typing import Annotated

import typer

CalibratedMachine = Annotated[
    Path,
    typer.Argument(
        metavar="MACHINE",
        help="The machine as far as it is known: a YAML file, or the name of a shipped one (jaxmoe list machines).",
        show_default=False,
    ),
]
Measured = Annotated[
    list[Path],
    typer.Option(
        "--measured",
        metavar="FILE.csv|FOLDER",
        help="A folder SYSTEM/KIND/BACKEND/*.parquet of measured GPU kernels, in the layout of aiconfigurator; or a "
        "table of measurements of one kind. Its columns are seconds and: tokens, hidden, columns (a matrix "
        "product); level, bytes (one node reads memory); source, destination, bytes (a message alone); or bytes (what "
        "every node sends to every other). Repeatable.",
        show_default=False,
    ),
]
PredictedTable = Annotated[
    Path,
    typer.Argument(
        metavar="TABLE", help="Rows of GPU kernels, Parquet or CSV, in the columns of the tables.", show_default=False
    ),
]
PredictedFile = Annotated[
    Path,
    typer.Option(
        "--out", metavar="FILE", help="Where to write the rows with their times, Parquet or CSV.", show_default=False
    ),
]
BaseMachine = Annotated[
    Path | None,
    typer.Option(
        "--base",
        metavar="MACHINE",
        help="With a folder of kernels of which few rows are known: the machine whose fitted kernels these move, at "
        "the data sheet of the measured GPU, 20 of each kind, backend and precision; the other rows judge them.",
        show_default=False,
    ),
]
Fit = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="KEY,KEY,..",
        help="The numbers to fit, such as link.latency_ns or memory.hbm.bandwidth_GB_per_s; by default all rates, "
        "latencies and efficiencies that the file states.",
        show_default=False,
    ),
]
