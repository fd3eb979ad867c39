"""Tables of a study: named columns, a list of cases, and a function from a case to rows.

A study lists its `Table`s, takes its options from `study_options` and hands both to `make_tables`. Every case is
written when it is done, in the place of the rows that it had, so that a study that was stopped goes on.
"""

import argparse
import fnmatch
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.experiment import code_pieces
from jaxmoe.experiment.table_age import Code, code_of, joined, record, seed_of
from jaxmoe.files import cell_text, read_table, write_table

Row = Mapping[str, Any]
Case = tuple[Any, ...]
CLEARED_AFTER = 8  # cases, where compiled functions are kept on disk: those in memory are let go


@dataclass(frozen=True)
class Table:
    """A table `NAME.csv` of a study.

    `rows` is called with the values of a case. Columns `key` of its rows have these values, and say whose rows they
    are; a table without a key has one case. `cases` may be a function, if they follow from an earlier table. `columns`
    and `digits` are as `write_table` takes them. What is `timed` tells seconds of its own run. Under `--jobs`, `rows`
    goes to other processes: a function of a module, or a `partial` of one.
    """

    name: str
    rows: Callable[..., Iterable[Row]]
    cases: Sequence[Case] | Callable[[], Sequence[Case]] = ((),)
    key: Sequence[str] = ()
    columns: Sequence[str] | None = None
    digits: int | None = None
    timed: bool = False

    def label(self, case: Case) -> str:
        """Name of a case: that of the table and its values."""
        return "/".join((self.name, *map(str, case)))

    def all_cases(self) -> list[Case]:
        """Cases in the order of the table."""
        return list(self.cases() if callable(self.cases) else self.cases)

    def known(self, path: Path) -> dict[tuple[str, ...], list[Row]]:
        """Rows of a file by the text of their case."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in read_table(path) if path.is_file() else ():
            found.setdefault(tuple(row.get(column, "") for column in self.key), []).append(row)
        return found

    def text(self, case: Case) -> tuple[str, ...]:
        """The values of a case as its rows have them in the file."""
        return tuple(cell_text(value, self.digits) for value in case)

    def made(self, case: Case) -> list[Row]:
        """Rows of a case. `ValueError` where one is not the case's by its key."""
        rows, expected = list(self.rows(*case)), self.text(case)
        for row in rows:
            if (told := self.text(tuple(row.get(column) for column in self.key))) != expected:
                wanted = ", ".join(f"{column}={value}" for column, value in zip(self.key, expected, strict=True))
                raise ValueError(f"{self.label(case)}: a row has {', '.join(told)} in its key; expected {wanted}")
        return rows


def tables_of(
    rows: Mapping[str, Callable[[], Iterable[Row]]], digits: int | None = None, timed: Collection[str] = ()
) -> list[Table]:
    """Tables of one case each, by name; `timed` are those that tell seconds of their own run, made last."""
    named = [Table(name, made, digits=digits, timed=name in timed) for name, made in rows.items()]
    return sorted(named, key=lambda table: table.timed)


