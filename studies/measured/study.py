"""How far are fitted kernels of real GPUs off on shapes that they were not fitted to? See README.md.

    python studies/measured/study.py --data ../shared/measured/gpu

Fits every kernel of each system, which takes a quarter of an hour on two cores. Beside its tables (by_kind.csv,
by_group.csv by system, backend, precision and decade of tokens, and by_kernel.csv) it writes kernels of machines.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxmoe.experiment.measured_kernels.calibration import KernelFit, calibrate_tables, decades, kernel_file
from jaxmoe.experiment.measured_kernels.scores import by_kernel, by_kind, precision_of, scores
from jaxmoe.experiment.measured_kernels.tables import read_folder
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.hardware.gpu.files import write_kernels
from jaxmoe.hardware.gpu.sheet import sheet_of

HERE = Path(__file__).resolve().parent
SYSTEMS = ("h100_sxm", "h200_sxm", "b200_sxm")
SEED = 0


def by_group(fits: Sequence[KernelFit]) -> list[dict[str, object]]:
    """Scores by kind, backend, precision and decade of size, all kernels together."""
    found: dict[tuple, list[tuple[KernelFit, np.ndarray]]] = {}
    for fit in fits:
        decade = decades(fit.size)
        for each in np.unique(decade):
            name = (fit.kind.name, fit.kernel.get("framework", ""), precision_of(fit), 10 ** int(each))
            found.setdefault(name, []).append((fit, decade == each))
    names = ("kind", "backend", "precision", "size_from")
    return [dict(zip(names, name, strict=True)) | scores(*zip(*parts, strict=True)) for name, parts in found.items()]


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of systems, as aiconfigurator lays them out")
    parser.add_argument(
        "--kernels", type=Path, metavar="FOLDER", help="folder of kernels of machines, kernels/ beside the tables"
    )
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, help="folders of --data")
    options = parser.parse_args()
    out = folder_of_tables(HERE, options)
    kernels = options.kernels or out / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list] = {"by_kind": [], "by_group": [], "by_kernel": []}
    for system in options.systems:
        measured, notes = read_folder(options.data / system)
        start = time.monotonic()

        def report(_: str, done: int, total: int, system: str = system, start: float = start) -> None:
            print(f"{system}: {done} of {total} kernels, {time.monotonic() - start:.0f} s", flush=True)

        fits = calibrate_tables(measured, sheet_of(system), SEED, report)
        write_kernels(kernels / f"{system}.json", kernel_file(system, fits))
        for name, rows in (("by_kind", by_kind(fits)), ("by_group", by_group(fits)), ("by_kernel", by_kernel(fits))):
            tables[name] += [{"system": system, **row} for row in rows]
        for note in notes:
            print(f"{system}: {note}")
        # Written anew after every system: a run that is stopped leaves those that are done.
        for name, rows in tables.items():
            write_table(out / f"{name}.csv", rows)


if __name__ == "__main__":
    main()
