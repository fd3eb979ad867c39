"""How far apart are times of the same library's product that two backends measured on one GPU? See README.md.

    python studies/measured/same_product.py --data ../shared/measured/gpu

All three backends run products in bfloat16 by PyTorch's library. What they differ by, no model of the shape can tell:
writes same_product.csv, in a minute.
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


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of systems, as aiconfigurator lays them out")
    options = parser.parse_args()
    rows = [row for system in SYSTEMS for row in rows_of(options.data / system)]
    write_table(folder_of_tables(HERE, options) / "same_product.csv", rows)


if __name__ == "__main__":
    main()
