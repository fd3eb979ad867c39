"""How long it takes to place copies for 58 layers of 256 experts, beside a NumPy port of EPLB in the same run.

python studies/replicas/speed.py        writes speed.csv

Milliseconds by the clock and of processors, the least of 31 turns of all in turn (refined: of 3), compiled before.
`fast` is the fast mode with repeats on a rank as EPLB may have them, `fast_legal` without, `refined` what
`balanced_slots` does by itself, without repeats. Run it while nothing else runs: two processors share the work of ours.

Takes half a minute of one core.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from jaxmoe.experiment.table import add_shared, make_tables, study_options, tables_of
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.slots import loads_of_slots, max_over_mean
from jaxmoe.tune.replicas import balanced_slots

HERE = Path(__file__).resolve().parent
CASE = "reference/eplb/eplb_zipf0.8_58x256_seed0.npz"
CONFIGURATIONS = ((288, 1, 1, 32), (288, 8, 4, 32), (320, 1, 1, 64), (512, 1, 1, 256))  # slots, groups, nodes, ranks
TURNS, REFINED_TURNS = 31, 3


def methods(loads: np.ndarray, configuration: tuple[int, int, int, int]) -> dict[str, Callable[[], np.ndarray]]:
    """What places slots, by name."""
    slots, groups, nodes, ranks = configuration
    return {
        "eplb": partial(eplb, loads, slots, ranks, groups, nodes),
        "fast": partial(balanced_slots, loads, slots, ranks, groups, nodes, repeats=True, fast=True),
        "fast_legal": partial(balanced_slots, loads, slots, ranks, groups, nodes, fast=True),
        "refined": partial(balanced_slots, loads, slots, ranks, groups, nodes),
    }


def timed(place: Callable[[], np.ndarray]) -> tuple[float, float]:
    """Seconds by the clock, and of all processors together."""
    clock, processor = time.perf_counter(), time.process_time()
    place()
    return time.perf_counter() - clock, time.process_time() - processor


def speed(shared: Path) -> Iterator[dict[str, object]]:
    with np.load(shared / CASE) as file:
        loads = file["weight"].astype(float)
    for configuration in CONFIGURATIONS:
        named = methods(loads, configuration)
        placed = {name: place() for name, place in named.items()}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
        for turn in range(TURNS):
            for name, place in named.items():
                if name != "refined" or turn < REFINED_TURNS:
                    taken[name].append(timed(place))
        for name, slots in placed.items():
            busy = max_over_mean(loads_of_slots(slots, loads, configuration[3]))
            yield (
                {
                    "configuration": "_".join(map(str, configuration)),
                    "method": name,
                    "milliseconds": f"{min(clock for clock, _ in taken[name]) * 1e3:.1f}",
                    "processor_milliseconds": f"{min(processor for _, processor in taken[name]) * 1e3:.1f}",
                    "max_over_mean": f"{busy.mean():.5f}",
                }
            )


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "reference")
    given = parser.parse_args()
    make_tables(HERE, tables_of({"speed": partial(speed, given.shared)}, timed=["speed"]), given)
