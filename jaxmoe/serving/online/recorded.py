"""Requests of recorded services: files of several layouts, told by the names of their columns."""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from jaxmoe.errors import InputError
from jaxmoe.serving.online.requests import Requests


class Layout(NamedTuple):
    """Columns of a layout: the arrival of a request, and its tokens. One unit of its clock is so many `seconds`.

    `blocks` is the column of the names of its prompt's blocks. Rows of a layout that is not `by_time` are sorted.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    seconds: float = 1.0
    blocks: str | None = None
    by_time: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        return self.arrival, self.prompt, self.output, *([self.blocks] if self.blocks else [])


LAYOUTS = (
    Layout("Mooncake", "timestamp", "input_length", "output_length", 1e-3, "hash_ids"),
    Layout("vLLM's benchmark", "queued_ts", "input_toks", "output_toks", by_time=False),  # in the order of its clients
    Layout("Splitwise", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    Layout("Azure, arrays", "arrival_100ns", "context_tokens", "generated_tokens", 1e-7),
    Layout("any other", "arrival_s", "prompt_tokens", "output_tokens"),
)
MOST_TOKENS = 2**31 - 1


def read_requests(path: Path, most: int | None = None) -> Requests:
    """The requests of a .jsonl, .csv or .npz file, the first `most` of them; times count from the first.

    Raises `InputError` for a file of no known layout, for rows without one of its numbers, and as `Requests` does.
    """
    rows = _rows(path)
    first = next(iter(rows), None)
    if first is None:
        raise InputError(f"{path.name}: the file has no requests; give one with a row for each request")
    layout = _layout(path, first)
    table = [_numbers(path, number, row, layout) for number, row in enumerate(rows)]
    if not layout.by_time:
        table.sort(key=lambda row: row[0])
    table = table[:most]
    arrival, prompt, output = (np.array(column) for column in zip(*(row[:3] for row in table), strict=True))
    counts = [len(row[3]) for row in table]
    return Requests(
        (arrival - arrival[0]) * layout.seconds,
        prompt,
        output,
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array([block for row in table for block in row[3]], np.int64),
    )


def _rows(path: Path) -> list[Mapping[str, Any]]:
    readers = {".jsonl": _jsonl, ".csv": _csv, ".npz": _npz}
    if path.suffix not in readers:
        raise InputError(f"{path.name}: expected a file of requests that ends in {', '.join(readers)}; convert it")
    try:
        return list(readers[path.suffix](path))
    except FileNotFoundError:
        raise InputError(f"serving.arrivals: there is no file {path}; correct its path") from None
    except (OSError, ValueError, BadZipFile, EOFError, csv.Error) as error:
        raise InputError(f"{path.name}: cannot be read: {error}; give a {path.suffix} file") from None


def _jsonl(path: Path) -> Iterable[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"line {number + 1} is no mapping")
            yield row


def _csv(path: Path) -> Iterable[Mapping[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _npz(path: Path) -> Iterable[Mapping[str, Any]]:
    with np.load(path, allow_pickle=False) as archive:
        columns = {name: archive[name].tolist() for name in archive.files if archive[name].ndim == 1}
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def _layout(path: Path, row: Mapping[str, Any]) -> Layout:
    for layout in LAYOUTS:
        if all(column in row for column in layout.columns):
            return layout
    known = "; ".join(f"{layout.name}: {', '.join(layout.columns)}" for layout in LAYOUTS)
    raise InputError(
        f"{path.name}: its columns are {', '.join(map(str, row))}; expected all those of one layout ({known}). "
        "Rename them."
    )


def _numbers(path: Path, number: int, row: Mapping[str, Any], layout: Layout) -> tuple[float, int, int, list[int]]:
    arrival = _number(path, number, row, layout.arrival)
    prompt, output = (int(_number(path, number, row, column, whole=True)) for column in (layout.prompt, layout.output))
    blocks = row.get(layout.blocks) if layout.blocks else []
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise InputError(f"{path.name}: request {number} has {layout.blocks} {blocks!r}; expected a list of numbers")
    return arrival, prompt, output, blocks


def _number(path: Path, number: int, row: Mapping[str, Any], column: str, whole: bool = False) -> float:
    try:
        value = float(row.get(column, ""))
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or (whole and (value != int(value) or value > MOST_TOKENS)):
        what = "a whole number of tokens" if whole else "a time"
        raise InputError(
            f"{path.name}: request {number} has {column} {row.get(column)!r}; expected {what}. Correct it or leave it "
            "out."
        )
    return value
