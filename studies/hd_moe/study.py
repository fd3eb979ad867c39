"""Reproduce hd_moe: Table III and Fig. 3, 5, 8-15 as tables, beside what the paper publishes; see README.md.

    python studies/hd_moe/study.py [TABLE ..] --shared FOLDER

Every job keeps its rows under `runs/`: one that is there is not run again, so a study that was stopped goes on where
it was. Delete `runs/` to start over. Then all tables are written, and the claims are printed. Named tables are those of
jobs, made alone; `times` needs the plans of `two_stages` and `gradient`. `summary.py` makes the others anew.

All take 40 minutes and more on two cores.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import activation
import dynamic
import estimates
import jax
import small_cases
import strategies
import summary
import tuners
from cases import HERE, QWEN, ROOT, RUNS, trace_file
from jax.experimental.compilation_cache import compilation_cache

from jaxmoe.experiment import code_pieces
from jaxmoe.experiment.table import add_shared, folder_of_tables, run_jobs, script_options
from jaxmoe.experiment.table_age import Code, code_of, joined

# The gradient tuner has the machine to itself, for its wall time counts and it uses all cores. Of the others the long
# ones come first, so that no process is left alone with one at the end. The last round needs the plans of those before.
ALONE = tuners.ALONE | tuners.EQUAL
FIRST = tuners.JOBS | dynamic.JOBS | small_cases.JOBS | estimates.JOBS | activation.JOBS
SECOND = tuners.LATER | strategies.LATER
ALL = ALONE | FIRST | SECOND
TABLES = (
    "two_stages",
    "gradient",
    "dynamic",
    "optimum",
    "estimates",
    "table_iii",
    "activation",
    "others",
    "equal_time",
    "times",
    "loads",
)


def run(name: str, shared: Path) -> list[dict]:
    """Run a job and keep its rows."""
    # Compiled code is kept for the cases of the same shapes; but a first run of the gradient tuner pays for all of it.
    jax.config.update("jax_enable_compilation_cache", name not in ALONE)
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(RUNS / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    (code_pieces.stop if name in ALONE else code_pieces.watch)()
    begun = time.perf_counter()
    rows = ALL[name](shared)
    aside = RUNS / f"{name}.part"
    aside.write_text(json.dumps({"wall_s": time.perf_counter() - begun, "rows": rows, "code": code_of(HERE)}))
    aside.rename(RUNS / f"{name}.json")
    return rows


def run_missing(jobs: dict[str, Callable], shared: Path, processes: int) -> None:
    """Run the jobs whose rows are not there, several at a time."""
    missing = {name: (name, shared) for name in jobs if not (RUNS / f"{name}.json").is_file()}
    if failed := run_jobs(run, missing, processes, lambda _, rows: f"{len(rows)} rows"):
        sys.exit(f"{len(failed)} failed: {', '.join(failed)}")


def table_of(job: str) -> str:
    """That of a job is named by the beginning of its name."""
    (table,) = (table for table in TABLES if job == table or job.startswith(f"{table}_"))
    return table


def gathered(table: str) -> list[dict]:
    """All rows of a table."""
    return [row for name in ALL if table_of(name) == table for row in kept(name)["rows"]]


def code_of_jobs(table: str) -> Code:
    """What the jobs of a table ran through."""
    return reduce(joined, (kept(name).get("code", {}) for name in ALL if table_of(name) == table))


def kept(job: str) -> dict:
    return json.loads((RUNS / f"{job}.json").read_text())


def seconds_of_jobs() -> list[dict]:
    """Wall seconds of every job."""
    return [{"job": name, "wall_s": f"{kept(name)['wall_s']:.1f}"} for name in ALL]


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = script_options(__doc__, writes=True)
    add_shared(parser, ROOT.parent / "shared", "traces", "reference")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="jobs at a time; all cores' number")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; by default all")
    arguments = parser.parse_args()
    if unknown := {*arguments.tables} - {*TABLES}:
        parser.error(f"no table of jobs is called {', '.join(sorted(unknown))}; choose from {', '.join(TABLES)}")
    shared, wanted = arguments.shared, arguments.tables or TABLES
    begun = time.perf_counter()
    code_pieces.watch()
    RUNS.mkdir(exist_ok=True)
    trace_file(QWEN, shared)  # made once, before processes want it at the same time
    for jobs, processes in ((ALONE, 1), (FIRST, arguments.processes), (SECOND, arguments.processes)):
        run_missing({name: job for name, job in jobs.items() if table_of(name) in wanted}, shared, processes)
    to = folder_of_tables(HERE, arguments)
    tables = {name: gathered(name) for name in wanted}
    for name, rows in tables.items():
        summary.write(to / f"{name}.csv", rows, code_of_jobs(name))
    print(f"{time.perf_counter() - begun:.0f} s for what was missing")
    if not arguments.tables:
        made = summary.derived(tables, shared) | {"jobs": seconds_of_jobs()}
        for name, rows in made.items():
            summary.write(to / f"{name}.csv", rows, code_of(HERE))
        print(summary.text(tables | made))


if __name__ == "__main__":
    main()
