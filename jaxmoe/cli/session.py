"""Shared frame of all commands: output folder, Ctrl-C, one clear message for bad input, exit codes."""

import inspect
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, TracebackType
from typing import Any

import typer
from rich.markup import escape

from jaxmoe.cli.early_end import INTERRUPTED, last_words
from jaxmoe.cli.kept_output import OPTIONS, KeptOutput, with_options
from jaxmoe.cli.progress import messages, progress_lines
from jaxmoe.config import ModelConfig, Scenario, load_model, load_scenario, told_reading
from jaxmoe.config.hardware_space import read_space
from jaxmoe.errors import InputError, with_nearest
from jaxmoe.files import PNG, as_pdf_too, atomic_write, remove
from jaxmoe.memory import peak_memory
from jaxmoe.run_folders import LISTED, SUMMARY, EarlierResults, FolderLock, earlier_results, locked

BAD_INPUT = 2
command_line: ContextVar[str] = ContextVar("command_line", default="")  # of this run, as typed


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


# The folder that results go to.


class OutputFolder:
    """A writable folder that no other run writes to; raises `OSError` or `InputError` on entry where there is none.

    Results of `command` that were there go as soon as the first new file comes. Those of another command are refused,
    and so is taking the place of what no run has written. A command that `resumes` goes on with what is there. Files
    that were `given` to the command stay. What was made for the folder and is still empty on leaving is removed, so a
    failed run leaves no trace.
    """

    def __init__(self, path: Path, command: str, resumes: bool = False, given: Iterable[Path] = ()) -> None:
        self.path = path
        self.to_go_on = ""  # what to do after Ctrl-C, where a run can go on from what is written
        self.begun = time.monotonic()  # the command, before what it needs is loaded
        self.summary = ""  # the text of the last JSON file of this run
        self._command, self._resumes, self._given = command, resumes, tuple(given)
        self._made: list[Path] = []
        self._files: list[Path] = []
        self._earlier = EarlierResults("", frozenset())
        self._lock: FolderLock
        self._leaving = ExitStack()

    def __enter__(self) -> "OutputFolder":
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._made = missing
            self._lock = self._leaving.enter_context(locked(self.path))
            self._look()
        except OSError as error:
            self._leave()
            reason = "it is a file" if self.path.is_file() else error.strerror or str(error)
            raise OSError(f"--out: cannot write to the folder {self.path}: {reason}; give another one") from error
        except InputError:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._settle(stopped=kind is not None)
        self._leave()

    @property
    def written(self) -> list[str]:
        """Names of the files that this run has written."""
        return [file.name for file in self._files if file.exists()]

    def check(self, name: str) -> None:
        """Raise `InputError` where a file of this name is none of a run's results."""
        known, path = self._earlier.files, self.path / name
        if known is not None and name not in known and path not in self._files and path.exists():
            raise InputError(f"--out: {path} is there, and no run has listed it; move it, or give another folder")

    def target(self, name: str) -> Path:
        """Where to write the file of this name; whoever writes it does so aside and then renames."""
        if not self._resumes:
            self.check(name)
            if not self._files:
                self._earlier.remove(self.path, self._given)
        if not self._files:
            self._earlier.remove_pages(self.path)
        if name.endswith(PNG) and as_pdf_too.get():
            self._files.append((self.path / name).with_suffix(".pdf"))
        self._files.append(self.path / name)
        self._lock.note(result_files=self._listed())
        return self._files[-1]

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all; the summary tells how it was made, and the memory that took."""
        target, made = self.target(name), {}
        if name == SUMMARY:
            made = {"command_line": command_line.get(), "peak_memory_B": peak_memory(), LISTED: self._listed()}
        self.summary = json.dumps(data | made, indent=1, allow_nan=False) + "\n"
        with atomic_write(target) as aside:
            aside.write_text(self.summary, encoding="utf-8")

    def tell(self, reason: str) -> None:
        """Tell what is there of a run that ended early."""
        kept = f"complete in {self.path}: {', '.join(self.written)}" if self.written else "nothing was written"
        kept += f"; {self.to_go_on}" if self.written and self.to_go_on else ""
        messages().print(f"[bold red]{reason};[/] {escape(kept)}")

    def abandon(self, reason: str) -> None:
        """Leave the folder from another thread as a run does that is interrupted, and tell what is there."""
        self._settle(stopped=True)
        self._lock.leave()
        self._remove_empty()
        self.tell(reason)

    def _settle(self, stopped: bool) -> None:
        """Until there is a summary, the record tells the next run whose the files are."""
        self._lock.keep = ((stopped and bool(self.written)) or self._lock.keep) and SUMMARY not in self.written

    def _listed(self) -> list[str]:
        """Names of the results in the folder, and of those that are about to come."""
        there = (self._earlier.files or frozenset()) if self._resumes else frozenset()
        return sorted({*(file.name for file in self._files), *(name for name in there if (self.path / name).exists())})

    def _look(self) -> None:
        """Learn what is in the folder, and that this run may write there."""
        self._earlier = earlier_results(self.path, self._lock.earlier)
        if self._earlier.command not in ("", self._command):
            raise InputError(
                f"--out: {self.path} has results of jaxmoe {self._earlier.command}, which would get mixed with those "
                f"of jaxmoe {self._command}; give another folder, or remove it"
            )
        earlier = sorted(self._earlier.files or ())  # this run may write nothing
        self._lock.note(command=self._command, command_line=command_line.get(), result_files=earlier)

    def _leave(self) -> None:
        self._leaving.close()
        self._remove_empty()

    def _remove_empty(self) -> None:
        for folder in self._made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def errors_told(verbose: bool) -> Iterator[None]:
    """Bad input in here is one clear message, and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # of whoever reads what is printed, such as head: no error of ours
        raise
    except (InputError, OSError) as error:
        if verbose:
            messages().print_exception()
        messages().print(f"[bold red]error:[/] {escape(with_nearest(str(error)))}")
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def session(
    out: Path, verbose: bool, command: str, resumes: bool = False, given: Iterable[Path] = (), quiet: bool = False
) -> Iterator[tuple[OutputFolder, Interrupts]]:
    """Run a command in here: yields its output folder, and an object that checks for Ctrl-C.

    Ends with exit code 2 on bad input, 130 on Ctrl-C. The rest is as in `OutputFolder`.
    """
    folder = OutputFolder(out, command, resumes, given)
    try:
        with (
            errors_told(verbose),
            Interrupts() as interrupts,
            folder,
            last_words(folder.abandon),
            progress_lines(quiet),
        ):
            yield folder, interrupts
            interrupts.check()
    except KeyboardInterrupt:
        folder.tell("interrupted")
        raise typer.Exit(INTERRUPTED) from None


