"""Seconds that serving requests over time takes; see README.md.

Runs are timed after one that compiles, in seconds of a core, so that other work on the machine counts less. The step
table is made up, of the shape and size that those of kernels have.
"""

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxmoe.experiment.table import add_shared, make_tables, study_options, tables_of
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.recorded import read_requests
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable, Term

HERE = Path(__file__).resolve().parent
TRACE = "measured/arrivals/mooncake_conversation.jsonl"
ROUNDS, MANY, ENGINES = 5, 1_000_000, 8
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


def row(name: str, requests: Requests, *runs: float) -> dict[str, object]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"requests": name, "number": len(requests), "core_s": f"{min(runs):.2f}", "peak_GiB": f"{peak:.2f}"}


def rows(shared: Path) -> Iterator[dict[str, object]]:
    recorded = read_requests(shared / TRACE)
    serve(recorded, Fleet(ENGINE), step_table())  # compiles
    yield row("Mooncake's", recorded, *(seconds(recorded) for _ in range(ROUNDS)))
    with ThreadPoolExecutor(2) as two:
        yield row("Mooncake's, each of two at a time", recorded, *two.map(seconds, [recorded] * 2 * ROUNDS))
    many = drawn()
    yield row("drawn", many, seconds(many))


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "measured")
    given = parser.parse_args()
    make_tables(HERE, tables_of({"serving": lambda: rows(given.shared)}), given)
