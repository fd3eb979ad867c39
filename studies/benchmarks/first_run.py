"""Where the time of a command goes, cold: its stages, and what JAX traces, lowers and compiles; see README.md.

The command runs in this process, which has nothing compiled. Processor seconds tell more than wall seconds where other
work is on the machine. Threads compile beside each other, and wait for each other, so that the wall seconds of
functions add up to more than those of the command.
"""

import argparse
import contextlib
import json
import os
import platform
import runpy
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.monitoring

from jaxmoe.experiment.table import make_tables, study_options, tables_of

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parents[1] / "configs" / "scenarios" / "quickstart.yaml"
STEPS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}


class Functions:
    """Listens to JAX: seconds of every function by step, and how many programs were compiled of it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(STEPS.values(), 0.0))
        self.programs: Counter[str] = Counter()

    def on_event(self, event: str, duration_secs: float, **told: str | int) -> None:
        """Take note of a step that has just ended."""
        if event in STEPS:
            name = str(told.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            self.seconds[name][STEPS[event]] += duration_secs
            self.programs[name] += STEPS[event] == "compile_s"

    def rows(self, most: int) -> Iterator[dict[str, object]]:
        """The functions that take longest, and all others together."""
        ordered = sorted(self.seconds, key=lambda name: -sum(self.seconds[name].values()))
        groups = {name: [name] for name in ordered[:most]} | {"all others": ordered[most:]}
        for name, members in groups.items():
            steps = {step: f"{sum(self.seconds[each][step] for each in members):.2f}" for step in STEPS.values()}
            yield {"function": name, "programs": sum(self.programs[each] for each in members), **steps}


def run(command: list[str]) -> tuple[list[dict[str, object]], Functions]:
    """Runs a command of jaxmoe. Returns rows of its stages, and its functions."""
    functions = Functions()
    jax.monitoring.register_event_duration_secs_listener(functions.on_event)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        sys.argv[1:] = [*command, "--out", folder]
        with contextlib.suppress(SystemExit):
            runpy.run_module("jaxmoe", run_name="__main__")  # in this process, whose compiler is listened to
        wall, processor = time.perf_counter() - begun, time.process_time()
        told = json.loads((Path(folder) / "summary.json").read_text())
    stages = [(f"tune: {name}", seconds) for name, seconds in told.get("tuning", {}).get("wall_s", {}).items()]
    stages += [(name, sum(parts.values())) for name, parts in told["wall_s"]["stages"].items() if name != "tune"]
    rows: list[dict[str, object]] = [{"stage": name, "wall_s": f"{seconds:.1f}"} for name, seconds in stages]
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, jax {jax.__version__}"
    everything: dict[str, object] = {
        "stage": "whole",
        "wall_s": f"{wall:.1f}",
        "processor_s": f"{processor:.1f}",
        "machine": machine,
    }
    return [*rows, everything], functions


if __name__ == "__main__":
    parser = study_options(__doc__)
    parser.add_argument(
        "--command",
        nargs=argparse.REMAINDER,
        default=["tune", str(SCENARIO)],
        help="of jaxmoe with all its options but --out, last",
    )
    given = parser.parse_args()
    if given.list or given.quick:
        sys.exit("there is one case: the command")
    stages, functions = run(given.command)
    tables = {"first_run": lambda: stages, "first_run_functions": lambda: functions.rows(8)}
    make_tables(HERE, tables_of(tables), given)
