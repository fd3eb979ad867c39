"""How time and memory grow with nodes, experts and tokens; see README.md.

    python studies/benchmarks/growth.py

One size is varied at a time; the others stay at 64 nodes, 64 experts of which tokens choose four, and 128 tokens. Every
size has a process of its own, so that its peak memory is its own. Time is of a processor, by evaluation: exact, relaxed
with its gradient by all shares, and exact where homes and trees are chosen by congestion. The whole command evaluates a
layer of a small model under all exchanges on 64 batches, cold. Three minutes of a core.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
from throughput import Size, compiled, forward, layer_model, machine, one_batch, random_plans, with_gradient

from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.network import build_exchange

HERE = Path(__file__).resolve().parent
USUAL = Size((8, 8), 64, 4, 128, 1)
MESHES = ((4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
EXPERTS = (8, 16, 32, 64, 128, 256, 512)
TOKENS = (32, 128, 512, 2048, 8192, 32768)
SIZES = {
    "nodes": {rows * columns: replace(USUAL, shape=(rows, columns)) for rows, columns in MESHES},
    "experts": {count: replace(USUAL, experts=count) for count in EXPERTS},
    "tokens": {count: replace(USUAL, tokens=count) for count in TOKENS},
}
LEAST_S = 0.5  # of a timing
CACHE = "JAX_COMPILATION_CACHE_DIR"  # what it keeps is left out: nothing is compiled before


def seconds_of(run: Callable[[], object]) -> float:
    """Processor seconds of a call that is warmed up, the best of three means."""
    best = float("inf")
    for _ in range(3):
        begun, count = time.process_time(), 0
        while time.process_time() - begun < LEAST_S / 3:
            jax.block_until_ready(run())
            count += 1
        best = min(best, (time.process_time() - begun) / count)
    return best


def peak_memory() -> float:
    """The most memory that this process has had, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measured(axis: str, value: int) -> dict[str, object]:
    """Time and memory of one size, in this process."""
    size = SIZES[axis][value]
    model, batch, shares = layer_model(size), one_batch(size), jnp.asarray(random_plans(size, 1))
    congested = replace(model, exchange=build_exchange("least_congested", model.machine.topology))
    before, row = peak_memory(), dict[str, object]()
    evaluations = {"exact": (forward, model), "gradient": (with_gradient, model), "congested": (forward, congested)}
    for name, (function, timed) in evaluations.items():
        run, _ = compiled(function, timed, shares, batch)
        row[f"{name}_us"] = f"{1e6 * seconds_of(run):.1f}"
    return row | {"evaluation_GiB": f"{peak_memory() - before:.3f}"}


def alone(*command: str) -> tuple[str, resource.struct_rusage]:
    """What a command prints in a process of its own that finds nothing compiled, and what it used."""
    kept = {key: value for key, value in os.environ.items() if key != CACHE}
    process = subprocess.Popen([sys.executable, *command], env=kept, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return told, used


def whole_command(shape: tuple[int, int]) -> dict[str, object]:
    """Processor seconds and memory of `jaxmoe evaluate` for a layer of a small model on a mesh, cold."""
    with TemporaryDirectory() as folder:
        mesh = f"hardware.mesh_shape=[{shape[0]},{shape[1]}]"
        given = ["evaluate", "quickstart", "--layers", "0", "--set", mesh, "--out", folder, "--quiet"]
        _, used = alone("-m", "jaxmoe", *given)
    return {
        "command_core_s": f"{used.ru_utime + used.ru_stime:.1f}",
        "command_GiB": f"{used.ru_maxrss / 2**20:.2f}",
    }


def rows(axis: str, value: int) -> Iterator[dict[str, object]]:
    told, _ = alone(__file__, "--measure", axis, str(value))
    command = whole_command(SIZES[axis][value].shape) if axis == "nodes" else {"command_core_s": "", "command_GiB": ""}
    yield {"axis": axis, "value": value} | json.loads(told) | command | {"machine": machine()}


if __name__ == "__main__":
    if "--measure" in sys.argv:
        print(json.dumps(measured(sys.argv[-2], int(sys.argv[-1]))))
        sys.exit()
    cases = [(axis, value) for axis, sizes in SIZES.items() for value in sizes]
    table = Table("growth", rows, cases, key=("axis", "value"), timed=True)
    make_tables(HERE, [table], study_options(__doc__, resume=True).parse_args())
