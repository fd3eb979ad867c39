"""Results of a study of layers in a folder: rows with metrics in chunk files, and a manifest of the study.

`point` is the same for equal values and `hash` for equal values and files that these name: where such a file has
changed, rows of before go when the point is wanted again, so that a point has one row.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.config.keys import is_number
from jaxmoe.experiment.metrics import SEARCHED, Row, columns
from jaxmoe.files import atomic_write
from jaxmoe.registry import METRICS
from jaxmoe.sweep.analysis import Elasticities
from jaxmoe.sweep.chunks import ChunkFiles, check_study, version_of, write_study
from jaxmoe.sweep.compile_groups import Group, Refused
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import OWN, Space, SweepError

ELASTICITIES = "elasticities.parquet"
AFTER = ("busiest_kind", "busiest_index", "comparable", "note", "jaxmoe_version")  # columns after those of metrics


class Results(ChunkFiles):
    """The results of a study of layers in a folder."""

    def __init__(self, folder: Path, space: Space) -> None:
        super().__init__(folder, {"hash", *AFTER})
        self.space = space
        self._complete: set[str] = set()  # hashes of rows with all that is wanted
        self._found: dict[str, Row] = {}  # by searches, by hash

    def open(self) -> dict[str, Row]:
        """Read the rows in the folder, by hash, without those that lack a metric.

        Raises `SweepError` where the folder is of another study.
        """
        check_study(self.folder, self.space, self.space.identity)
        rows = {key: row for key, row in self.read().items() if not self._is_incomplete(row)}
        self._complete = {*rows}
        self._found = {
            row["hash"]: {column: row[column] for column in SEARCHED.values() if row.get(column) is not None}
            for row in self.there
        }
        return rows

    def begin(self, points: Sequence[Point], text: frozenset[str]) -> None:
        """Write down what study the folder is of, and give files that are there the columns of all. Before `write`.

        Rows that others have taken the place of go. `text` names columns of text.
        """
        wanted = {point.values_hash: point.hash for point in points}

        def dropped(path: Path, schema: Any) -> set[str]:
            gone = {
                key
                for key, row in self._rows[path].items()
                if (key in self._complete and self._is_incomplete(row))  # of before, where a kill came between
                or wanted.get(row.get("point") or "", key) != key
            }
            if not _measured() <= {*schema.names}:  # of before a metric was there: null would say not stated
                gone |= {*wanted.values()} & self._rows[path].keys() - self._complete
            return gone

        new = ["hash", "point", *(key for point in points for key in point.values), *columns().values(), *AFTER]
        self.conform(new, text, dropped)
        write_study(self.folder, self.space, self.space.identity, [*columns().values()])

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
    values = {key: cell(value, key in text) for key, value in point.values.items()}
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
        "jaxmoe_version": version_of("jaxmoe"),
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


def cell(value: Any, is_text: bool) -> Any:
    """The value as its column has it; lists and mappings as JSON."""
    if not is_text:
        return None if value is None else float(value)
    return value if isinstance(value, str) else json.dumps(value)
