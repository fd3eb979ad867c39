"""Model and event simulator against trusted outside simulators, on every reference record; see README.md.

Writes `records.csv` (every record), `by_class.csv` (errors by class of traffic) and `efficiency.csv` (the
efficiency that fits BookSim's base router) beside this file.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from astra import astra_rows
from booksim import booksim_rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FITTED = ("vc4_shuffle", ("moe_dispatch", "moe_combine"))  # variant and classes that the efficiency is fitted to

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
        for side in ("model", "des"):
            row |= {f"{side}_{name}": value for name, value in errors(members, side).items()}
        yield row


def errors(rows: list[Row], side: str) -> dict[str, str]:
    """R2 without any fit, mean and largest absolute error, and bias, in percent."""
    measured, told = (np.array([float(row[key]) for row in rows]) for key in ("measured", side))
    if np.isnan(told).any():
        return dict.fromkeys(("r2", "mean_error_percent", "largest_error_percent", "bias_percent"), "")
    relative, spread = 100 * (told / measured - 1), ((measured - measured.mean()) ** 2).sum()
    return {
        "r2": f"{1 - ((told - measured) ** 2).sum() / spread:.4f}" if spread > 0 else "",
        "mean_error_percent": f"{np.abs(relative).mean():.3f}",
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
    return float(row["model_load"]) / efficiency + float(row["model"]) - float(row["model_load"])


def write_table(name: str, rows: Iterable[Row]) -> None:
    """Write a CSV beside this file, aside first."""
    rows = list(rows)
    aside = HERE / f"{name}.csv.part"
    with aside.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    aside.replace(HERE / f"{name}.csv")


def main() -> None:
    """Evaluate all records and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of reference/")
    reference = parser.parse_args().shared.resolve() / "reference"
    if not reference.is_dir():
        sys.exit(f"{reference}: no such folder; give the folder of the reference results with --shared")
    rows = [*booksim_rows(reference / "booksim2_mesh"), *astra_rows(reference)]
    write_table("records", rows)
    write_table("by_class", by_class(rows))
    write_table("efficiency", efficiency_rows(rows))
    for name in ("by_class", "efficiency"):
        print(f"\n{name}.csv\n" + (HERE / f"{name}.csv").read_text())


if __name__ == "__main__":
    main()
