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
from jaxmoe.experiment.measured_kernels.kinds import KINDS
from jaxmoe.experiment.measured_kernels.scores import by_kernel, by_kind, precision_of, scores
from jaxmoe.experiment.measured_kernels.tables import read_folder
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import read_table, write_table
from jaxmoe.hardware.gpu.files import read_own_kernels, write_kernels
from jaxmoe.hardware.gpu.sheet import sheet_of

HERE = Path(__file__).resolve().parent
SYSTEMS = ("h100_sxm", "h200_sxm", "b200_sxm", "rtx_pro_6000_server", "gb200")
# Of GB200 the all-to-all alone is fitted: B200's other kernels stand in, collectives too, which know more GPUs.
OWN = {"gb200": ("alltoall",)}
LIKE = {"gb200": "b200_sxm.json"}
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
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), help="kinds to fit anew; rows of others are kept")
    options = parser.parse_args()
    out = folder_of_tables(HERE, options)
    kernels = options.kernels or out / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    fresh = {(system, kind) for system in options.systems for kind in options.kinds}
    tables: dict[str, list] = {name: [] for name in ("by_kind", "by_group", "by_kernel")}
    for name, kept in tables.items():
        earlier = read_table(out / f"{name}.csv") if (out / f"{name}.csv").exists() else []
        kept += [row for row in earlier if (row["system"], row["kind"]) not in fresh]
    for system in options.systems:
        kinds = {*options.kinds} & {*OWN.get(system, KINDS)}
        measured = [table for table in read_folder(options.data / system) if table.kind.name in kinds]
        start = time.monotonic()

        def report(_: str, done: int, total: int, system: str = system, start: float = start) -> None:
            print(f"{system}: {done} of {total} kernels, {time.monotonic() - start:.0f} s", flush=True)

        fits = calibrate_tables(measured, sheet_of(system), SEED, report)
        path = kernels / f"{system}.json"
        before = read_own_kernels(path).kernels if path.exists() else ()
        kept = [each for each in before if each.kind not in kinds]
        write_kernels(path, kernel_file(system, fits, kept, LIKE.get(system)))
        for name, rows in (("by_kind", by_kind(fits)), ("by_group", by_group(fits)), ("by_kernel", by_kernel(fits))):
            tables[name] += [{"system": system, **row} for row in rows]
        # Written anew after every system: a run that is stopped leaves those that are done.
        for name, rows in tables.items():
            write_table(out / f"{name}.csv", sorted(rows, key=lambda row: (SYSTEMS.index(row["system"]), row["kind"])))


if __name__ == "__main__":
    main()
