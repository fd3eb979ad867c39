"""Tables of the study as rows, and as Markdown."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from cases import HERE

from jaxmoe.files import read_table

Row = dict[str, str]


def table(name: str, folder: Path = HERE) -> list[Row]:
    """A table of the study, empty where it is not made yet."""
    path = folder / f"{name}.csv"
    return read_table(path) if path.is_file() else []


def group(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the values of some columns, in the order in which these first occur."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return dict(groups)


def column(rows: Iterable[Row], key: str) -> np.ndarray:
    """A column as numbers."""
    return np.array([float(row[key]) for row in rows])


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
