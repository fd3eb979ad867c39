"""Shared frame of all commands: output folder, progress, Ctrl-C, one clear message for bad input, exit codes."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from jaxmoe.config import load_scenario
from jaxmoe.config.hardware_space import read_space
from jaxmoe.errors import InputError
from jaxmoe.files import atomic_write
from jaxmoe.memory import peak_memory

if TYPE_CHECKING:
    from jaxmoe.experiment.stage_timer import Report

BAD_INPUT = 2
SUMMARY = "summary.json"
command_line: ContextVar[str] = ContextVar("command_line", default="")  # of this run, as typed
INTERRUPTED = 130  # the exit code that shells have for it: 128 + SIGINT


class Interrupts:
    """Inside the block the first Ctrl-C waits for the next `check`; a second one raises at once.

    In the middle of JAX, an interrupt can crash the process, or get lost in a callback that ignores it.
    """

    def __init__(self) -> None:
        self._pending = False
        self._spent = False
        self._previous: Any = None

    def spend(self) -> None:
        """The first Ctrl-C was taken elsewhere: the next one raises at once."""
        self._spent = True

    def check(self) -> None:
        """Raise `KeyboardInterrupt` where one is waiting."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        # Only the main thread may handle signals, and a process that was told to ignore Ctrl-C goes on doing so.
        if threading.current_thread() is threading.main_thread():
            current = signal.getsignal(signal.SIGINT)
            if current is not signal.SIG_IGN:
                self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending or self._spent:
            raise KeyboardInterrupt
        self._pending = True


GRACE_S = 1.0  # that a second Ctrl-C leaves for an orderly end


def end_at_second_interrupt() -> None:
    """End this process soon after a second Ctrl-C, also where Python does not get to it, as while XLA compiles."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # gets a byte for each signal, whatever Python is at

    def watch() -> None:
        pressed = 0
        while pressed < 2:
            pressed += os.read(reader, 16).count(signal.SIGINT)
        time.sleep(GRACE_S)
        os.write(2, b"interrupted twice: ended at once\n")
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()


# The folder that results go to.


class OutputFolder:
    """A writable folder; raises `OSError` on entry where there can be none.

    What was made for it and is still empty on leaving is removed, so a failed run leaves no trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.to_go_on = ""  # what to do after Ctrl-C, where a run can go on from what is written
        self._made: list[Path] = []
        self._files: list[Path] = []

    def __enter__(self) -> "OutputFolder":
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._made = missing
            self._probe()
        except OSError as error:
            self._remove_empty()
            reason = "it is a file" if self.path.is_file() else error.strerror or str(error)
            raise OSError(f"--out: cannot write to the folder {self.path}: {reason}; give another one") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove_empty()

    @property
    def written(self) -> list[str]:
        """Names of the files that this run has written."""
        return [file.name for file in self._files if file.exists()]

    def target(self, name: str) -> Path:
        """Where to write the file of this name; whoever writes it does so aside and then renames."""
        self._files.append(self.path / name)
        return self._files[-1]

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all; the summary tells how it was made, and the memory that took."""
        made = {"command_line": command_line.get(), "peak_memory_B": peak_memory()} if name == SUMMARY else {}
        text = json.dumps(data | made, indent=1, allow_nan=False)
        with atomic_write(self.target(name)) as aside:
            aside.write_text(text + "\n", encoding="utf-8")

    def _probe(self) -> None:
        probe = self.path / f".probe-{os.getpid()}"
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)

    def _remove_empty(self) -> None:
        for folder in self._made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def messages() -> Console:
    """Where errors, warnings and progress go: never mixed with results."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def errors_told(verbose: bool) -> Iterator[None]:
    """Bad input in here is one clear message, and exit code 2."""
    try:
        yield
    except (InputError, OSError) as error:
        if verbose:
            messages().print_exception()
        messages().print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def session(out: Path, verbose: bool, quiet: bool = False) -> Iterator[tuple[OutputFolder, Interrupts]]:
    """Run a verb in here: yields its output folder, and an object that checks for Ctrl-C.

    Ends with exit code 2 on bad input, 130 on Ctrl-C.
    """
    folder = OutputFolder(out)
    try:
        with errors_told(verbose), Interrupts() as interrupts, folder, progress_lines(quiet):
            yield folder, interrupts
            interrupts.check()
    except KeyboardInterrupt:
        kept = f"complete in {folder.path}: {', '.join(folder.written)}" if folder.written else "nothing was written"
        kept += f"; {folder.to_go_on}" if folder.written and folder.to_go_on else ""
        messages().print(f"[bold red]interrupted;[/] {escape(kept)}")
        raise typer.Exit(INTERRUPTED) from None


# Commands: a signature on the command line, whose body is in a module of its own that is loaded when it runs.


def runs(
    module: str,
    function: str = "run",
    scenario: bool = False,
    check: Callable[[Path], object] | None = None,
) -> Callable[[Callable], Callable]:
    """Give a signature the body `function(folder, interrupts, ...)` of a module of this package.

    A wrong key in a `scenario`, or in a file that `check` reads, is reported before JAX is loaded. A pipe is not
    checked early, as it can be read only once.
    """

    def with_body(signature: Callable) -> Callable:
        @wraps(signature)
        def command(out: Path | None, verbose: bool, quiet: bool, **given: Any) -> None:
            with kept_or_not(out) as path, session(path, verbose, quiet) as (folder, interrupts):
                if check is not None and not _is_pipe(given["config"]):
                    check(given["config"])
                if scenario and not _is_pipe(given["config"]):
                    load_scenario(given["config"], given["overrides"] or ())
                if given.get("hardware") is not None:
                    read_space(given["hardware"])
                body = getattr(import_module(f"jaxmoe.cli.{module}"), function)
                body(folder, interrupts, **given)

        return command

    return with_body


@contextmanager
def kept_or_not(out: Path | None) -> Iterator[Path]:
    """The folder of results, or one that is gone afterwards where what is printed is all that was asked for."""
    if out is not None:
        yield out
        return
    with TemporaryDirectory() as scratch:
        yield Path(scratch)


def _is_pipe(path: Path) -> bool:
    return path.exists() and not path.is_file()


# Progress: bars on a terminal, a line now and then elsewhere, nothing with `--quiet`.

LINE_EVERY_S = 10.0


@dataclass
class _Shown:
    """What a run tells of its progress, and what it is at."""

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

    before = _shown.set(shown)
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

    with Progress(*columns, console=messages(), transient=True, disable=not shown.bars) as bars:
        yield bars, at
    shown.at = "writing"
