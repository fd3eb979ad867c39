"""Loads that change: slots fitted on the first half of the recorded windows, judged on the other, beside FlashLB's.

python studies/replicas/changing.py        writes changing.csv

Figures are max over mean of ranks, mean over windows and layers; `next` is of the half that no placement was made for.
Ours has no expert twice on a rank, as FlashLB has none.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from jaxmoe.experiment.table import add_shared, make_tables, study_options, tables_of
from jaxmoe.placement.slots import loads_of_slots, max_over_mean
from jaxmoe.tune.replica_windows import steady_slots

HERE = Path(__file__).resolve().parent
SEEDS = 3


def balance(slots: np.ndarray, windows: np.ndarray, ranks: int) -> float:
    return float(np.mean([max_over_mean(loads_of_slots(slots, window, ranks)) for window in windows]))


def changing(reference: Path) -> Iterator[dict[str, object]]:
    answers: dict[tuple[str, int, int], dict[str, float]] = {}
    for record in json.loads((reference / "index_stages.json").read_text()):
        key = record["file"], record["num_replicas"], record["num_gpus"]
        answers.setdefault(key, {})[record["policy"]] = record["next_mean"]
    for (file, slots, ranks), theirs in answers.items():
        with np.load(reference / file) as recorded:
            windows = recorded["weight"].astype(float)
        half = len(windows) // 2
        found = [steady_slots(windows[:half], slots, ranks, seed=seed) for seed in range(SEEDS)]
        known, later = ([balance(each, part, ranks) for each in found] for part in (windows[:half], windows[half:]))
        yield (
            {"case": Path(file).stem.removeprefix("stages_"), "slots": slots, "ranks": ranks}
            | {"known": f"{known[0]:.4f}", "next": f"{later[0]:.4f}"}
            | {"next_of_other_seeds": " ".join(f"{each:.4f}" for each in later[1:])}
            | {f"next_{policy}": f"{theirs[policy]:.4f}" for policy in ("flashlb", "eplb")}
        )


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "reference")
    given = parser.parse_args()
    make_tables(HERE, tables_of({"changing": partial(changing, given.shared / "reference" / "eplb")}), given)
