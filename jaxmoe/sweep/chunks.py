"""Rows of a sweep in a folder: one Parquet file for each chunk, written atomically, all with the same columns.

So the folder can be read as one dataset at any time, and a sweep that is killed loses the chunk that it was at.
"""

import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxmoe.experiment.metrics import Row
from jaxmoe.files import atomic_write
from jaxmoe.sweep.points import Space, SweepError

POINTS, MANIFEST, STUDY = "points", "manifest.json", "study.yaml"
KINDS = {"busiest_index": "int64", "comparable": "bool_"}  # of columns; others hold text or float64

version_of = cache(version)


class ChunkFiles:
    """The rows in a folder, each known by its `hash`. `needed` are columns that every file has.

    `damaged` names files that could not be read and were set aside.
    """

    def __init__(self, folder: Path, needed: Collection[str]) -> None:
        self.folder, self.needed = folder, {*needed}
        self.damaged: list[str] = []
        self._rows: dict[Path, dict[str, Row]] = {}  # that `read` has found, by hash
        self._schemas: dict[Path, Any] = {}  # of the files that are there
        self._schema: Any = None  # of all files from `conform` on

    def read(self) -> dict[str, Row]:
        """All rows, by hash."""
        for leftover in self.folder.glob(".*.parquet.part"):
            leftover.unlink()
        for path in sorted((self.folder / POINTS).glob("*.parquet")):
            self._rows[path] = {row["hash"]: row for row in self._read(path)}
        return {key: row for rows in self._rows.values() for key, row in rows.items()}

    @property
    def there(self) -> list[Row]:
        """All rows that `read` has found."""
        return [row for rows in self._rows.values() for row in rows.values()]

    def conform(
        self,
        columns: Iterable[str],
        text: Collection[str],
        dropped: Callable[[Path, Any], set[str]] = lambda path, schema: set(),
    ) -> None:
        """Give files that are there these columns too, those of `text` for text. Before `write`.

        `dropped` tells the rows that go, by their hashes, of a file with its schema.
        """
        import pyarrow as pa

        (self.folder / POINTS).mkdir(exist_ok=True)
        there = [name for schema in self._schemas.values() for name in schema.names]
        kinds = {name: "string" if name in text else KINDS.get(name, "float64") for name in (*there, *columns)}
        self._schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in kinds.items()])
        for path, schema in self._schemas.items():
            gone = dropped(path, schema)
            if gone or not schema.equals(self._schema):
                self._conform(path, gone)

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows as one file, once rows of the same points are gone that were there and lack something.

        In this order no moment has a point twice: a kill in between loses these rows alone, which lacked something.
        """
        import pyarrow as pa

        columns = [pa.array([row.get(column.name) for row in rows], type=column.type) for column in self._schema]
        table = pa.table(columns, schema=self._schema).replace_schema_metadata({"versions": json.dumps(versions())})
        name = sha256("".join(row["hash"] for row in rows).encode()).hexdigest()[:16]
        path = self.folder / POINTS / f"{name}.parquet"
        written = {row["hash"] for row in rows}
        for other, there in self._rows.items():
            again = written & there.keys() if other != path else set()
            if again:
                self._conform(other, again)
                for key in again:
                    del there[key]
        self._replace(path, table)

    def _conform(self, path: Path, dropped: set[str]) -> None:
        """Give a file the columns of all, without some rows."""
        import pyarrow as pa
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            table = file.read()
        table = table.filter(pa.array([key not in dropped for key in table.column("hash").to_pylist()], pa.bool_()))
        columns = [
            table.column(column.name).cast(column.type)
            if column.name in table.column_names
            else pa.nulls(len(table), column.type)
            for column in self._schema
        ]
        kept = pa.table(columns, schema=self._schema).replace_schema_metadata(table.schema.metadata)
        if len(kept):
            self._replace(path, kept)
        else:
            path.unlink()

    def _replace(self, path: Path, table: object) -> None:
        from pyarrow import parquet

        # Aside is outside of the folder that others read whole.
        aside = self.folder / f".{path.name}.part"
        try:
            parquet.write_table(table, aside, write_page_checksum=True)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def _read(self, path: Path) -> list[Row]:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            # The file alone: pyarrow would take parts of the path for columns.
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                table = file.read()
            if not self.needed <= set(table.column_names):
                raise pa.ArrowInvalid("columns are missing")
            rows: list[Row] = table.to_pylist()
            self._schemas[path] = table.schema
            return rows
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's, while damage has no number
                reason = os.strerror(error.errno)
                raise SweepError(f"--out: cannot read {path}: {reason}; put that right and run again") from None
            aside = self.folder / f"{path.name}.damaged"
            os.replace(path, aside)
            self.damaged.append(aside.name)
            return []


def check_study(folder: Path, space: Space, identity: str) -> None:
    """Raise `SweepError` where the folder is of another study."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        if any((folder / POINTS).glob("*")):
            raise SweepError(f"--out: {folder / POINTS} holds files of something else; give another folder")
        return
    try:
        known = json.loads(manifest.read_text(encoding="utf-8"))
        found, base = known["identity"], known["base"]
    except (ValueError, KeyError, TypeError):
        raise SweepError(f"--out: {manifest} is not that of a sweep; give another folder") from None
    if found != identity:
        raise SweepError(
            f"--out: {folder} holds results of another study, on {base} with other values of its own or other "
            "layers; give another folder"
        )


def write_study(folder: Path, space: Space, identity: str, metrics: Sequence[str], **facts: str) -> None:
    """Write down what study the folder is of."""
    with atomic_write(folder / STUDY) as aside:
        aside.write_bytes(space.study.path.read_bytes())
    manifest: Mapping[str, Any] = {
        "study": space.study.config.name,
        "base": str(space.study.scenario),
        "identity": identity,
        "metrics": [*metrics],
        **facts,
        "versions": versions(),
    }
    with atomic_write(folder / MANIFEST) as aside:
        aside.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of the packages that compute a row."""
    return {name: version_of(name) for name in ("jaxmoe", "jax", "jaxlib", "numpy")}


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
