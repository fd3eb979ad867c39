"""How far apart are times of the same library's product that two backends measured on one GPU? See README.md.

    python studies/measured/same_product.py --data ../shared/measured/gpu

All three backends run products in bfloat16 by PyTorch's library. What they differ by, no model of the shape can tell:
writes same_product.csv, in a minute; and lone_rows.csv, how many rows of products are slow by themselves.
"""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np

from jaxmoe.experiment.measured_kernels.calibration import pooled
from jaxmoe.experiment.measured_kernels.tables import read_folder
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table

HERE = Path(__file__).resolve().parent
SYSTEMS = ("h100_sxm", "h200_sxm", "b200_sxm")
FAR = 1.3  # times the usual ratio, either way


def products_of(folder: Path) -> dict[str, dict[tuple[int, ...], float]]:
    """By backend, the ms of each (m, n, k) in bfloat16."""
    found = {}
    for _, kernel, rows in pooled(table for table in read_folder(folder) if table.kind.name == "gemm"):
        if kernel["gemm_dtype"] == "bfloat16":
            shapes = zip(*(rows[name].astype(int).tolist() for name in ("m", "n", "k")), strict=True)
            found[kernel["framework"]] = dict(zip(shapes, rows["latency"].tolist(), strict=True))
    return found


def rows_of(folder: Path) -> Iterator[dict[str, object]]:
    """What each two backends differ by, per cent, beside their usual ratio."""
    for (name, times), (other, others) in combinations(sorted(products_of(folder).items()), 2):
        ratio = np.array([times[shape] / others[shape] for shape in times if shape in others])
        apart = ratio / np.median(ratio)
        yield {
            "system": folder.name,
            "backend": name,
            "over": other,
            "rows": len(ratio),
            "usual_ratio": round(float(np.median(ratio)), 3),
            "apart": round(100 * float(np.abs(apart - 1).mean()), 2),
            "far_apart": round(100 * float((np.abs(np.log(apart)) > np.log(FAR)).mean()), 2),
        }


def lone_rows(folder: Path) -> Iterator[dict[str, object]]:
    """Rows that take `FAR` times as long as both of their neighbours in height, and series whose first row does."""
    for _, kernel, rows in pooled(table for table in read_folder(folder) if table.kind.name == "gemm"):
        order = np.lexsort((rows["m"], rows["k"], rows["n"]))
        shape, seconds = np.stack([rows["n"], rows["k"]], axis=1)[order], rows["latency"][order]
        alike = (shape[1:] == shape[:-1]).all(axis=1)  # of a row and the next
        over = seconds[:-1] > FAR * seconds[1:], seconds[1:] > FAR * seconds[:-1]  # the next, the one before
        lone, first = alike[1:] & alike[:-1] & over[0][1:] & over[1][:-1], np.append(True, ~alike)[:-1]
        yield {
            "system": folder.name,
            "backend": kernel["framework"],
            "precision": kernel["gemm_dtype"],
            "kernel": kernel["kernel_source"],
            "rows": len(seconds),
            "lone": round(100 * float(lone.sum() / len(seconds)), 2),
            "first": round(100 * float((first & alike & over[0]).sum() / first.sum()), 1),
        }


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of systems, as aiconfigurator lays them out")
    options = parser.parse_args()
    out = folder_of_tables(HERE, options)
    for name, of in (("same_product", rows_of), ("lone_rows", lone_rows)):
        write_table(out / f"{name}.csv", [row for system in SYSTEMS for row in of(options.data / system)])


if __name__ == "__main__":
    main()
