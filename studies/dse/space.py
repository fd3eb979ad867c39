"""100,000 mesh machines for DeepSeek-V3: which strategy wins where, and what speed costs; see README.md.

    python studies/dse/space.py --work FOLDER            # about 15 minutes on two cores; stopped, it goes on
    python studies/dse/space.py --work FOLDER --draws 1000   # a tenth of it

Every mesh and size of batch is a sweep of its own, so that memory holds no more than one and rates are known by mesh.
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from pyarrow import dataset

from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import atomic_write, write_table
from jaxmoe.placement.exchange import Rings, exchange_of
from jaxmoe.sweep import Study, Sweep, read_study, run_sweep
from jaxmoe.sweep.analysis import is_efficient

HERE = Path(__file__).resolve().parent
STUDY = HERE / "mesh_space.yaml"
MESH, TOKENS = "hardware.mesh_shape", "workload.batch_tokens"
COMPUTE, MEMORY = "hardware.die.compute_TFLOPs_per_s", "hardware.die.memory_bandwidth_GB_per_s"
BANDWIDTH, LATENCY, PORTS = (
    "hardware.link.bandwidth_GB_per_s",
    "hardware.link.latency_ns",
    "hardware.ports.injection_GB_per_s",
)
NUMBERS = (COMPUTE, MEMORY, BANDWIDTH, LATENCY, PORTS)
BINS = 8  # of a side of a map
MAPS = ((BANDWIDTH, COMPUTE), (BANDWIDTH, LATENCY), (MEMORY, COMPUTE))
TIE = 1e-5  # times as near as that are equal, and the first strategy counts
RUN = "run.json"  # how fast a part was, beside its results


def parts(study: Study, draws: int | None) -> Iterable[tuple[list[int], int, Study]]:
    """A study for every mesh and size of batch."""
    axes, sample = study.config.axes, study.config.sample
    if draws is not None:
        sample = sample.model_copy(update={"sobol": draws})
    for mesh in axes[MESH]:
        for tokens in axes[TOKENS]:
            update = {"axes": axes | {MESH: [mesh], TOKENS: [tokens]}, "sample": sample}
            yield mesh, tokens, Study(study.path, study.config.model_copy(update=update))


def compute(study: Study, folder: Path, draws: int | None) -> list[dict[str, Any]]:
    """Sweep every part that is not there yet, and tell how fast each was."""
    rates = []
    for mesh, tokens, part in parts(study, draws):
        out = folder / f"{mesh[0]}x{mesh[1]}_{tokens}"
        told = out / RUN
        wanted = part.config.sample.count
        if not told.exists() or json.loads(told.read_text())["machines"] != wanted:
            out.mkdir(parents=True, exist_ok=True)
            start = time.process_time()
            sweep = run_sweep(part, out, lambda done, total: None)
            rate = _rate(mesh, tokens, sweep, time.process_time() - start)
            with atomic_write(told) as aside:
                aside.write_text(json.dumps(rate) + "\n", encoding="utf-8")
            jax.clear_caches()
        rates.append(json.loads(told.read_text()))
        print(*(f"{key} {value}" for key, value in rates[-1].items()), sep=", ", flush=True)
    return rates


def _rate(mesh: Sequence[int], tokens: int, sweep: Sweep, cpu_s: float) -> dict[str, Any]:
    """Shape groups are points of one mesh, size of batch and form of exchange: rings are one form."""
    exchanges = {row["exchange"] for row in sweep.rows}
    forms = {"rings" if isinstance(exchange_of(name), Rings) else name for name in exchanges}
    return {
        "mesh": f"{mesh[0]}x{mesh[1]}",
        "tokens": tokens,
        "machines": len(sweep.rows) // len({row["strategy"] for row in sweep.rows}),
        "points": len(sweep.rows),
        "shape_groups": len(forms),
        "compiles": sweep.compiles,
        "setup_s": round(sweep.setup_s, 2),
        "evaluate_s": round(sweep.seconds, 2),
        "cpu_s": round(cpu_s, 2),  # of all cores: what else runs on the machine stretches the wall seconds alone
        "points_per_s": round(sweep.computed / (sweep.setup_s + sweep.seconds), 1),
    }


# What came out: arrays [machine, strategy] of one mesh and size of batch.


class Part:
    """The results of one mesh and size of batch."""

    def __init__(self, folder: Path, rate: dict[str, Any], strategies: Sequence[str]) -> None:
        self.mesh, self.tokens, self.strategies = rate["mesh"], rate["tokens"], tuple(strategies)
        points = dataset.dataset(folder / f"{self.mesh}_{self.tokens}" / "points")
        wanted = ["strategy", "exchange", "price", "total_s", "communication_share", *NUMBERS]
        table = points.to_table(columns=wanted).sort_by([("price", "ascending"), (LATENCY, "ascending")])
        by_name = [table.filter(pa.compute.equal(table["strategy"], name)) for name in self.strategies]
        self.exchange = {name: each["exchange"][0].as_py() for name, each in zip(strategies, by_name, strict=True)}
        self.total = np.stack([each["total_s"].to_numpy() for each in by_name], axis=1)
        self.communication = np.stack([each["communication_share"].to_numpy() for each in by_name], axis=1)
        self.price = by_name[0]["price"].to_numpy()
        self.numbers = {key: by_name[0][key].to_numpy() for key in NUMBERS}
        self.best = self.total.min(axis=1)
        self.winner = (self.total <= self.best[:, None] * (1 + TIE)).argmax(axis=1)

    def behind(self) -> np.ndarray:
        """How much longer the next strategy takes, [machine]; 0.1 is 10 %."""
        return np.sort(self.total, axis=1)[:, 1] / self.best - 1

    def shares(self, column: np.ndarray) -> dict[str, float]:
        """The part of some machines that every strategy wins."""
        return {name: round(float((column == at).mean()), 4) for at, name in enumerate(self.strategies)}


def winners(results: Sequence[Part]) -> list[dict[str, Any]]:
    """By mesh and size of batch: the part of machines that each strategy wins, and what choosing it is worth."""
    rows = []
    for part in results:
        chosen = np.take_along_axis(part.communication, part.winner[:, None], axis=1)
        rows.append(
            {"mesh": part.mesh, "tokens": part.tokens, "machines": len(part.best)}
            | part.shares(part.winner)
            | {
                "next_behind_median": round(float(np.median(part.behind())), 4),
                "worst_over_best_median": round(float(np.median(part.total.max(axis=1) / part.best)), 3),
                "communication_share_median": round(float(np.median(chosen)), 4),
            }
        )
    return rows


def regions(results: Sequence[Part]) -> list[dict[str, Any]]:
    """Maps over two numbers at a time, all meshes together: who wins most often in a cell, and the part it wins."""
    rows = []
    for tokens in dict.fromkeys(part.tokens for part in results):
        of_size = [part for part in results if part.tokens == tokens]
        winner = np.concatenate([part.winner for part in of_size])
        numbers = {key: np.concatenate([part.numbers[key] for part in of_size]) for key in NUMBERS}
        for across, up in MAPS:
            edges = [np.geomspace(numbers[key].min(), numbers[key].max(), BINS + 1) for key in (across, up)]
            cells = [np.searchsorted(edge[1:-1], numbers[key]) for key, edge in zip((across, up), edges, strict=True)]
            for i, j in np.ndindex(BINS, BINS):
                there = winner[(cells[0] == i) & (cells[1] == j)]
                shares = of_size[0].shares(there) if there.size else dict.fromkeys(of_size[0].strategies, 0.0)
                centres = [float(np.sqrt(edge[at] * edge[at + 1])) for edge, at in zip(edges, (i, j), strict=True)]
                most = max(shares, key=lambda name: shares[name]) if there.size else ""
                rows.append(
                    {"tokens": tokens, "across": across, "up": up, "x": f"{centres[0]:.5g}", "y": f"{centres[1]:.5g}"}
                    | {"machines": there.size, "most_often": most}
                    | shares
                )
    return rows


def fronts(results: Sequence[Part]) -> list[dict[str, Any]]:
    """By size of batch: machines, with their best strategy, that no other one beats in both price and time."""
    rows = []
    for tokens in dict.fromkeys(part.tokens for part in results):
        of_size = [part for part in results if part.tokens == tokens]
        costs = np.concatenate([np.stack([part.price, part.best], axis=1) for part in of_size])
        owner = np.repeat(np.arange(len(of_size)), [len(part.best) for part in of_size])
        place = np.concatenate([np.arange(len(part.best)) for part in of_size])
        chosen = np.flatnonzero(is_efficient(costs))
        for at in chosen[np.argsort(costs[chosen, 0])]:
            part, row = of_size[owner[at]], place[at]
            rows.append(
                {"tokens": tokens, "price": f"{part.price[row]:.6g}", "total_us": f"{part.best[row] * 1e6:.6g}"}
                | {"mesh": part.mesh, "strategy": part.strategies[part.winner[row]]}
                | {key.rpartition(".")[2]: f"{part.numbers[key][row]:.5g}" for key in NUMBERS}
            )
    return rows


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the results of all points")
    parser.add_argument("--draws", type=int, help="machines of each mesh, 10,000 unless said")
    options = parser.parse_args()
    study = read_study(STUDY)
    start = time.perf_counter()
    rates = compute(study, options.work, options.draws)
    results = [Part(options.work, rate, study.config.axes["strategy"]) for rate in rates]
    for name, rows in (
        ("space_rates", rates),
        ("space_winners", winners(results)),
        ("space_regions", regions(results)),
        ("space_fronts", fronts(results)),
    ):
        write_table(folder_of_tables(HERE, options) / f"{name}.csv", rows)
    sums = {key: sum(rate[key] for rate in rates) for key in ("points", "shape_groups", "compiles")}
    seconds = sum(rate["setup_s"] + rate["evaluate_s"] for rate in rates)
    machines = sum(rate["machines"] for rate in rates) // len(study.config.axes[TOKENS])
    print(f"{machines} machines, {sums['points']} points in {seconds:.0f} s: {sums['points'] / seconds:.0f} points/s")
    print(f"{sums['compiles']} compilations for {sums['shape_groups']} shape groups")
    print(f"this run, tables and all: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
