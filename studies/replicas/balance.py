"""`balanced_slots` against what is recorded of EPLB, FlashLB and vllm-ascend's other policies, in all cases.

python studies/replicas/balance.py --jobs 2 --resume      writes balance.csv and tells

All figures are means over layers of the busiest rank's load over the mean, under equal split. `ours` is made with the
budget that ships and has no expert twice on a rank, as the policies of vllm-ascend have none; `fast_repeats` is the
fast mode, with repeats as EPLB may have them. `bound` is what no placement of so many slots can go below: the best of
all ways to give groups to nodes, and what a heavy expert leaves to one rank at least.

Takes three minutes of one core.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options
from jaxmoe.placement.slots import loads_of_slots, max_over_mean
from jaxmoe.tune.replicas import balanced_slots

HERE = Path(__file__).resolve().parent
EXAMPLES = ("readme_example", "greedy_trap")
POLICIES = ("flashlb", "ascend_default", "ascend_swift")
BETTER = 1e-6  # relative: less counts as equal
Configuration = tuple[int, int, int, int]  # slots, groups, nodes, ranks


def configurations(reference: Path) -> list[tuple[str, str]]:
    """Cases and configurations with an answer of EPLB."""
    found = []
    for path in sorted(reference.glob("eplb_*.npz")):
        case = path.stem.removeprefix("eplb_")
        if case in EXAMPLES:
            continue
        with np.load(path) as file:
            rows = [tuple(row) for row in file["configs"].tolist()]
        found += [(case, "_".join(map(str, row))) for row in rows]
    return sorted(found)


def recorded(reference: Path, case: str, configuration: Configuration) -> tuple[np.ndarray, dict[str, float]]:
    """EPLB's balance of every layer, and the mean of every other policy that has an answer."""
    name = "_".join(map(str, configuration))
    with np.load(reference / f"eplb_{case}.npz") as file:
        eplb = file["max_over_mean"][file["configs"].tolist().index(list(configuration))]
    policies, path = {}, reference / f"policies_{case}.npz"
    if path.is_file():
        with np.load(path) as file:
            for policy in POLICIES:
                if f"max_over_mean_{policy}_{name}" in file.files:
                    policies[policy] = float(file[f"max_over_mean_{policy}_{name}"].mean())
    return eplb, policies


def bounds(weight: np.ndarray, configuration: Configuration) -> np.ndarray:
    """What the busiest rank of every layer has over the mean at least."""
    slots, groups, nodes, ranks = configuration
    if groups % nodes:
        groups = nodes = 1
    own, size = ranks // nodes, weight.shape[1] // groups
    grouped = weight.reshape(len(weight), groups, size)
    total, heaviest = grouped.sum(axis=2), grouped.max(axis=2)
    most = min(own, slots // nodes - size * groups // nodes + 1)  # ranks that an expert is spread over
    best = np.full(len(weight), np.inf)
    for packing in packings(list(range(groups)), groups // nodes):
        busiest = [np.maximum(total[:, p].sum(axis=1) / own, heaviest[:, p].max(axis=1) / most) for p in packing]
        best = np.minimum(best, np.max(busiest, axis=0))
    return best / (weight.sum(axis=1) / ranks)


def packings(groups: list[int], size: int) -> Iterator[list[list[int]]]:
    """All ways to give groups to alike nodes, so many to each."""
    if not groups:
        yield []
        return
    for others in combinations(groups[1:], size - 1):
        rest = [group for group in groups[1:] if group not in others]
        yield from ([[groups[0], *others], *more] for more in packings(rest, size))


def measured(reference: Path, case: str, name: str) -> list[dict[str, object]]:
    """The row of a case and configuration."""
    slots, groups, nodes, ranks = configuration = tuple(map(int, name.split("_")))
    with np.load(reference / f"eplb_{case}.npz") as file:
        weight = file["weight"].astype(float)
    eplb, policies = recorded(reference, case, configuration)
    begun = time.process_time()
    ours, alike = (
        max_over_mean(
            loads_of_slots(balanced_slots(weight, slots, ranks, groups, nodes, repeats=fast, fast=fast), weight, ranks)
        )
        for fast in (False, True)
    )
    means = {"bound": bounds(weight, configuration), "ours": ours, "fast_repeats": alike, "eplb": eplb}
    return [
        {"case": case, "configuration": name, "layers": len(weight)}
        | {name: f"{values.mean():.6f}" for name, values in means.items()}
        | {name: f"{policies[name]:.6f}" if name in policies else "" for name in POLICIES}
        | {
            "layers_where_fast_is_worse_than_eplb": int((alike > eplb * (1 + BETTER)).sum()),
            "processor_s": f"{time.process_time() - begun:.2f}",
        }
    ]


def told(rows: list[dict[str, str]], of: int) -> None:
    """What README.md says of the table."""
    layers = sum(int(row["layers"]) for row in rows)
    worse = sum(int(row["layers_where_fast_is_worse_than_eplb"]) for row in rows)
    print(f"{len(rows)} of {of} configurations; fast with repeats is worse than EPLB in {worse} of")
    print(f"{layers} layers")
    for other in ("eplb", *POLICIES):
        members = [row for row in rows if row[other]]
        mine, theirs, least = (np.array([float(row[key]) for row in members]) for key in ("ours", other, "bound"))
        better, losing = mine < theirs * (1 - BETTER), mine > theirs * (1 + BETTER)
        print(f"against {other}: {len(members)} configurations, better in {better.sum()}, worse in {losing.sum()};")
        print(f"  mean {mine.mean():.4f} against {theirs.mean():.4f}, bound {least.mean():.4f}")
        for row in np.array(members)[losing]:
            print("  worse:", row["case"], row["configuration"], row["ours"], row[other])
    members = [row for row in rows if row["configuration"].split("_")[1] != "1"]
    for name in ("ours", "eplb") if members else ():
        over = np.array([float(row[name]) / float(row["bound"]) - 1 for row in members])
        print(f"{len(members)} with groups, {name}: {over.mean():.2%} above the bound, {over.max():.2%} at most")


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "reference")
    given = parser.parse_args()
    reference = given.shared / "reference" / "eplb"
    cases = configurations(reference)
    table = Table("balance", partial(measured, reference), cases, ("case", "configuration"))
    for rows in make_tables(HERE, [table], given).values():
        told(rows, len(cases))
