"""Writing to the folder of a sweep: one at a time, and a clear error where the system cannot."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from jaxmoe.sweep.points import SweepError

_held: ContextVar[frozenset[Path]] = ContextVar("_held", default=frozenset())  # folders locked around here


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder, for as long as this process lives at most. Raises `SweepError` in theirs.

    What is inside may lock the folder again.
    """
    place = folder.resolve()
    if place in _held.get():
        yield
        return
    token = _held.set(_held.get() | {place})
    try:
        with _flocked(folder):
            yield
    finally:
        _held.reset(token)


@contextmanager
def _flocked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)  # the folder itself: no file to be left behind
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SweepError(
                f"--out: another sweep is writing to {folder}; wait for it to end or give another folder"
            ) from None
        except OSError:
            pass  # some file systems have no locks
        yield
    finally:
        os.close(handle)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise `SweepError` where the system cannot write what is written inside: its own error names no folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "put that right"
        raise SweepError(
            f"--out: cannot write to {folder}: {os.strerror(error.errno)}; {remedy} and run again: points that are "
            "complete there stay"
        ) from error
