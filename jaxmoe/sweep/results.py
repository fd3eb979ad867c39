"""Results of a sweep in a folder: one Parquet file for each chunk, written atomically, and a manifest of the study.

All files have the same columns of the same types, so that the folder can be read as one dataset. `point` is the same
for equal values and `hash` for equal values and files that these name: where such a file has changed, rows of before go
when the point is wanted again, so that a point has one row.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.config.keys import is_number
from jaxmoe.experiment.metrics import SEARCHED, Row, columns
from jaxmoe.extras import install_command
from jaxmoe.files import atomic_write
from jaxmoe.registry import METRICS
from jaxmoe.sweep.analysis import Elasticities
from jaxmoe.sweep.compile_groups import Group, Refused
from jaxmoe.sweep.points import OWN, Point, Space, SweepError

POINTS, MANIFEST, STUDY, ELASTICITIES = "points", "manifest.json", "study.yaml", "elasticities.parquet"
AFTER = ("busiest_kind", "busiest_index", "comparable", "note", "jaxmoe_version")  # columns after those of metrics


def check_installed() -> None:
    """Raise `SweepError` where the package that writes results is missing."""
    if find_spec("pyarrow") is None:
        raise SweepError(f"jaxmoe sweep needs pyarrow; install it with: {install_command('sweep', 'pyarrow')}")


@dataclass
class Results:
    """The results of a study in a folder. `damaged` names files that could not be read and were set aside."""

    folder: Path
    space: Space
    damaged: list[str] = field(default_factory=list)
    _rows: dict[Path, dict[str, Row]] = field(default_factory=dict)  # that `open` has found, by hash
    _complete: set[str] = field(default_factory=set)  # hashes of rows with all that is wanted
    _found: dict[str, Row] = field(default_factory=dict)  # by searches, by hash
    _schemas: dict[Path, Any] = field(default_factory=dict)  # of the files that are there
    _schema: Any = None  # of all files from `begin` on

    def open(self) -> dict[str, Row]:
        """Read the rows in the folder, by hash, without those that lack a metric.

        Raises `SweepError` where the folder is of another study.
        """
        self._check_study()
        rows: dict[str, Row] = {}
        for path in sorted((self.folder / POINTS).glob("*.parquet")):
            self._rows[path] = {row["hash"]: row for row in self._read(path)}
            rows |= {key: row for key, row in self._rows[path].items() if not self._is_incomplete(row)}
        self._complete = {*rows}
        self._found = {
            row["hash"]: {column: row[column] for column in SEARCHED.values() if row.get(column) is not None}
            for row in self.there
        }
        return rows

    @property
    def there(self) -> list[Row]:
        """All rows that `open` has found."""
        return [row for rows in self._rows.values() for row in rows.values()]

    def begin(self, points: Sequence[Point], text: frozenset[str]) -> None:
        """Write down what study the folder is of, and give files that are there the columns of all. Before `write`.

        Rows that others have taken the place of go. `text` names columns of text.
        """
        import pyarrow as pa

        (self.folder / POINTS).mkdir(exist_ok=True)
        there = [name for schema in self._schemas.values() for name in schema.names]
        new = ["hash", "point", *(key for point in points for key in point.values), *columns().values(), *AFTER]
        self._schema = pa.schema([(name, _kind(name, text)) for name in dict.fromkeys([*there, *new])])
        wanted = {point.values_hash: point.hash for point in points}
        for path, schema in self._schemas.items():
            dropped = {
                key
                for key, row in self._rows[path].items()
                if (key in self._complete and self._is_incomplete(row))  # of before, where a kill came between
                or wanted.get(row.get("point") or "", key) != key
            }
            if not _measured() <= {*schema.names}:  # of before a metric was there: null would say not stated
                dropped |= {*wanted.values()} & self._rows[path].keys() - self._complete
            if dropped or not schema.equals(self._schema):
                self._conform(path, dropped)
        with atomic_write(self.folder / STUDY) as aside:
            aside.write_bytes(self.space.study.path.read_bytes())
        manifest = {
            "study": self.space.study.config.name,
            "base": str(self.space.study.scenario),
            "identity": self.space.identity,
            "metrics": [*columns().values()],
            "versions": versions(),
        }
        with atomic_write(self.folder / MANIFEST) as aside:
            aside.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

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

    def with_earlier(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, with what searches have found before and this study does not ask for."""
        return [row | {c: v for c, v in self._found.get(row["hash"], {}).items() if row[c] is None} for row in rows]

    def _is_incomplete(self, row: Row) -> bool:
        """Whether a row has some metrics, but not all that are wanted. Those of a case that cannot be have none.

        Not every machine states what all metrics need.
        """
        always = tuple(metric.column for metric in METRICS.values() if metric.part is None)
        wanted = (*always, *(SEARCHED[name] for name in self.space.study.searched))
        some = any(row.get(column) is not None for column in always)
        return some and (not _measured() <= row.keys() or any(row.get(column) is None for column in wanted))

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

    def _replace(self, path: Path, table: Any) -> None:
        from pyarrow import parquet

        # Aside is outside of the folder that others read whole.
        aside = self.folder / f".{path.name}.part"
        try:
            parquet.write_table(table, aside, write_page_checksum=True)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def write_elasticities(self, answers: Sequence[Elasticities]) -> None:
        """Write `elasticities.parquet`: a row for each point, metric and number, in place of an older one."""
        import pyarrow as pa
        from pyarrow import parquet

        columns: dict[str, list[Any]] = {"hash": [], "metric": [], "key": [], "elasticity": []}
        for answer in answers:
            for point, table in zip(answer.points, answer.values, strict=True):
                for metric, row in zip(METRICS, table, strict=True):
                    if METRICS[metric].part is not None and np.isnan(row).all():
                        continue  # the machine does not state it
                    columns["hash"] += [point.hash] * len(row)
                    columns["metric"] += [metric] * len(row)
                    columns["key"] += answer.keys
                    columns["elasticity"] += row.tolist()
        with atomic_write(self.folder / ELASTICITIES) as aside:
            parquet.write_table(pa.table(columns), aside)

    def _check_study(self) -> None:
        for leftover in self.folder.glob(".*.parquet.part"):
            leftover.unlink()
        manifest = self.folder / MANIFEST
        if not manifest.exists():
            if any((self.folder / POINTS).glob("*")):
                raise SweepError(f"--out: {self.folder / POINTS} holds files of something else; give another folder")
            return
        try:
            known = json.loads(manifest.read_text(encoding="utf-8"))
            identity, base = known["identity"], known["base"]
        except (ValueError, KeyError, TypeError):
            raise SweepError(f"--out: {manifest} is not that of a sweep; give another folder") from None
        if identity != self.space.identity:
            raise SweepError(
                f"--out: {self.folder} holds results of another study, on {base} with other values of its own or other "
                "layers; give another folder"
            )

    def _read(self, path: Path) -> list[Row]:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            # The file alone: pyarrow would take parts of the path for columns.
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                table = file.read()
            if not {"hash", *AFTER} <= set(table.column_names):
                raise pa.ArrowInvalid("columns are missing")
            rows = table.to_pylist()
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


