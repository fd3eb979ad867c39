"""Results of a sweep in a folder: a Parquet file for each chunk, there whole or not at all, and what study it is of."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.sweep.answers import Elasticities
from jaxmoe.sweep.groups import Group
from jaxmoe.sweep.metrics import METRICS, Row
from jaxmoe.sweep.points import OWN, Point, Space, SweepError, is_number

POINTS, MANIFEST, STUDY, ELASTICITIES = "points", "manifest.json", "study.yaml", "elasticities.parquet"
COLUMNS = tuple(metric.column for metric in METRICS.values())


def check_installed() -> None:
    """Raise `SweepError` where the package that writes results is missing."""
    if find_spec("pyarrow") is None:
        raise SweepError("jaxmoe sweep needs pyarrow; install it with: pip install 'jaxmoe[sweep]'")


@dataclass
class Results:
    """The results of a study in a folder. `damaged` names files that could not be read and were set aside."""

    folder: Path
    space: Space
    damaged: list[str] = field(default_factory=list)

    def open(self) -> dict[str, Row]:
        """Rows that are there, by hash. Raises `SweepError` where they are of another study."""
        self._check_study()
        rows: dict[str, Row] = {}
        for path in sorted((self.folder / POINTS).glob("*.parquet")):
            rows |= {row["hash"]: row for row in self._read(path)}
        return rows

    def begin(self) -> None:
        """Write down what study the folder is of. Before the first chunk."""
        (self.folder / POINTS).mkdir(exist_ok=True)
        with atomic_write(self.folder / STUDY) as aside:
            aside.write_bytes(self.space.study.path.read_bytes())
        manifest = {
            "study": self.space.study.config.name,
            "base": str(self.space.study.scenario),
            "identity": self.space.identity,
            "metrics": list(COLUMNS),
            "versions": versions(),
        }
        with atomic_write(self.folder / MANIFEST) as aside:
            aside.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    def write(self, rows: Sequence[Row], text: frozenset[str]) -> None:
        """Write rows as one file. Those of the same points take the place of each other. `text` names columns."""
        import pyarrow as pa
        from pyarrow import parquet

        fields = [(name, _kind(name, text)) for name in rows[0]]
        table = pa.table({name: pa.array([row[name] for row in rows], type=kind) for name, kind in fields})
        table = table.replace_schema_metadata({"versions": json.dumps(versions())})
        name = sha256("".join(row["hash"] for row in rows).encode()).hexdigest()[:16]
        # Aside is outside of the folder that others read whole.
        aside = self.folder / f".{name}.parquet.part"
        try:
            parquet.write_table(table, aside, write_page_checksum=True)
            os.replace(aside, self.folder / POINTS / f"{name}.parquet")
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
            if not {"hash", *COLUMNS} <= set(table.column_names):
                raise pa.ArrowInvalid("columns are missing")
            return table.to_pylist()
        except (pa.ArrowException, OSError):
            aside = self.folder / f"{path.name}.damaged"
            os.replace(path, aside)
            self.damaged.append(aside.name)
            return []


def _kind(name: str, text: frozenset[str]) -> Any:
    import pyarrow as pa

    if name in text:
        return pa.string()
    return {"busiest_index": pa.int64(), "comparable": pa.bool_()}.get(name, pa.float64())


TEXT = frozenset({"hash", "strategy", "exchange", "busiest_kind", "note", "jaxmoe_version"})


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


def _is_numeric(value: Any) -> bool:
    return value is None or is_number(value)


def row_of(point: Point, group: Group, text: frozenset[str]) -> Row:
    """A point without metrics: its hash, its values, and what there is to know of its group."""
    values = {key: _cell(value, key in text) for key, value in point.values.items()}
    if values["exchange"] == OWN and group.setting is not None:
        values["exchange"] = group.exchange
    strategy = group.strategy
    return {
        "hash": point.hash,
        **values,
        **dict.fromkeys(COLUMNS),
        "busiest_kind": None,
        "busiest_index": None,
        "comparable": strategy is not None and strategy.comparable,
        "note": group.reason if strategy is None else strategy.note,
        "jaxmoe_version": version("jaxmoe"),
    }


def with_metrics(row: Row, metrics: np.ndarray, busiest: tuple[str, int]) -> Row:
    """The row with what was measured, in the order of `METRICS`."""
    numbers = dict(zip(COLUMNS, map(float, metrics), strict=True))
    return row | numbers | {"busiest_kind": busiest[0], "busiest_index": busiest[1]}


def _cell(value: Any, is_text: bool) -> Any:
    """The value as its column has it; lists and mappings as JSON."""
    if not is_text:
        return None if value is None else float(value)
    return value if isinstance(value, str) else json.dumps(value)


def versions() -> dict[str, str]:
    """Of what computed a row."""
    return {name: version(name) for name in ("jaxmoe", "jax", "jaxlib", "numpy")}