# Commands: a signature on the command line, whose body is in a module of its own that is loaded when it runs.


def runs(
    module: str,
    function: str = "run",
    scenario: bool = False,
    check: Callable[[Path], object] | None = None,
    resumes: bool = False,
    writes: tuple[str, ...] = (),
) -> Callable[[Callable], Callable]:
    """Give a signature the body `function(folder, interrupts, ...)` of a module of this package.

    The command is called as the signature, in words: `plan_show` is `plan show`. One that `resumes` goes on with the
    results in its folder. All have the options of `kept_output`, for other programs.

    Files that it `writes` are named where a user may have files of these names: they are refused before any work.

    A wrong key in a `scenario`, or in a file that `check` reads, is reported before JAX is loaded, and so is how a
    config.json of the model was read. A pipe is not checked early, as it can be read only once.
    """

    def with_body(signature: Callable) -> Callable:
        @wraps(signature)
        def command(out: Path | None, verbose: bool, quiet: bool, **given: Any) -> None:
            name, files = signature.__name__.replace("_", " "), _files_in(given)
            output = KeptOutput(**{option: given.pop(option) for option in OPTIONS})
            with errors_told(verbose):
                output.check()
            with (
                kept_or_not(out) as path,
                session(path, verbose, name, resumes, files, quiet) as (folder, interrupts),
                output.of(folder),
            ):
                for file in writes:
                    folder.check(file)
                if check is not None and not _is_pipe(given["config"]):
                    check(given["config"])
                if scenario and not _is_pipe(given["config"]):
                    read = load_scenario(given["config"], given["overrides"] or ())
                    tell_model(read.model)
                    _check_trace(read, given.get("trace"))
                if given.get("model") is not None:
                    tell_model(load_model(given["model"], "--model"))
                if given.get("hardware") is not None:
                    read_space(given["hardware"])
                body = getattr(import_module(f"jaxmoe.cli.{module}"), function)
                body(folder, interrupts, **given)

        command.__signature__ = with_options(inspect.signature(signature))  # type: ignore[attr-defined]
        return in_paragraphs(command)

    return with_body


def in_paragraphs(command: Callable) -> Callable:
    """The command, its docstring with a line for each paragraph: help texts break lines where the terminal ends."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    return command


def tell_model(model: ModelConfig) -> None:
    """Tell how a config.json was read: what comes from which of its fields, and which parts are not counted."""
    for line in told_reading(model):
        messages().print(f"[yellow]note:[/] {escape(line)}")


def _check_trace(scenario: Scenario, given: Path | None) -> None:
    """Raise `InputError` where there is no file of the trace, that of the scenario or the one `given` in its place."""
    trace = scenario.workload.trace
    key, path = ("--trace", given) if given is not None else ("workload.trace.path", getattr(trace, "path", None))
    if path is not None and not Path(path).exists():
        raise InputError(f"{key} is {path}, and there is no such file; correct the path")


def _files_in(given: dict[str, Any]) -> list[Path]:
    """The files among options, also those of `NAME=FILE`."""
    values = [one for value in given.values() for one in (value if isinstance(value, list | tuple) else [value])]
    return [Path(str(one).rpartition("=")[2]) for one in values if isinstance(one, str | Path)]


@contextmanager
def kept_or_not(out: Path | None) -> Iterator[Path]:
    """The folder of results, or one that is gone afterwards where what is printed is all that was asked for."""
    if out is not None:
        yield out
        return
    with TemporaryDirectory() as scratch, last_words(lambda _: remove(Path(scratch))):
        yield Path(scratch)


def _is_pipe(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
