"""Lists of numbers of different lengths, one after the other: paths, and what tasks wait for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class Rows:
    """Row `i` is `items[start[i] : start[i + 1]]`."""

    start: Int[np.ndarray, " starts"]  # one more than rows
    items: Int[np.ndarray, " item"]

    def __len__(self) -> int:
        return len(self.start) - 1

    def __getitem__(self, row: int) -> tuple[int, ...]:
        return tuple(self.items[self.start[row] : self.start[row + 1]].tolist())

    @property
    def lengths(self) -> Int[np.ndarray, " row"]:
        return np.diff(self.start)

    @property
    def owner(self) -> Int[np.ndarray, " item"]:
        """The row of every item."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def take(self, rows: Int[np.ndarray, " taken"]) -> "Rows":
        """These rows, in this order."""
        lengths = self.lengths[rows]
        start = _starts(lengths)
        return Rows(start, self.items[np.repeat(self.start[rows] - start[:-1], lengths) + np.arange(start[-1])])


def rows_of(lists: Sequence[Sequence[int]]) -> Rows:
    """The rows of plain lists."""
    start = _starts(np.array([len(row) for row in lists], np.int64))
    return Rows(start, np.fromiter(chain.from_iterable(lists), np.int64, count=int(start[-1])))


def one_each(items: Int[np.ndarray, " row"]) -> Rows:
    """Rows of one item."""
    return Rows(np.arange(len(items) + 1), items)


def rows_by(owner: Int[np.ndarray, " item"], items: Int[np.ndarray, " item"], count: int) -> Rows:
    """`count` rows from their items in any order, each with the row it is in; a row keeps the order of its items."""
    return Rows(_starts(np.bincount(owner, minlength=count)), items[np.argsort(owner, kind="stable")])


def joined(parts: Iterable[Rows]) -> Rows:
    """The rows of all parts, one part after the other."""
    known = list(parts)
    start = _starts(np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in known)]))
    return Rows(start, np.concatenate([np.zeros(0, np.int64), *(part.items for part in known)]))


def _starts(lengths: Int[np.ndarray, " row"]) -> Int[np.ndarray, "row+1"]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
