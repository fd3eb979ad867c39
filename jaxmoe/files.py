"""Files and folders that appear whole or not at all, and the tables among them."""

import csv
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from pathlib import Path
from threading import RLock
from typing import Any

PNG = ".png"
as_pdf_too: ContextVar[bool] = ContextVar("as_pdf_too", default=False)  # pictures, beside each PNG
_written: list[Path] = []  # what is being written
_writing = RLock()


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields where to write a file or a folder; on leaving it takes the place of an older one of that name."""
    aside, older = _beside(path)
    with _writing:
        _written.append(path)
        remove(aside)
    try:
        yield aside
        with _writing:
            if path.is_dir():
                remove(older)
                path.rename(older)  # nothing takes the place of a folder that is not empty
            aside.replace(path)
    finally:
        with _writing:
            _tidy(path)
            _written.remove(path)


def abandon_writes() -> None:
    """Remove what is half written, and let no other thread write anything more: this process is about to end."""
    _writing.acquire()
    for path in _written:
        _tidy(path)


def _beside(path: Path) -> tuple[Path, Path]:
    """Where a file or folder is written, and where an older one is meanwhile."""
    return path.with_name(path.name + ".part"), path.with_name(path.name + ".old")


def _tidy(path: Path) -> None:
    aside, older = _beside(path)
    remove(aside)
    if path.exists():
        remove(older)
    elif older.exists():
        older.rename(path)


def write_table(
    path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None, digits: int | None = None
) -> None:
    """Writes rows as a CSV file that appears whole, and makes its folder.

    Columns are those of all rows in the order in which they first occur, unless given. A row without a column has it
    empty; one with a column that is not among those given is a `ValueError`. Numbers that are not whole have so many
    significant `digits`, or all.
    """
    if columns is None:
        rows = list(rows)
        columns = list(dict.fromkeys(column for row in rows for column in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows({column: cell_text(value, digits) for column, value in row.items()} for row in rows)


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as text, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cell_text(value: object, digits: int | None) -> str:
    """A value as `write_table` writes it."""
    if digits is None or not isinstance(value, Real) or isinstance(value, Integral):
        return "" if value is None else str(value)
    return f"{float(value):.{digits}g}"


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
