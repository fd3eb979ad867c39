"""Folders of results: one run at a time writes to one, and a new run replaces only what an earlier one listed.

While a run writes to a folder, the file `.running` there names its process, its command and its files. The lock on that
file is the system's: it goes with the process, however that ends, so a file that a dead process left locks nothing.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from jaxmoe.errors import InputError
from jaxmoe.files import remove

RECORD, SUMMARY = ".running", "summary.json"
LISTED = "result_files"  # the key of their names, in summaries and records
PAGE, COMPARED = "report.html", "compared.html"  # of `jaxmoe report` about results, beside them


class FolderLock:
    """The lock on a folder, held. `earlier` is what the record says of a run that did not come to its end."""

    def __init__(self, file: IO[str], record: Path) -> None:
        self._file, self._record = file, record
        self.earlier = _read(file)
        self.keep = bool(self.earlier.get(LISTED))  # the record, for the next run
        self._facts = dict(self.earlier)
        self.note(process=os.getpid(), host=socket.gethostname(), command_line="")

    def note(self, **facts: Any) -> None:
        """Put facts about this run into the record."""
        self._facts |= facts
        self._file.seek(0)
        self._file.truncate()
        json.dump(self._facts, self._file)
        self._file.flush()

    def leave(self) -> None:
        """Remove the record where the next run does not need it."""
        if not self.keep:
            self._record.unlink(missing_ok=True)


_held: ContextVar[dict[Path, FolderLock] | None] = ContextVar("_held", default=None)  # around here, by folder


@contextmanager
def locked(folder: Path) -> Iterator[FolderLock]:
    """Keep other runs out of a folder, for as long as this process lives at most. Raises `InputError` in theirs.

    What is inside may lock the folder again. Raises `OSError` where nothing can be written to the folder.
    """
    place, held = folder.resolve(), _held.get() or {}
    if place in held:
        yield held[place]
        return
    with _locked_file(folder) as file:
        lock = FolderLock(file, folder / RECORD)
        token = _held.set(held | {place: lock})
        try:
            yield lock
        finally:
            _held.reset(token)
            lock.leave()


def _locked_file(folder: Path) -> IO[str]:
    """The record of a folder, open and locked."""
    path = folder / RECORD
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
        if not _lock(file):
            with file:
                raise InputError(
                    f"--out: another run is writing to {folder}: {_told(_read(file))}; wait for it to end, or give "
                    "another folder"
                )
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # the record of a run that has ended since, and removed it


def _lock(file: IO[str]) -> bool:
    """Whether nobody else holds the lock; also where the system has none."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _read(file: IO[str]) -> dict[str, Any]:
    """The facts in a record, none where a run was stopped in the middle of writing it."""
    try:
        facts = json.load(file)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _told(facts: dict[str, Any]) -> str:
    command = f", {facts['command_line']}" if facts.get("command_line") else ""
    return f"process {facts.get('process', 'unknown')} on {facts.get('host', 'this machine')}{command}"


# Results of earlier runs: whose they are, and which of them a new run may replace.


@dataclass(frozen=True)
class EarlierResults:
    """The command that wrote results to a folder, "" for none, and their names; `None` where it did not list them."""

    command: str
    files: frozenset[str] | None

    def remove(self, folder: Path, kept: Iterable[Path]) -> None:
        """Remove the files and what a crash has left of them, but those that are `kept`."""
        kept = {path.resolve() for path in kept}
        for name in self.files or ():
            if (folder / name).resolve() not in kept:
                for left in (name, f"{name}.part", f"{name}.old"):
                    remove(folder / left)

    def remove_pages(self, folder: Path) -> None:
        """Remove the pages about the results, which are of none that come."""
        if self.command:
            for name in (PAGE, COMPARED):
                remove(folder / name)


def earlier_results(folder: Path, record: dict[str, Any]) -> EarlierResults:
    """The results in a folder, by its summary, and by the record of a run that did not come to its end.

    Raises `InputError` for a summary that is not jaxmoe's.
    """
    summary = _summary(folder / SUMMARY)
    if not record.get(LISTED):
        record = {}  # that run ended before it had any result
    command = str((summary or record).get("command", "")).partition(" --")[0]
    listed = [found[LISTED] for found in (summary, record) if found and isinstance(found.get(LISTED), list)]
    if summary and LISTED not in summary:
        return EarlierResults(command, None)
    names = {name for some in listed for name in some if isinstance(name, str) and _is_inside(name)}
    return EarlierResults(command, frozenset(names | ({SUMMARY} if summary else set())))


def _summary(path: Path) -> dict[str, Any] | None:
    """The summary of an earlier run; `None` where there is none."""
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_bytes())
    except (ValueError, OSError):
        summary = None
    if not isinstance(summary, dict) or "command" not in summary:
        raise InputError(f"--out: {path} is not of jaxmoe, and results would take its place; give another folder")
    return summary


def _is_inside(name: str) -> bool:
    return name not in ("", ".", "..") and Path(name).name == name
