"""Chunks of a sweep over deployments in a folder, a file each: a sweep that was stopped goes on with those missing."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxmoe.extras import check_parquet
from jaxmoe.files import atomic_write
from jaxmoe.sweep.chunks import writing

CHUNKS = "chunks"
Columns = dict[str, list[Any]]


@dataclass
class Chunks:
    """Columns of chunks by what they were worked out from; without a `folder` nothing is kept."""

    folder: Path | None
    known: int = 0  # chunks that were there
    _used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.folder is not None:
            check_parquet()

    def columns(self, identity: Iterable[bytes], made: Callable[[], Columns]) -> Columns:
        """The columns of a chunk: those of its file, or what `made` returns, which is written."""
        if self.folder is None:
            return made()
        found = sha256(version("jaxmoe").encode())
        for part in identity:
            found.update(part)
        path = self.folder / CHUNKS / f"{found.hexdigest()[:16]}.parquet"
        self._used.add(path.name)
        there = _read(path)
        if there is not None:
            self.known += 1
            return there
        columns = made()
        with writing(self.folder):
            _write(path, columns)
        return columns

    def end(self) -> None:
        """Drop chunks of earlier studies in the folder."""
        for path in () if self.folder is None else (self.folder / CHUNKS).glob("*.parquet"):
            if path.name not in self._used:
                path.unlink()


def _read(path: Path) -> Columns | None:
    """The columns of a file; none where it is missing or was damaged, so that it is made anew."""
    import pyarrow as pa
    from pyarrow import parquet

    with suppress(OSError, pa.ArrowException), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns: Columns = file.read().to_pydict()
        return columns
    return None


def _write(path: Path, columns: Columns) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as aside:
        parquet.write_table(pa.table(columns), aside, write_page_checksum=True)
