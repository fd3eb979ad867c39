"""What sweeps survive, and how right their answers are: all in one table, `robust.csv`; see README.md.

    python studies/dse/robust.py --work FOLDER                     # about 12 minutes of one core
    python studies/dse/robust.py --work FOLDER --only kills disk   # parts of it; rows of the others stay

Kills, a full disk, several devices and a cluster that loses a node are held against one sweep without any of them, row
for row. Slopes, explanations and pages are those of `robust_answers.py`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from pyarrow import dataset
from robust_answers import Row, explanations, pages, row, slopes

from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.sweep import Study, read_study, run, run_sweep
from jaxmoe.sweep.cluster import Cluster
from jaxmoe.sweep.evaluation import MOST, SweepEvaluator

HERE = Path(__file__).resolve().parent
DRAWS, STRATEGIES = 8192, ["tp_both_ways", "ep_balanced", "ep_random", "hybrid"]
POINTS = DRAWS * len(STRATEGIES)
KILLS, SEED = 5, 0
SAME = 1e-6  # two runs of one point differ by no more, relatively
DEVICES = (2, 8)
NODES = 3
ROOM, MORE_ROOM = "4m", "64m"  # of the disk that fills up, less than all results, and of the one that does not


def study() -> Study:
    """16 chunks of the usual size: 8,192 machines of `mesh_machines.yaml` under four strategies."""
    read = read_study(HERE / "mesh_machines.yaml")
    update = {
        "axes": read.config.axes | {"strategy": STRATEGIES},
        "sample": read.config.sample.model_copy(update={"sobol": DRAWS}),
    }
    return Study(read.path, read.config.model_copy(update=update))


# A sweep as a process of its own.


class Chunk(NamedTuple):
    """A chunk that was evaluated: its points and what it took, s, compilation included where it was the first."""

    points: int
    seconds: float


def sweep(out: Path) -> None:
    """The study, with a line in the file LOG for every chunk as soon as it is evaluated, before it is written."""
    log = os.open(os.environ["LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    chunks = SweepEvaluator.chunks

    def logged(self: SweepEvaluator, group: Any) -> Iterator[Any]:
        start = time.perf_counter()
        for part, measured in chunks(self, group):
            os.write(log, f"{json.dumps([part.stop - part.start, time.perf_counter() - start])}\n".encode())
            yield part, measured
            start = time.perf_counter()

    SweepEvaluator.chunks = logged  # type: ignore[method-assign]
    run_sweep(study(), out, lambda done, total: None)


def evaluated(log: Path) -> list[Chunk]:
    """The chunks of a log, but for a last line that was cut short."""
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    return [Chunk(*json.loads(line)) for line in lines]


def command(out: Path) -> list[str]:
    return [sys.executable, str(HERE / "robust.py"), "--work", str(out), "--sweep"]


def settings(log: Path, **more: str) -> dict[str, str]:
    return os.environ | {"LOG": str(log), "JAX_PLATFORMS": "cpu"} | more


def swept(folder: Path, name: str, **more: str) -> tuple[Path, list[Chunk]]:
    """A folder of results that is complete, and the chunks that were evaluated for it."""
    out, log = folder / name, folder / f"{name}.log"
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(out), env=settings(log, **more), check=True)
    return out, evaluated(log)


def fresh(folder: Path, name: str) -> Path:
    """An empty folder, where one of an earlier run may lie."""
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / f"{name}.log").unlink(missing_ok=True)
    (folder / name).mkdir(parents=True)
    return folder / name


# Two folders row for row.


def compared(part: str, whole: Path, other: Path) -> list[Row]:
    """Rows of the table: what `other` lacks of `whole` or has twice, and how far its values are off."""
    one, two = (dataset.dataset(folder / "points").to_table().sort_by("hash") for folder in (whole, other))
    hashes = [table.column("hash").to_pylist() for table in (one, two)]
    missing, twice = len({*hashes[0]} - {*hashes[1]}), len(hashes[1]) - len({*hashes[1]})
    told = [
        row(part, "rows", len(hashes[1]), POINTS),
        row(part, "rows missing", missing, 0),
        row(part, "rows twice", twice, 0),
    ]
    if hashes[0] != hashes[1]:
        return told
    worst, texts = 0.0, 0
    for name in one.column_names:
        if str(one.schema.field(name).type) != "double":
            texts += sum(a != b for a, b in zip(one[name].to_pylist(), two[name].to_pylist(), strict=True))
            continue
        first, second = (table[name].to_numpy() for table in (one, two))
        gap = np.abs(first - second) / np.where(first == 0, 1, np.abs(first))
        gap[np.isnan(first) & np.isnan(second)] = 0
        worst = max(worst, float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0)))
    return [
        *told,
        row(part, "texts that differ", texts, 0),
        row(part, "largest relative difference of a number", worst, f"<= {SAME:g}", worst <= SAME),
    ]


# The parts.


def kills(folder: Path) -> list[Row]:
    """kill -9 at moments drawn from the time in which chunks are computed, each time on what the last one left."""
    whole, chunks = swept(folder, "whole")
    each = median(chunk.seconds for chunk in chunks) if chunks else 0.0
    out, log, draw, rows, work = fresh(folder, "killed"), folder / "killed.log", random.Random(SEED), [], 0
    for kill in range(KILLS):
        before, log_before = points_there(out), len(evaluated(log))
        process = subprocess.Popen(command(out), env=settings(log))
        begun = log_before + draw.randrange(1, POINTS // MOST // KILLS)
        while process.poll() is None and len(evaluated(log)) < begun:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 2 * each))
        process.send_signal(signal.SIGKILL)
        process.wait()
        now, computed = points_there(out), evaluated(log)[log_before:]
        lost = len(computed) - chunks_of(now - before, computed)
        rows += [
            row("kills", f"chunks complete after kill {kill + 1}", len([*(out / "points").glob("*.parquet")])),
            row("kills", f"chunks evaluated and lost by kill {kill + 1}", lost, "<= 1", lost <= 1),
        ]
    _, chunks = swept(folder, "killed")
    work = sum(chunk.points for chunk in chunks)
    rows.append(row("kills", "points evaluated more than once, in all", work - POINTS))
    return rows + compared("kills", whole, out)


def points_there(out: Path) -> int:
    return dataset.dataset(out / "points").count_rows() if (out / "points").exists() else 0


def chunks_of(points: int, computed: list[Chunk]) -> int:
    """How many of the first chunks have so many points in all."""
    sums = np.cumsum([chunk.points for chunk in computed])
    return int((sums <= points).sum())


# A file system of its own, as no one else sees it; the rest of the line is the command.
FULL = f"""
mount -t tmpfs -o size={ROOM} tmpfs "$DISK" || exit 77
"$@" 2> "$OUT/first.err"; echo $? > "$OUT/first.rc"
ls -A "$DISK" > "$OUT/first.ls"; cp -r "$DISK" "$OUT/first"
mount -o remount,size={MORE_ROOM} "$DISK"
"$@" 2> "$OUT/second.err"; echo $? > "$OUT/second.rc"
cp -r "$DISK" "$OUT/second"
"""


def disk(folder: Path) -> list[Row]:
    """A tmpfs of few megabytes, then of more, as root of a user namespace."""
    whole, _ = swept(folder, "whole")
    out, log, place = fresh(folder, "disk"), folder / "disk.log", fresh(folder, "full")
    given = settings(log, DISK=str(place), OUT=str(out))
    space = ["unshare", "--map-root-user", "--mount", "sh", "-c", FULL, "sh"]
    done = subprocess.run([*space, *command(place)], env=given, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        return [row("disk", "not run", f"no tmpfs of a user's own: {done.stderr.strip()}")]
    codes = [int((out / f"{name}.rc").read_text()) for name in ("first", "second")]
    files = [*(out / "first" / "points").glob("*.parquet")]
    rows = dataset.dataset(out / "first" / "points").count_rows()
    work = sum(chunk.points for chunk in evaluated(log))
    told = (out / "first.err").read_text().strip().splitlines()[-1].replace(str(place), "DIR")
    aside = ".part" in (out / "first.ls").read_text()
    return [
        row("disk", "exit code with the disk full", codes[0], "not 0", codes[0] != 0),
        row("disk", "what it says", told),
        row("disk", "chunks complete with the disk full", len(files)),
        row("disk", "rows in them", rows),
        row("disk", "files left half written", int(aside), 0),
        row("disk", "exit code with more room", codes[1], 0),
        row("disk", "points evaluated more than once, in all", work - POINTS),
        *compared("disk", whole, out / "second"),
    ]


def devices(folder: Path) -> list[Row]:
    """The same sweep over several virtual devices of this machine's cores, and what chunks take without compilation."""
    rows, rates = [], {}
    for count in (1, *DEVICES):
        name = f"devices_{count}"
        fresh(folder, name)
        out, chunks = swept(folder, name, XLA_FLAGS=f"--xla_force_host_platform_device_count={count}")
        rates[count] = 1 / median(chunk.seconds / chunk.points for chunk in chunks)
        rows.append(row("devices", f"points/s on {count}, without compilation and files", round(rates[count])))
        if count > 1:
            whole = folder / "devices_1"
            rows.append(row("devices", f"times as fast on {count} as on 1", round(rates[count] / rates[1], 3)))
            rows += [each | {"figure": f"{each['figure']}, {count} to 1"} for each in compared("devices", whole, out)]
    return [*rows, row("devices", "cores", os.cpu_count())]


