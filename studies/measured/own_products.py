"""How far a machine's fitted products are off those that `time_products.py` timed on such a GPU; see README.md.

    python studies/measured/own_products.py --data ../shared/measured/gpu

Writes own_products.csv from products.csv, by kind of weights and number of tokens: how far the fitted kernels are off,
how long a product takes over one of six random weights, and over the measured tables, between their neighbouring
heights, where they have its width.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from same_product import products_of

from jaxmoe.experiment.measured_kernels.prediction import predict
from jaxmoe.experiment.measured_kernels.tables import read_table
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.hardware.gpu.files import read_kernels

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "configs" / "hardware" / "kernels" / "h200_sxm.json"
FEW = 200  # tokens up to which products are small


def measured_ms(folder: Path, shapes: np.ndarray) -> np.ndarray:
    """What the tables of vLLM say of every (m, n, k), ms, logarithms between neighbouring heights; NaN: not there."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for (m, n, k), ms in products_of(folder / "h200_sxm")["vllm"].items():
        found.setdefault((n, k), {})[m] = ms

    def between(m: int, n: int, k: int) -> float:
        known = sorted(found.get((n, k), {}).items())
        heights, times = np.log(np.array(known).T) if known else ((), ())
        return math.exp(np.interp(math.log(m), heights, times)) if known else math.nan

    return np.array([between(*shape) for shape in shapes.astype(int).tolist()])


def rows(timed: Path, folder: Path) -> Iterator[dict[str, object]]:
    """A row for every kind of weights and few, many and all tokens."""
    table = read_table(timed)
    told, seconds = predict(table, read_kernels(KERNELS)), table.columns["latency"] * table.kind.unit
    weights, tokens = table.given["weights"], table.columns["m"]
    off = told.seconds / seconds - 1
    inside = (told.lower <= seconds) & (seconds <= told.upper)
    shapes = np.stack([table.columns[name] for name in ("m", "n", "k")], axis=1)
    random = dict(zip(map(tuple, shapes[weights == "six"]), seconds[weights == "six"], strict=True))
    over = seconds / np.array([random[tuple(shape)] for shape in shapes])
    over_tables = table.columns["latency"] / measured_ms(folder, shapes)
    for kind in dict.fromkeys(weights):
        for size, chosen in (("few", tokens <= FEW), ("many", tokens > FEW), ("all", tokens > 0)):
            at = (weights == kind) & chosen
            yield {
                "weights": kind,
                "tokens": size,
                "rows": int(at.sum()),
                "mean_error": round(100 * float(np.abs(off[at]).mean()), 1),
                "median_error": round(100 * float(np.median(np.abs(off[at]))), 1),
                "bias": round(100 * float(np.median(off[at])), 1),
                "inside": round(100 * float(inside[at].mean())),
                "over_six": round(float(np.median(over[at])), 3),
                "over_tables": round(float(np.nanmedian(over_tables[at])), 3),
            }


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of systems, as aiconfigurator lays them out")
    options = parser.parse_args()
    found = list(rows(HERE / "products.csv", options.data))
    write_table(folder_of_tables(HERE, options) / "own_products.csv", found)


if __name__ == "__main__":
    main()