def script_options(doc: str | None, writes: bool = False) -> argparse.ArgumentParser:
    """Command line of a script of a study, for it to add its own options; `writes` says whether it has tables."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if writes:
        told = "folder of the tables, runs/tables of the study unless said; the study's own makes the committed anew"
        parser.add_argument("--out", type=Path, metavar="FOLDER", help=told)
    return parser


def study_options(doc: str | None, resume: bool = False) -> argparse.ArgumentParser:
    """Command line of a study, for it to add its own options. `resume` says whether rows that are there stay."""
    parser = script_options(doc, writes=True)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help="tables to make, all unless said; * stands for any text"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="of a table of several cases, those whose name has one of these"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time, in processes of their own")
    parser.add_argument("--quick", action="store_true", help="a trial: the first case alone, tables in runs/quick")
    parser.add_argument("--list", action="store_true", help="print the names of the cases to run, run none")
    resumed = "keep rows that are there, and make those that are missing"
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=resume, help=resumed)
    return parser


def add_shared(parser: argparse.ArgumentParser, default: Path, *folders: str) -> None:
    """Adds `--shared FOLDER`, which has these folders: recorded traces, results of others."""

    def checked(text: str) -> Path:
        path, wanted = Path(text).resolve(), " and ".join(f"{folder}/" for folder in folders)
        if not all((path / folder).is_dir() for folder in folders):
            raise argparse.ArgumentTypeError(f"{path} has no {wanted}; give the folder that has")
        return path

    there = " and ".join(f"{folder}/" for folder in folders)
    parser.add_argument("--shared", type=checked, default=str(default), metavar="FOLDER", help=f"has {there}")


def make_tables(
    folder: Path, tables: Sequence[Table], given: argparse.Namespace, compiled: Path | None = None
) -> dict[str, list[dict[str, str]]]:
    """Makes the tables that the options name, one after the other, and returns their rows as text.

    Compiled functions are kept in the folder `compiled`, for cases and processes that need the same. A case that fails
    is told, the others go on, and the exit status is 1.
    """
    code_pieces.watch()  # also what reads the cases, which may trace what rows use
    names = [table.name for table in tables]
    if unknown := [name for name in given.tables if not fnmatch.filter(names, name)]:
        sys.exit(f"no table is called {', '.join(unknown)}; choose from {', '.join(names)}")
    named = {name for pattern in given.tables or ["*"] for name in fnmatch.filter(names, pattern)}
    to = folder_of_tables(folder, given)
    chosen = {to / f"{table.name}.csv": table for table in tables if table.name in named}
    failed = [name for path, table in chosen.items() for name in _make(table, path, folder, given, compiled)]
    code_pieces.stop()
    if failed:
        sys.exit(f"{len(failed)} failed: {', '.join(failed)}")
    if not given.list:
        print(f"tables are in {to}")
    return {table.name: read_table(path) for path, table in chosen.items() if path.is_file()}


def folder_of_tables(folder: Path, given: argparse.Namespace) -> Path:
    """Where tables of a study go: where the options say, or into its `runs`, never by themselves to its own folder."""
    return given.out or folder / "runs" / ("quick" if getattr(given, "quick", False) else "tables")


def earlier_table(folder: Path, given: argparse.Namespace, name: str) -> Path:
    """The table that another one rests on: that of the folder of tables if it is there, else the committed one."""
    own = folder_of_tables(folder, given) / f"{name}.csv"
    return own if own.is_file() else folder / own.name


def _make(table: Table, path: Path, study: Path, given: argparse.Namespace, compiled: Path | None) -> list[str]:
    """Makes the cases of one table that are wanted, and notes what made it. Returns the names of those that failed."""
    cases, known = table.all_cases(), table.known(path)
    only = given.only if table.key else None
    wanted = [case for case in cases if not only or any(text in table.label(case) for text in only)]
    wanted = wanted[:1] if given.quick and not only else wanted
    wanted = [case for case in wanted if not (given.resume and table.text(case) in known)]
    if given.list:
        print("".join(f"{table.label(case)}\n" for case in wanted), end="")
        return []
    order = {table.text(case): place for place, case in enumerate(cases)}

    code: Code = {}
    whole = {*map(table.text, wanted)} >= known.keys()

    def keep(name: str, result: tuple[list[Row], Code]) -> str:
        nonlocal code
        rows, ran = result
        code = joined(code, ran)
        known[table.text(named[name])] = rows
        written = sorted(known, key=lambda case: order.get(case, len(order)))
        write_table(path, (row for case in written for row in known[case]), table.columns, table.digits)
        record(path, study, code, seed_of(table.rows), whole)
        return f"{len(rows)} rows"

    named = {table.label(case): case for case in wanted}
    jobs = {name: (table, case, study, compiled) for name, case in named.items()}
    return run_jobs(_rows, jobs, given.jobs, keep)


_DONE = 0  # cases of this process


def _rows(table: Table, case: Case, study: Path, compiled: Path | None) -> tuple[list[Row], Code]:
    """Rows of a case and the code that made them, with compiled functions kept on disk."""
    global _DONE
    (code_pieces.stop if table.timed else code_pieces.watch)()
    if compiled is not None:
        import jax

        jax.config.update("jax_compilation_cache_dir", str(compiled))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        if _DONE and _DONE % CLEARED_AFTER == 0:
            jax.clear_caches()
    _DONE += 1
    return table.made(case), code_of(study)


def run_jobs(
    work: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]], processes: int, keep: Callable[[str, Any], str]
) -> list[str]:
    """Runs `work` on the arguments of every job, several at a time; in this process if it is one at a time.

    `keep` is called here with the name and the result of a job that is done, and returns what is told of it beside its
    seconds. Returns the names of the jobs that failed, whose errors are told.
    """
    failed = []
    for done, (name, job) in enumerate(_results(work, jobs, processes), start=1):
        if (error := job.exception()) is not None:
            failed.append(name)
            traceback.print_exception(error)
            said = f"failed: {error}"
        else:
            result, seconds = job.result()
            said = f"{keep(name, result)}, {seconds:.0f} s"
        print(f"{name}: {said} ({done} of {len(jobs)})", flush=True)
    return failed


def _results(
    work: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]], processes: int
) -> Iterator[tuple[str, Future[tuple[Any, float]]]]:
    """Names of jobs as they are done, with their results and seconds."""
    if processes == 1:
        for name, arguments in jobs.items():
            here: Future[tuple[Any, float]] = Future()
            try:
                here.set_result(_timed(work, arguments))
            except Exception as error:
                here.set_exception(error)
            yield name, here
        return
    # Own process groups, so that Ctrl-C cannot cut a search short which is then kept as a whole one.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), os.setpgrp) as pool:
        running = {pool.submit(_timed, work, arguments): name for name, arguments in jobs.items()}
        try:
            for job in as_completed(running):
                yield running[job], job
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _timed(work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = work(*arguments)
    return result, time.perf_counter() - begun
