"""How many micro-slice events a second the event simulator does: loads, transfers and computations.

Writes `speed.csv`: `python studies/expert_streaming/speed.py`. Seconds are of the processor, in one thread, compiled
before; the best of `REPEATS`.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from agreement import CONTROL, HERE, STRATEGIES, Drawn, costs_of, described, machine_of, modelled, slices_of, tokens_of

from jaxmoe.des.streaming import Flow, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.experiment.table import make_tables, study_options, tables_of

CASES = (
    ("qwen3-30b-a3b", 16, (2, 2)),
    ("qwen3-30b-a3b", 256, (2, 2)),
    ("deepseek-moe-16b", 256, (2, 2)),
    ("phi-3.5-moe", 256, (2, 2)),
    ("qwen3-30b-a3b", 256, (3, 3)),
    ("qwen3-30b-a3b", 256, (4, 4)),
)
REPEATS, SEED, CUT, SRAM = 10, 3, 8, 16e6


def flow(model: str, tokens: int, shape: tuple[int, int], strategy: str) -> Flow:
    case = Drawn(shape, 25.6e9, 288e9, 3.2768e12, SRAM, CUT)
    machine, costs = machine_of(case), costs_of(model)
    dies = shape[0] * shape[1]
    counts = tokens_of(model, tokens, dies, np.random.default_rng(SEED))
    slices = slices_of(model, CUT, SRAM, dies)
    _, groups, following = modelled(strategy)(machine, slices, jnp.asarray(counts, jnp.float32))
    rules = {"matched": False} | {name: on for name, on in STRATEGIES[strategy].items() if name != "paired"}
    slicing = Slicing(CUT, SRAM, CONTROL, **rules)
    whole = np.ones(counts.shape, bool)
    return flow_of(described(machine, costs), slicing, counts, np.asarray(groups), np.asarray(following), whole)


def measured(given: Flow) -> tuple[int, float]:
    """Events of a run, and the least seconds of the processor that one takes."""
    stream(given)
    least = np.inf
    for _ in range(REPEATS):
        started = time.thread_time()
        events = stream(given).events
        least = min(least, time.thread_time() - started)
    return events, least


def speed() -> Iterator[dict[str, Any]]:
    for model, tokens, shape in CASES:
        for strategy in ("fse_paired", "fse_rule5"):
            events, seconds = measured(flow(model, tokens, shape, strategy))
            row = {"model": model, "tokens": tokens, "array": f"{shape[0]}x{shape[1]}", "strategy": strategy}
            row |= {"events": events, "cpu_s": seconds, "events_per_s": events / seconds}
            print(*row.values(), f"load {os.getloadavg()[0]:.1f}")
            yield row


if __name__ == "__main__":
    make_tables(HERE, tables_of({"speed": speed}, digits=6, timed=["speed"]), study_options(__doc__).parse_args())
