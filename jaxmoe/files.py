"""Files and folders that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields where to write a file or a folder; on leaving it takes the place of an older one of that name."""
    aside, older = path.with_name(path.name + ".part"), path.with_name(path.name + ".old")
    _remove(aside)
    try:
        yield aside
        if path.is_dir():
            _remove(older)
            path.rename(older)  # nothing takes the place of a folder that is not empty
        aside.replace(path)
    finally:
        _remove(aside)
        if path.exists():
            _remove(older)
        elif older.exists():
            older.rename(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
