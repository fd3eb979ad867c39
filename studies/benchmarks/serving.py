"""Seconds that serving requests over time takes; see README.md.

Runs are timed after one that compiles, in seconds of a core, so that other work on the machine counts less. The step
table is made up, of the shape and size that those of kernels have. Commands are timed whole, with what JAX compiles in
them; what Numba compiles is kept from before.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import yaml

from jaxmoe.experiment.table import Row, add_shared, make_tables, study_options, tables_of
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.recorded import read_requests
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable, Term

HERE = Path(__file__).resolve().parent
TRACE = "measured/arrivals/mooncake_conversation.jsonl"
ROUNDS, MANY, ENGINES = 5, 1_000_000, 8
SCENARIO = "served/qwen3-30b-a3b_h200_prefixes"
AXES = {  # 256 configurations
    "serving.engine.seats": [64, 128, 256, 512],
    "serving.engine.token_budget": [2048, 4096, 8192, 16384],
    "serving.engine.cache_tokens": [200_000, 300_000, 400_000, 500_000],
    "serving.router": ["round_robin", "least_loaded"],
    "serving.arrivals.rate_per_s": [3, 4],
}
DRAWN = (
    f"serving.arrivals={{kind: random, rate_per_s: 60, requests: {MANY}}}",
    "serving.lengths={prompt_tokens: 512, output_tokens: 50}",
    f"serving.engines={ENGINES}",
)
ENGINE = Engine(token_budget=8192, seats=256, kv_blocks=30_000, prefix_cache=True)


def step_table() -> StepTable:
    tokens, contexts = np.array([0, 64, 256, 1024, 4096, 16384.0]), np.array([0, 1024, 8192, 32768, 131072.0])
    return StepTable(
        (
            Term("layers", ("tokens",), (tokens,), 5e-3 + 2e-5 * tokens),
            Term("prefill", ("prefill", "prefill_context"), (tokens, contexts), 5e-10 * np.outer(tokens, contexts)),
            Term("decode", ("decoding", "context"), (tokens, contexts), 2e-8 * np.outer(tokens, contexts)),
            Term("head", ("sequences",), (tokens,), 1e-6 * tokens),
            Term("exchange", ("all_tokens",), (tokens,), 1e-3 + 1e-6 * tokens, "group"),
        )
    )


def drawn() -> Requests:
    rng = np.random.default_rng(0)
    prompts, outputs, texts = rng.integers(1, 4000, MANY), rng.integers(1, 200, MANY), rng.integers(0, 1000, MANY)
    return Requests(np.cumsum(rng.exponential(0.02, MANY)), prompts, outputs, np.arange(MANY + 1), texts)


def seconds(requests: Requests) -> float:
    """Seconds of a core for one run, which is the only one of its thread."""
    start = time.thread_time()
    serve(requests, Fleet(ENGINE, engines=ENGINES), step_table())
    return time.thread_time() - start


def row(name: str, requests: int, core_s: float, peak: float | None = None, wall_s: float | None = None) -> Row:
    """A row; peak memory is in KiB, and that of this process if it is not given."""
    known = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak
    told = {"requests": name, "number": requests, "core_s": f"{core_s:.2f}", "peak_GiB": f"{known / 2**20:.2f}"}
    return told | {"wall_s": None if wall_s is None else f"{wall_s:.1f}"}


def command(*given: str) -> tuple[float, float, float]:
    """Seconds of cores, peak memory in KiB, and seconds by the clock of a command of jaxmoe."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "jaxmoe", *given, "--quiet"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"jaxmoe {' '.join(given)} has failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss, time.perf_counter() - start


def configurations(folder: Path, trace: Path, name: str, axes: dict[str, list[object]]) -> tuple[float, float, float]:
    """What a sweep over configurations of engines that serve a file takes."""
    arrivals = {"kind": "file", "path": str(trace.absolute()), "rate_per_s": 3}
    fixed = {"serving": {"arrivals": arrivals, "engines": ENGINES}}
    study = folder / f"{name}.yaml"
    study.write_text(yaml.safe_dump({"name": name, "scenario": SCENARIO, "set": fixed, "axes": axes}))
    return command("sweep", str(study), "--out", str(folder / name))


def rows(shared: Path) -> Iterator[Row]:
    recorded = read_requests(shared / TRACE)
    with TemporaryDirectory() as place:
        folder = Path(place)
        configurations(folder, shared / TRACE, "one", {"serving.router": ["round_robin"]})  # compiles
        yield row(
            "Mooncake's, 256 configurations", 256 * len(recorded), *configurations(folder, shared / TRACE, "all", AXES)
        )
        changes = [each for key in DRAWN for each in ("--set", key)]
        used = command("serve", "rates", SCENARIO, "--rates", "60", *changes, "--out", str(folder / "many"))
        yield row("drawn, by jaxmoe serve rates", MANY, *used)
        used = command("serve", SCENARIO, *changes, "--out", str(folder / "whole"))
        yield row("drawn, by jaxmoe serve", MANY, *used)
    serve(recorded, Fleet(ENGINE), step_table())  # compiles
    yield row("Mooncake's", len(recorded), min(seconds(recorded) for _ in range(ROUNDS)))
    with ThreadPoolExecutor(2) as two:
        least = min(two.map(seconds, [recorded] * 2 * ROUNDS))
        yield row("Mooncake's, each of two at a time", len(recorded), least)
    many = drawn()
    yield row("drawn", len(many), seconds(many))


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "measured")
    given = parser.parse_args()
    make_tables(HERE, tables_of({"serving": lambda: rows(given.shared)}, timed=["serving"]), given)
