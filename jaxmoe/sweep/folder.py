"""A folder of a sweep read on its own: its rows, and the analyses that need neither study nor scenario."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.experiment.metrics import Row, column_of, columns, is_finite
from jaxmoe.extras import check_parquet
from jaxmoe.sweep.analysis import Winner, pareto, winners
from jaxmoe.sweep.chunks import MANIFEST, POINTS, STUDY
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import SweepError
from jaxmoe.sweep.results import AFTER, ELASTICITIES

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class SweepFolder:
    """Content of a sweep's folder. `metrics` are names of metrics that some row has."""

    path: Path
    manifest: dict[str, Any]
    rows: list[Row]
    metrics: list[str]

    def able(self, names: Sequence[str]) -> list[int]:
        """Rows that have these metrics and can be compared."""
        columns = [column_of(name) for name in names]
        return [
            index
            for index, row in enumerate(self.rows)
            if row["comparable"] and all(is_finite(row[column]) for column in columns)
        ]

    @property
    def keys(self) -> list[str]:
        """Columns of values that points were given: axes, what is derived from them, strategy and exchange."""
        told = {"hash", "point", *self.manifest["metrics"], *columns().values(), *AFTER}
        return [key for key in self.rows[0] if key not in told]

    @property
    def axes(self) -> list[str]:
        """Keys in which points differ."""
        return [key for key in self.keys if len({row[key] for row in self.rows}) > 1]

    @property
    def study(self) -> str:
        """The study file, as it was."""
        path = self.path / STUDY
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def fronts(self, names: Sequence[str]) -> dict[tuple[str, str], list[str]]:
        """Hashes of the Pareto front of every two of these metrics, by the first of them."""
        pairs = list(combinations(names, 2))
        return {pair: [row["hash"] for row in pareto(self.rows, pair)] for pair in pairs}

    def winners(self, name: str) -> list[Winner]:
        """The best of the points that differ in strategy and exchange alone, by a metric."""
        points = [Point({key: row[key] for key in self.keys}) for row in self.rows]
        return winners(points, self.rows, name)

    def elasticities(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """By metric and number: its elasticity at the 5th percentile of points, in the median, and at the 95th.

        Empty where elasticities were not asked for.
        """
        path = self.path / ELASTICITIES
        if not path.exists():
            return {}
        table = _table(path)
        metric, key = (np.array(table.column(name).to_pylist()) for name in ("metric", "key"))
        value = table.column("elasticity").to_numpy()
        found: dict[str, dict[str, tuple[float, float, float]]] = {}
        for name in self.metrics:
            for number in dict.fromkeys(key[metric == name].tolist()):
                some = value[(metric == name) & (key == number) & np.isfinite(value)]
                if some.size:
                    low, middle, high = np.quantile(some, QUANTILES)
                    found.setdefault(name, {})[number] = (float(low), float(middle), float(high))
        return found


def read_sweep(path: Path) -> SweepFolder:
    """Read a sweep's folder, also of a sweep that was stopped. Raises `SweepError` where there is nothing to read."""
    check_parquet()
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        _ = [*manifest["metrics"]], manifest["study"]
        kind = manifest.get("kind")
    except (ValueError, KeyError, TypeError):
        raise SweepError(f"{path / MANIFEST} is not that of a sweep; run the sweep again into another folder") from None
    if kind is not None:
        raise SweepError(f"{path} is of a sweep over {kind}, which has no page; see its tables and pictures")
    rows = {row["hash"]: row for file in sorted((path / POINTS).glob("*.parquet")) for row in _table(file).to_pylist()}
    if not rows:
        raise SweepError(f"{path} holds no points of a sweep yet; run the sweep again, and it goes on")
    metrics = [name for name, column in columns().items() if any(is_finite(row.get(column)) for row in rows.values())]
    return SweepFolder(path, manifest, list(rows.values()), metrics)


def _table(path: Path) -> Any:
    """A Parquet file. Raises `SweepError` where it cannot be read."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # The file alone: pyarrow would take parts of the path for columns.
        with parquet.ParquetFile(path) as file:
            return file.read()
    except (pa.ArrowException, OSError) as error:
        raise SweepError(f"{path} cannot be read: {error}; run the sweep again, which replaces it") from None
