"""Are hidden numbers of a machine found again in measurements that the event simulator makes? See README.md.

    python studies/calibration/study.py --work runs/calibration                     # half a minute
    python studies/calibration/study.py --work runs/calibration --seeds 5 6 7 8 9   # of other seeds

Writes the measurements as CSV files of `jaxmoe calibrate`, fits them from a description that is wrong by a factor of
0.4 to 2.5 in every number, and prints what was found.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxmoe.config import build_topology, load_hardware, number_at, with_numbers
from jaxmoe.des import fabric_of, replay_traffic
from jaxmoe.experiment.calibration import calibrate
from jaxmoe.experiment.measurements import read_measured
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table

HERE = Path(__file__).resolve().parent
TRUE = HERE / "machine.yaml"  # the machine whose numbers are hidden
WRONG = (0.4, 2.5)  # by what the description is off
NOISE, SEEDS = 0.03, (0, 1, 2, 3, 4)
SAMPLES = {"gemm": 150, "memory": 100, "ping": 150, "all_to_all": 30}
KEYS = (
    "die.compute_TFLOPs_per_s",
    "die.gemm.startup_ns",
    "memory.hbm.bandwidth_GB_per_s",
    "memory.hbm.latency_ns",
    "link.bandwidth_GB_per_s",
    "link.latency_ns",
)


def measurements(rng: np.random.Generator) -> dict[str, tuple[list[str], list[list]]]:
    """Header and lines of every file, with noise. Messages are the simulator's, products and reads counted by hand."""
    true = load_hardware(TRUE)
    at = {key: number_at(true, key) for key in KEYS}
    fabric = fabric_of(build_topology(true), float(true.router.chunk_B), true.router.switching == "cut_through")
    nodes = true.num_nodes

    def noisy(seconds: float) -> float:
        return seconds * (1 + NOISE * rng.standard_normal())

    def product(tokens: int, hidden: int, columns: int) -> float:
        gemm = true.die.gemm
        tiles = -(-tokens // gemm.tile_tokens) * gemm.tile_tokens * -(-columns // gemm.tile_columns) * gemm.tile_columns
        return 2 * tiles * hidden / (1e12 * at[KEYS[0]]) + 1e-9 * at[KEYS[1]]

    def message(source: int, destination: int, size: float) -> float:
        traffic = np.zeros((nodes, nodes))
        traffic[source, destination] = size
        return replay_traffic(fabric, traffic).completion_s

    shapes = (2 ** rng.integers((0, 8, 8), (12, 13, 13), (SAMPLES["gemm"], 3))).tolist()
    reads = np.geomspace(1e3, 1e8, SAMPLES["memory"]).tolist()
    pairs = np.argwhere(~np.eye(nodes, dtype=bool))[rng.integers(0, nodes * (nodes - 1), SAMPLES["ping"])].tolist()
    sizes = np.geomspace(100, 1e7, SAMPLES["ping"]).tolist()
    parts = np.geomspace(1e4, 1e6, SAMPLES["all_to_all"]).tolist()
    rate, start = 1e9 * at[KEYS[2]], 1e-9 * at[KEYS[3]]
    return {
        "gemm": (["tokens", "hidden", "columns"], [[*shape, noisy(product(*shape))] for shape in shapes]),
        "memory": (["level", "bytes"], [["hbm", size, noisy(start + size / rate)] for size in reads]),
        "ping": (
            ["source", "destination", "bytes"],
            [[*pair, size, noisy(message(*pair, size))] for pair, size in zip(pairs, sizes, strict=True)],
        ),
        "all_to_all": (
            ["bytes"],
            [[size, noisy(replay_traffic(fabric, size * (1 - np.eye(nodes))).completion_s)] for size in parts],
        ),
    }


def write(path: Path, header: Sequence[str], lines: Sequence[Sequence]) -> None:
    """Lines of values, in the order of the header."""
    write_table(path, [dict(zip(header, line, strict=True)) for line in lines])


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the measurements")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of noise and of wrong descriptions")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        rng = np.random.default_rng(seed)
        folder = options.work / f"seed_{seed}"
        for kind, (header, lines) in measurements(rng).items():
            write(folder / f"{kind}.csv", [*header, "seconds"], lines)
        true = load_hardware(TRUE)
        wrong = {key: number_at(true, key) * np.exp(rng.uniform(*np.log(WRONG))) for key in KEYS}
        described = with_numbers(true, wrong)
        found = calibrate(described, KEYS, [read_measured(folder / f"{kind}.csv", described) for kind in SAMPLES], seed)
        held_out = found.errors(found.after, held_out=True)
        for number in found.numbers:
            hidden = number_at(true, number.key)
            values = f"{hidden:.5g}", f"{number.before:.5g}", f"{number.after:.5g}"
            errors = f"{100 * (number.after / hidden - 1):.2f}", f"{100 * number.error:.2f}"
            rows.append([seed, number.key, *values, *errors])
        worst = max(abs(float(row[5])) for row in rows if row[0] == seed)
        told = ", ".join(f"{kind} {100 * error:.2f} %" for kind, error in held_out.items())
        print(f"seed {seed}: worst number {worst:.2f} % off; held out {told}")
        print(f"  all-to-alls: {found.crowding.load:.3f} of the load, {found.crowding.path:.2f} of the path")
    columns = ["seed", "key", "hidden", "described", "fitted", "off_percent", "standard_error_percent"]
    write(folder_of_tables(HERE, options) / "calibration.csv", columns, rows)


if __name__ == "__main__":
    main()
