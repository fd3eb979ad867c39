"""`balanced_slots` with the budget that ships, against FlashLB's recorded answers in every configuration.

python studies/replicas/flashlb.py --part 0 --of 8      writes flashlb_0_of_8.csv
python studies/replicas/flashlb.py --merge              writes flashlb.csv of all parts that are there, and tells
"""

import argparse
import csv
import time
from pathlib import Path

import numpy as np

from jaxmoe.placement.slots import loads_of_slots, max_over_mean
from jaxmoe.tune.replicas import balanced_slots

HERE = Path(__file__).parent
REFERENCE = Path("../shared/reference/eplb")
BETTER = 1e-6  # relative: less counts as equal


def configurations() -> list[tuple[Path, str]]:
    """Files and configurations with an answer of FlashLB, largest files last."""
    found = []
    for path in sorted(REFERENCE.glob("policies_*.npz")):
        with np.load(path) as file:
            found += [
                (path, name.removeprefix("max_over_mean_flashlb_"))
                for name in file.files
                if name.startswith("max_over_mean_flashlb_")
            ]
    return found


def run(part: int, of: int) -> None:
    rows = []
    for path, configuration in configurations()[part::of]:
        case = path.stem.removeprefix("policies_")
        weight = np.load(REFERENCE / f"eplb_{case}.npz")["weight"]
        with np.load(path) as file:
            recorded = float(file[f"max_over_mean_flashlb_{configuration}"].mean())
        slots, groups, nodes, ranks = (int(number) for number in configuration.split("_"))
        begun = time.process_time()
        held = balanced_slots(weight, slots, ranks, groups, nodes, repeats=True)
        ours = float(max_over_mean(loads_of_slots(held, weight, ranks)).mean())
        rows.append([case, configuration, f"{ours:.6f}", f"{recorded:.6f}", f"{time.process_time() - begun:.2f}"])
        print(*rows[-1], flush=True)
    with (HERE / f"flashlb_{part}_of_{of}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [["case", "configuration", "ours", "flashlb", "processor_s"], *rows]
        )


def merge() -> None:
    parts = sorted(HERE.glob("flashlb_*_of_*.csv"))
    tables = [list(csv.reader(path.open())) for path in parts]
    rows = sorted(row for table in tables for row in table[1:])
    with (HERE / "flashlb.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([tables[0][0], *rows])
    ours, flashlb = np.array([[float(row[2]), float(row[3])] for row in rows]).T
    worse = ours > flashlb * (1 + BETTER)
    print(f"{len(rows)} of {len(configurations())} configurations: better in {(ours < flashlb * (1 - BETTER)).sum()}, ")
    print(f"worse in {worse.sum()}; mean {ours.mean():.4f} against {flashlb.mean():.4f}")
    for row in np.array(rows)[worse]:
        print("worse:", *row)
    for path in parts:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--merge", action="store_true")
    given = parser.parse_args()
    if given.merge:
        merge()
    else:
        run(given.part, given.of)


if __name__ == "__main__":
    main()
