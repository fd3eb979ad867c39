"""Load counts without names: numbers [layer, expert] in a .npy, in JSON, or in lines of a CSV, a line for each layer.

Which layers they are of is not stated: see `layers_of_rows`. Rows of numbers with a point, as `numpy.savetxt` writes
them, are read where they are whole.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.arrays import MAGIC, npy_array, read_header
from jaxmoe.traces.formats.expert_choices import layers_of_rows
from jaxmoe.traces.formats.source import Format, Hints, TraceSource, shown
from jaxmoe.traces.trace import LoadCounts, TraceError

_SEPARATOR = re.compile(r"\s*[,;\t]\s*| +")
_NUMBERS = re.compile(rb"[-+.,;0-9eE \t\r\n]+")


def _matches(source: TraceSource) -> bool:
    if source.path.is_dir():
        return False
    return _is_array(source) or _in_json(source) is not None or _is_csv(source)


def _is_array(source: TraceSource) -> bool:
    """Whether a file is one array of two axes."""
    if not source.head.startswith(MAGIC):
        return False
    with source.path.open("rb") as file:
        return len(read_header(file).shape) == 2


def _is_csv(source: TraceSource) -> bool:
    """Whether a file is a CSV by its name, or its first line is several numbers, separated by commas or the like."""
    if source.path.suffix == ".csv":
        return True
    with source.path.open("rb") as file:
        first = file.readline(2**20)
    return _NUMBERS.fullmatch(first) is not None and len(_cells(first.decode())) > 1


def _cells(line: str) -> list[str]:
    return _SEPARATOR.split(line.strip())


def _in_json(source: TraceSource) -> list[list[Any]] | None:
    """The rows of a JSON file that is a list of lists of numbers; `None` for any other."""
    if not source.head.lstrip().startswith(b"["):
        return None
    try:
        rows = source.values[0]
    except TraceError:
        return None
    held = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    return rows if held and all(type(one) in (int, float) for row in rows for one in row) else None


def _read(source: TraceSource, hints: Hints) -> LoadCounts:
    if source.head.startswith(MAGIC):
        array = npy_array(source.path.read_bytes())
    else:
        array = _table(_in_json(source) or _lines(source.path))
    counts = _whole(array)
    hints.agreed_experts(counts.shape[1])
    layers, kept = layers_of_rows(np.asarray(counts.any(axis=1)), hints)
    return LoadCounts(counts[None, kept], np.asarray(layers), hints.top_k, ("all",), {"source": source.path.name})


def _lines(path: Path) -> list[list[float]]:
    """The numbers in each line of a CSV."""
    rows = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if line.strip():
            try:
                rows.append([float(cell) for cell in _cells(line)])
            except ValueError:
                raise TraceError(
                    f"line {number} is {shown(line)}, expected counts of experts, numbers alone; leave out names of "
                    "columns and rows"
                ) from None
    return rows


def _table(rows: list[list[Any]]) -> np.ndarray:
    """Rows of one length as an array."""
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise TraceError(f"row {number} has {len(row)} numbers, row 0 has {len(rows[0])}; give one for each expert")
    return np.array(rows)


def _whole(array: np.ndarray) -> np.ndarray:
    """Counts as int64. Raises `TraceError` for numbers that are none."""
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    if array.dtype.kind != "f" or not (np.isfinite(array) & (array == np.floor(array)) & (abs(array) < 2**53)).all():
        raise TraceError(
            f"counts are of type {array.dtype}, expected whole numbers of tokens; give the counts themselves"
        )
    return array.astype(np.int64)


def _write(path: Path, loads: LoadCounts) -> list[str]:
    rows = loads.total().counts[0].tolist()
    with atomic_write(path) as aside:
        aside.write_text("[" + ",\n ".join(map(json.dumps, rows)) + "]\n")
    lost = {
        "layer_ids become positions": loads.layer_ids.tolist() != [*range(len(rows))],
        "windows are summed": len(loads.counts) > 1,
        "top_k is left out": loads.top_k is not None,
    }
    return [note for note, told in lost.items() if told]


LOAD_COUNTS = Format("bare_counts", _matches, _read, _write, suffix=".json")