def cluster(folder: Path) -> list[Row]:
    """Three nodes of a Ray cluster on this machine; once all have evaluated something, the second one is killed."""
    whole, _ = swept(folder, "whole")
    if find_spec("ray") is None:
        return [row("cluster", "not run", "needs ray: pip install '.[ray]'")]
    from ray.cluster_utils import Cluster as Nodes

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
    out, made, killed = fresh(folder, "cluster"), [], []
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    others = [nodes.add_node(num_cpus=1) for _ in range(NODES - 1)]
    nodes.wait_for_nodes()

    def kept(*given: Any) -> Cluster:
        made.append(Cluster(*given))
        return made[0]

    def progress(done: int, total: int) -> None:
        if made and not killed and len(made[0].chunks) == NODES:
            killed.append((made[0].chunks[others[0].node_id], done))
            nodes.remove_node(others[0], allow_graceful=False)

    run.Cluster = kept  # type: ignore[misc,assignment]
    try:
        done = run_sweep(study(), out, progress, ray=nodes.address)
    finally:
        run.Cluster = Cluster  # type: ignore[misc]
        nodes.shutdown()
    return [
        row("cluster", "nodes at the start", done.devices, NODES),
        row("cluster", "nodes killed", len(killed), 1),
        *(row("cluster", "rows when it was killed", before) for _, before in killed),
        *(row("cluster", "chunks that the killed node had evaluated", chunks) for chunks, _ in killed),
        row("cluster", "chunks in all", made[0].chunks.total()),
        *compared("cluster", whole, out),
    ]


PARTS = {
    "kills": kills,
    "disk": disk,
    "devices": devices,
    "cluster": cluster,
    "slopes": slopes,
    "explanations": explanations,
    "pages": pages,
}


def found(out: Path, name: str) -> list[Row]:
    """Rows of a part."""
    return PARTS[name](out)


if __name__ == "__main__":
    parser = study_options(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--sweep", action="store_true", help="run the sweep that the parts disturb, and nothing else")
    options = parser.parse_args()
    if options.sweep:
        sweep(options.work.absolute())
    else:
        rows = partial(found, options.work.absolute())
        make_tables(HERE, [Table("robust", rows, [(name,) for name in PARTS], ("part",), digits=3)], options)
