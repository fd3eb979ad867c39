"""Measured tables from Parquet or CSV files: which kind each is, and what is wrong with it.

The layout is that of aiconfigurator: SYSTEM/KIND/BACKEND_VERSION/*.parquet, latencies in ms.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.exchange_tables import ExchangeTable, exchange_table, is_exchange
from jaxmoe.experiment.measured_kernels.kinds import KINDS, Columns, Kind
from jaxmoe.experiment.measured_kernels.token_counts import BALANCED, known_distribution
from jaxmoe.extras import install_command
from jaxmoe.files import atomic_write
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES

EXCHANGES = "wideep_deepep"  # files of DeepEP's, which are no kernels: see exchange_tables.py
BACKENDS = ("sglang", "vllm", "trtllm", "")  # "" where an older table names none
PRECISIONS = ("gemm_dtype", "moe_dtype", "attn_dtype", "kv_cache_dtype", "gemm_type", "nccl_dtype", "allreduce_dtype")


@dataclass(frozen=True)
class MeasuredTable:
    """A table of one kind: all its columns by name, [row], with numbers as such and backends in lower case.

    `given` are the columns as they stand in the file.
    """

    path: Path
    kind: Kind
    columns: Columns
    given: Columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def seconds(self) -> np.ndarray:
        """Measured seconds of every row."""
        return np.asarray(self.columns[self.kind.latency], float) * self.kind.unit


def read_folder(folder: Path) -> list[MeasuredTable]:
    """All tables of kernels below the folder of one system.

    Raises `OptionError` where there are none, not even of exchanges, or where one is wrong.
    """
    every = sorted(folder.glob("**/*.parquet"))
    if not every:
        raise OptionError(f"{folder}: has no table of kernels; give a folder SYSTEM with KIND/BACKEND/*.parquet in it")
    return [read_table(path) for path in every if not path.name.startswith(EXCHANGES)]


def read_exchange_folder(folder: Path) -> list[ExchangeTable]:
    """All tables of DeepEP below the folder of one system. Raises `OptionError` where one is wrong."""
    return [exchange_table(path, read_columns(path)) for path in sorted(folder.glob(f"**/{EXCHANGES}*.parquet"))]


def read_table(path: Path, timed: bool = True) -> MeasuredTable:
    """One table, checked; without `timed` its times need not be there.

    Raises `OptionError` naming file, column and remedy.
    """
    columns = read_columns(path)
    kind = _kind_of(path, columns, timed)
    texts = {*kind.texts, *kind.optional, *kind.kernel}
    rows = len(next(iter(columns.values())))
    if not rows:
        raise OptionError(f"{path}: has no rows; give a table with a row for each measurement")
    read: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        read[name] = np.asarray(values).astype(str) if name in texts else np.asarray(values)
    for name in kind.optional:
        read.setdefault(name, np.full(rows, ""))
    if "framework" in read:
        read["framework"] = np.char.lower(read["framework"])
    for name in kind.numbers:
        read[name] = _numbers(path, name, read[name], name in kind.zeros)
        _refuse(path, read[name] % 1 != 0, f"{name} is no whole number")
    for told, wrong in kind.refused:
        _refuse(path, wrong(read), told)
    if timed:
        read[kind.latency] = _numbers(path, kind.latency, read[kind.latency], False)
    for name in PRECISIONS:
        unknown = sorted(set(read[name].tolist()) - set(WEIGHT_BYTES)) if name in kind.kernel else []
        if unknown:
            raise OptionError(f"{path}: {name} is {unknown[0]!r}, expected one of {', '.join(WEIGHT_BYTES)}")
    for name in sorted(set(read["distribution"].tolist()) if "distribution" in kind.texts else ()):
        if not known_distribution(name.removesuffix(BALANCED) if "num_slots" in kind.numbers else name):
            raise OptionError(f"{path}: distribution is {name!r}, expected balanced, uniform or power_law_ALPHA")
    read |= {name: made(read) for name, made in kind.derived}
    return MeasuredTable(path, kind, read, columns)


def _refuse(path: Path, wrong: np.ndarray, told: str) -> None:
    if wrong.any():
        raise OptionError(f"{path}: {told} in row {int(np.argmax(wrong)) + 1}, and {int(wrong.sum())} rows are so")


def _numbers(path: Path, name: str, values: np.ndarray, zero: bool) -> np.ndarray:
    try:
        numbers = values.astype(float)
    except ValueError:
        raise OptionError(f"{path}: the column {name} has a value that is no number; write numbers") from None
    wrong = ~(np.isfinite(numbers) & ((numbers >= 0) if zero else (numbers > 0)))
    if wrong.any():
        row, value = int(np.flatnonzero(wrong)[0]), numbers[wrong][0]
        raise OptionError(
            f"{path}: {name} is {value:g} in row {row + 1}, and {int(wrong.sum())} rows are so; "
            f"remove what is not {'0 or more' if zero else 'above 0'}"
        )
    return numbers


def _kind_of(path: Path, columns: Columns, timed: bool) -> Kind:
    """The kind whose columns are all there, the one with the most of them."""
    if is_exchange(columns):
        raise OptionError(f"{path}: is of DeepEP's exchanges, not of kernels; name it {EXCHANGES}_NAME.parquet")
    operations = set(map(str, columns.get("op_name", ())))
    known = {name for kind in KINDS.values() for name in kind.operations}
    if operations and not operations & known:
        raise OptionError(f"{path}: op_name is {min(operations)!r}, which has no model; leave the table out")
    missing: dict[str, list[str]] = {}
    for kind in KINDS.values():
        if kind.operations and not operations & set(kind.operations):
            continue
        asked = [*kind.columns, *([kind.latency] if timed else [])]
        missing[kind.name] = [name for name in asked if name not in columns]
    whole = [name for name, left in missing.items() if not left]
    if whole:
        kind = KINDS[max(whole, key=lambda name: len(KINDS[name].columns))]
        if kind.operations and (unknown := sorted(operations - set(kind.operations))):
            raise OptionError(f"{path}: op_name is {unknown[0]!r}, expected one of {', '.join(kind.operations)}")
        return kind
    nearest = min(missing, key=lambda name: len(missing[name])) if missing else None
    if nearest is None or len(missing[nearest]) > 3:
        raise OptionError(
            f"{path}: has the columns {', '.join(columns)}, which are of no kind that is known: {', '.join(KINDS)}"
        )
    raise OptionError(f"{path}: lacks {', '.join(missing[nearest])} of a table of kind {nearest}; add what is missing")


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """All columns of a Parquet or CSV file as they are. Raises `OptionError` for a file that is none."""
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                lines = list(csv.DictReader(file))
            names = lines[0] if lines else ("",)
            return {name: np.array([line[name] for line in lines]) for name in names}
        parquet = _parquet()
        table = parquet.read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    except OptionError:
        raise
    except Exception as error:  # of pyarrow, of the file system, of a coding
        raise OptionError(f"{path}: cannot be read ({error}); give a Parquet or CSV file") from None


def write_columns(path: Path, columns: Columns) -> None:
    """Columns as a Parquet file or, by the name, CSV."""
    with atomic_write(path) as aside:
        if path.suffix == ".csv":
            with aside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(zip(*columns.values(), strict=True))
            return
        import pyarrow as pa

        _parquet().write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), aside)


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise OptionError(f"Parquet needs pyarrow; install it with: {install_command('gpu', 'pyarrow')}") from None
    return parquet
