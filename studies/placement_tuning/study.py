"""Tuned placements and exchanges beside all others: five tables, made job by job; see README.md.

    python studies/placement_tuning/study.py --shared FOLDER

A job appends its rows to its table in one write, and is not run again while they are there: a study that was stopped
goes on where it was. Remove a job's rows to redo it.
"""

import argparse
import csv
import io
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import any_exchange
import gaps
import jax
import machines
import main_table
import sensitivity
from cases import ROOT, RUNS, Run

from jaxmoe.files import read_table

TABLES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "main": (main_table.jobs, main_table.COLUMNS),
    "loads": (main_table.load_jobs, main_table.LOAD_COLUMNS),
    "sensitivity": (sensitivity.jobs, sensitivity.COLUMNS),
    "machines": (machines.jobs, machines.COLUMNS),
    "gaps": (gaps.jobs, gaps.COLUMNS),
    "any_exchange": (any_exchange.jobs, any_exchange.COLUMNS),
}


KEPT_FOR = 8  # jobs: compiled functions are kept in memory so long, and read from the cache on disk after that
DONE = itertools.count(1)  # jobs of this process


def finished(path: Path) -> set[str]:
    """Jobs whose rows are in a table."""
    return {row["job"] for row in read_table(path)} if path.is_file() else set()


def append(path: Path, columns: Sequence[str], rows: Sequence[dict]) -> None:
    """Add the rows of a job at once; other processes may do the same at any time."""
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(",".join(columns) + "\n")
    except FileExistsError:
        pass
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, text.getvalue().encode())
    finally:
        os.close(descriptor)


def work(table: str, name: str, run: Run) -> float:
    """Run a job and keep its rows. Returns the wall seconds."""
    jax.config.update("jax_compilation_cache_dir", str(RUNS / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    begun = time.perf_counter()
    jobs, columns = TABLES[table]
    rows = jobs(run)[name]()
    append(run.table(table), columns, [{"job": name} | row for row in rows])
    if next(DONE) % KEPT_FOR == 0:
        jax.clear_caches()
    return time.perf_counter() - begun


def missing(run: Run, wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Tables and names of the jobs that are to be run: those whose name has any of the wanted parts."""
    found = []
    for table, (jobs, _) in TABLES.items():
        there = finished(run.table(table))
        names = (name for name in jobs(run) if not wanted or any(part in name for part in wanted))
        found += [(table, name) for name in names if name not in there]
    return found


def run_all(jobs: Sequence[tuple[str, str]], run: Run, processes: int) -> None:
    """Several at a time; a job that fails is named, and the others go on."""
    failed = []
    # Own process groups, so that Ctrl-C cannot cut a search short which is then kept as a whole one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, os.setpgrp) as pool:
        running = {pool.submit(work, table, name, run): name for table, name in jobs}
        try:
            for done, job in enumerate(as_completed(running), start=1):
                said = f"{job.result():.0f} s" if job.exception() is None else f"failed: {job.exception()}"
                failed += [running[job]] if job.exception() is not None else []
                print(f"{running[job]}: {said} ({done} of {len(jobs)})", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    if failed:
        sys.exit(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of traces/ and reference/")
    parser.add_argument("--jobs", nargs="*", default=(), metavar="NAME", help="only jobs whose name has one of these")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="jobs at a time; all cores' number")
    parser.add_argument("--layers-step", type=int, default=8, help="every so many layers are in the main table")
    parser.add_argument("--quick", action="store_true", help="a trial of few steps and batches, its tables in runs/")
    parser.add_argument("--list", action="store_true", help="print the names of the jobs that are missing, run none")
    given = parser.parse_args()
    shared = given.shared.resolve()
    if not (shared / "traces").is_dir() or not (shared / "reference").is_dir():
        sys.exit(f"{shared}: no traces/ and reference/ there; give their folder with --shared")
    RUNS.mkdir(exist_ok=True)
    run = Run(shared, given.layers_step, given.quick)
    jobs = missing(run, given.jobs)
    if given.list:
        print("\n".join(name for _, name in jobs))
        return
    run_all(jobs, run, given.processes)
    if late := [job for job in missing(run, given.jobs) if job not in jobs]:  # cells that turned out to be far off
        run_all(late, run, given.processes)


if __name__ == "__main__":
    main()
