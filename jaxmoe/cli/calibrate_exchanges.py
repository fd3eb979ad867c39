"""DeepEP's exchanges in `jaxmoe calibrate` and `jaxmoe calibrate predict`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.table import Table

from jaxmoe.cli.comparison_output import print_table, print_warnings
from jaxmoe.cli.session import OutputFolder
from jaxmoe.experiment.measured_kernels.exchange_fit import ExchangeFit, exchange_file, exchange_scores
from jaxmoe.experiment.measured_kernels.exchange_prediction import predict_exchanges
from jaxmoe.experiment.measured_kernels.exchange_tables import exchange_table
from jaxmoe.experiment.measured_kernels.tables import write_columns
from jaxmoe.files import atomic_write, write_table
from jaxmoe.hardware.gpu.deepep import Links
from jaxmoe.hardware.gpu.deepep_files import beside, read_exchanges, write_exchanges
from jaxmoe.hardware.gpu.files import KernelFile

FILE = beside(Path("kernels.json")).name


def keep_exchanges(folder: OutputFolder, system: str, fits: Sequence[ExchangeFit]) -> None:
    """Write fitted exchanges and their scores."""
    with atomic_write(folder.target(FILE)) as aside:
        write_exchanges(aside, exchange_file(system, fits))
    write_table(folder.target("exchanges.csv"), list(exchange_scores(fits)))


def print_exchanges(fits: Sequence[ExchangeFit], name: str) -> None:
    """Their errors as a table, where there are any."""
    if not fits:
        return
    table = Table(title=f"{name}: DeepEP, off on rows that were held out, %")
    rows = list(exchange_scores(fits))
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*map(str, row.values()))
    print_table(table)


def run_predict_exchanges(
    exchanges: Path, kernels: KernelFile, path: Path, columns: Mapping[str, np.ndarray], out: Path
) -> None:
    """Write the rows of a table with their predicted times, over the links of the GPU that the kernels are of."""
    table = exchange_table(path, columns, timed=False)
    sheet = kernels.sheet
    file = replace(
        read_exchanges(exchanges),
        system=kernels.system,
        links=Links(float(sheet.link)),
        processors=int(sheet.processors),
        node=sheet.node,
    )
    found, notes = predict_exchanges(table, file)
    write_columns(out, {**table.given, **found})
    print_warnings(notes)
