"""Model and event simulator against trusted outside simulators, on every reference record; see README.md.

Writes `records.csv` (every record), `by_class.csv` (errors by class of traffic), `efficiency.csv` (the efficiency that
fits BookSim's base router in the model without contention) and `coupling.csv` (the exponent of the contention term's
coupling, fitted to half of the records and judged on the others) and `worst_case.csv` (who has the busiest port, when)
beside this file.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from astra import astra_rows
from booksim import VARIANTS, booksim_rows, predict, router, worst_case_rows

from jaxmoe.experiment.table import Table, add_shared, earlier_table, make_tables, study_options, tables_of
from jaxmoe.files import read_table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FITTED = ("vc4_shuffle", ("moe_dispatch", "moe_combine"))  # variant and classes that the efficiency is fitted to

# The model, that without order and contention, the simulator with finite buffers, and with unbounded ones.
SIDES = ("model", "congestion", "des", "unbounded")
EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # of the internal speed-up

Row = dict[str, object]


def by_class(rows: list[Row]) -> Iterable[Row]:
    """Errors of model and simulator by reference, variant and class, and for the two MoE classes together."""
    groups = defaultdict(list)
    for row in rows:
        where = (row["reference"], row["variant"])
        groups[*where, row["class"]].append(row)
        if str(row["class"]).startswith("moe_"):
            groups[*where, "moe (both)"].append(row)
    for (reference, variant, cls), members in groups.items():
        row = {"reference": reference, "variant": variant, "class": cls, "records": len(members)}
        for side in SIDES:
            row |= {f"{side}_{name}": value for name, value in errors(members, side).items()}
        yield row


def errors(rows: list[Row], side: str) -> dict[str, str]:
    """R2 without any fit, mean, 95th percentile and largest absolute error, and bias, in percent."""
    if any(row.get(side, "") == "" for row in rows):
        names = ("r2", "mean_error_percent", "p95_error_percent", "largest_error_percent", "bias_percent")
        return dict.fromkeys(names, "")
    measured, told = (np.array([float(row[key]) for row in rows]) for key in ("measured", side))
    relative, spread = 100 * (told / measured - 1), ((measured - measured.mean()) ** 2).sum()
    return {
        "r2": f"{1 - ((told - measured) ** 2).sum() / spread:.4f}" if spread > 0 else "",
        "mean_error_percent": f"{np.abs(relative).mean():.3f}",
        "p95_error_percent": f"{np.percentile(np.abs(relative), 95):.3f}",
        "largest_error_percent": f"{np.abs(relative).max():.3f}",
        "bias_percent": f"{relative.mean():.3f}",
    }


def efficiency_rows(rows: list[Row]) -> Iterable[Row]:
    """Errors of the model for BookSim's base router, with efficiency 1 and with the value that fits MoE traffic.

    The load part of the time is divided by the efficiency; the delay of the longest path is not.
    """
    variant, classes = FITTED
    base = [row for row in rows if row["variant"] == variant]
    fitted = fit_efficiency([row for row in base if row["class"] in classes])
    for efficiency in (1.0, fitted):
        for cls in dict.fromkeys(str(row["class"]) for row in base):
            members = [row | {"told": at_efficiency(row, efficiency)} for row in base if row["class"] == cls]
            yield {"efficiency": f"{efficiency:.3f}", "class": cls, "records": len(members)} | errors(members, "told")


def fit_efficiency(rows: list[Row]) -> float:
    """The efficiency of the least mean absolute error, to three digits."""
    candidates = np.arange(0.7, 1.0005, 0.001)
    measured = np.array([float(row["measured"]) for row in rows])
    told = np.array([[at_efficiency(row, efficiency) for row in rows] for efficiency in candidates])
    return float(candidates[np.abs(told / measured - 1).mean(axis=1).argmin()])


def at_efficiency(row: Row, efficiency: float) -> float:
    """The model's time with another efficiency."""
    return float(row["model_load"]) / efficiency + float(row["congestion"]) - float(row["model_load"])


def coupling_rows(folder: Path) -> Iterable[Row]:
    """Mean errors of the model for the MoE records of speed-up 2, by the exponent of its coupling.

    One random half of the records is fitted to, the other is not.
    """
    variant = next(variant for variant in VARIANTS if variant.name == "vc4s2_shuffle")
    records = [r for r in json.loads((folder / "index.json").read_text()) if str(r["cls"]).startswith("moe_")]
    fitted = np.random.default_rng(0).permutation(len(records)) % 2 == 0
    error = {exponent: np.zeros(len(records)) for exponent in EXPONENTS}
    shapes = [(record["rows"], record["cols"]) for record in records]
    with np.load(folder / "matrices.npz") as matrices:
        for shape in dict.fromkeys(shapes):
            members = [number for number, of in enumerate(shapes) if of == shape]
            topology, model, _ = router(variant, shape)
            traffic = jnp.asarray(np.stack([matrices[records[number]["id"]] for number in members]), jnp.float32)
            measured = np.array([np.mean(records[number]["completion"][variant.name]) for number in members])
            for exponent in EXPONENTS:
                known = eqx.tree_at(lambda m: m.exponent, model, jnp.asarray(exponent))
                error[exponent][members] = 100 * np.abs(predict(known, topology, traffic)[0] / measured - 1)
    for exponent, percent in error.items():
        halves = {"fitted_half_percent": percent[fitted].mean(), "other_half_percent": percent[~fitted].mean()}
        yield {"exponent": exponent, "records": len(records)} | {key: f"{half:.3f}" for key, half in halves.items()}


def records(reference: Path, name: str) -> list[Row]:
    """Every record of an outside simulator."""
    return [*(booksim_rows(reference / "booksim2_mesh") if name == "booksim2" else astra_rows(reference))]


def main() -> None:
    """Evaluate all records, or those of one reference, and write the tables."""
    parser = study_options(__doc__)
    add_shared(parser, ROOT.parent / "shared", "reference")
    given = parser.parse_args()
    reference = given.shared / "reference"
    mesh = reference / "booksim2_mesh"

    def of_records(rows: Callable[[list[Row]], Iterable[Row]]) -> Callable[[], Iterable[Row]]:
        return lambda: rows(read_table(earlier_table(HERE, given, "records")))

    known = Table("records", partial(records, reference), [("booksim2",), ("astra",)], ("reference",))
    derived = {"by_class": of_records(by_class), "efficiency": of_records(efficiency_rows)}
    derived |= {"coupling": lambda: coupling_rows(mesh), "worst_case": lambda: worst_case_rows(mesh)}
    make_tables(HERE, [known, *tables_of(derived)], given)


if __name__ == "__main__":
    main()