def _kind(name: str, text: frozenset[str]) -> Any:
    import pyarrow as pa

    if name in text:
        return pa.string()
    return {"busiest_index": pa.int64(), "comparable": pa.bool_()}.get(name, pa.float64())


TEXT = frozenset({"hash", "point", "strategy", "exchange", "busiest_kind", "note", "jaxmoe_version"})


def text_columns(points: Sequence[Point], rows: Sequence[Row]) -> frozenset[str]:
    """Columns of text: whatever has a value that is no number, in the study or among rows that are there.

    Raises `SweepError` where there are numbers in a column that now has to be text: a dataset has one type for each.
    """
    keys = dict.fromkeys(key for point in points for key in point.values)
    needed = {key for key in keys if any(not _is_numeric(point.values.get(key)) for point in points)} | TEXT
    there = {key for row in rows for key, value in row.items() if isinstance(value, str)}
    for key in sorted(needed - there):
        if any(is_number(row.get(key)) for row in rows):
            raise SweepError(f"--out: there are results with numbers at {key}, now it has others; give another folder")
    return frozenset(needed | there)


def _is_numeric(value: object) -> bool:
    return value is None or is_number(value)


def row_of(point: Point, group: Group | Refused, text: frozenset[str]) -> Row:
    """A point without metrics: its hash, its values, and what there is to know of its group."""
    values = {key: _cell(value, key in text) for key, value in point.values.items()}
    if isinstance(group, Refused):
        comparable, note = False, group.reason
    else:
        comparable, note = group.strategy.comparable, group.strategy.note
        if values["exchange"] == OWN:
            values["exchange"] = group.exchange
        if group.system is not None:
            values["strategy"] = f"{group.system.name} on {group.strategy.name}"
    return {
        "hash": point.hash,
        "point": point.values_hash,
        **values,
        **dict.fromkeys(columns().values()),
        "busiest_kind": None,
        "busiest_index": None,
        "comparable": comparable,
        "note": note,
        "jaxmoe_version": _version("jaxmoe"),
    }


def _measured() -> set[str]:
    """Columns of metrics that every row has."""
    return {metric.column for metric in METRICS.values()}


def with_metrics(
    row: Row, metrics: np.ndarray, busiest: tuple[str | None, int | None], found: Mapping[str, float]
) -> Row:
    """The row with what was measured, in the order of `METRICS`, and what searches have `found`, by name.

    What the machine does not state is left out.
    """
    numbers = {
        metric.column: None if metric.part is not None and np.isnan(value) else float(value)
        for metric, value in zip(METRICS.values(), metrics, strict=True)
    }
    numbers |= {SEARCHED[name]: found[name] for name in found}
    return row | numbers | {"busiest_kind": busiest[0], "busiest_index": busiest[1]}


def _cell(value: Any, is_text: bool) -> Any:
    """The value as its column has it; lists and mappings as JSON."""
    if not is_text:
        return None if value is None else float(value)
    return value if isinstance(value, str) else json.dumps(value)


_version = cache(version)


def versions() -> dict[str, str]:
    """Versions of the packages that compute a row."""
    return {name: _version(name) for name in ("jaxmoe", "jax", "jaxlib", "numpy")}
