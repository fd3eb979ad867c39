"""Where messages go, and what a command tells of its progress."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from jaxmoe.cli.early_end import last_words
from jaxmoe.progress import on_stage

if TYPE_CHECKING:
    from jaxmoe.experiment.stage_timer import Report


def messages() -> Console:
    """Where errors, warnings and progress go: never mixed with results."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


# Progress: bars on a terminal, a line now and then elsewhere, nothing with `--quiet`.

LINE_EVERY_S = 10.0


@dataclass
class _Shown:
    """Progress of a run as it is shown, and the part it is at."""

    bars: bool = False
    at: str = "reading"


_shown: ContextVar[_Shown] = ContextVar("_shown")


@contextmanager
def progress_lines(quiet: bool) -> Iterator[None]:
    """While a command runs in here, tell every `LINE_EVERY_S` what it is at, where there is no terminal for bars."""
    console, done = messages(), threading.Event()
    shown, start = _Shown(bars=console.is_terminal and not quiet), time.monotonic()

    def tell() -> None:
        while not done.wait(LINE_EVERY_S):
            console.print(escape(f"{time.monotonic() - start:.0f} s: {shown.at}"))

    def begin(stage: str) -> None:
        shown.at = stage

    before, heard = _shown.set(shown), on_stage.set(begin)
    teller = threading.Thread(target=tell, daemon=True)
    if not (quiet or console.is_terminal):
        teller.start()
    try:
        yield
    finally:
        done.set()
        if teller.is_alive():
            teller.join()
        _shown.reset(before)
        on_stage.reset(heard)


@contextmanager
def progress_bars(check: Callable[[], None]) -> Iterator["Report"]:
    """One bar for each stage that is reported; they go when all is done. Every report calls `check` as well."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bars_of(columns) as (bars, at):
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            check()
            at(stage, done, total)
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


@contextmanager
def bars_of(columns: Sequence[ProgressColumn]) -> Iterator[tuple[Progress, "Report"]]:
    """Bars of these columns, where a command shows any, and what tells the progress for its lines."""
    shown = _shown.get(_Shown())

    def at(stage: str, done: int, total: int) -> None:
        shown.at = f"{stage}, {done} of {total}"

    with (
        Progress(*columns, console=messages(), transient=True, disable=not shown.bars) as bars,
        last_words(lambda _: bars.stop()),
    ):
        yield bars, at
    shown.at = "writing"
