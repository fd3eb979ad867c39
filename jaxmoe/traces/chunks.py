"""Going through arrays of any size in bounded memory, a run of tokens at a time."""

import math
import mmap
from collections.abc import Iterator

import numpy as np

CHUNK_BYTES = 2**26
ROWS_AT_ONCE = 128


def chunks(shape: tuple[int, ...], itemsize: int, most_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices of the first axis of an array of this shape that cover it in order, about `most_bytes` each."""
    rows = max(1, most_bytes // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def take(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of an array, given by index.

    Those of an array that is mapped from a file are copied a few at a time: the system may map megabytes with each.
    """
    if not _mapping(array):
        return array[rows]
    taken = np.empty((len(rows), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        taken[part] = array[rows[part]]
        release(array)
    return taken


def release(*arrays: np.ndarray | None) -> None:
    """Let go of the memory of what was read from arrays that are mapped from a file; they can be read again."""
    for array in arrays:
        if mapping := _mapping(array):
            mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(array: np.ndarray | None) -> mmap.mmap | None:
    """The mapping of an array that is mapped from a file."""
    mapping = getattr(array, "_mmap", None)
    return mapping if isinstance(mapping, mmap.mmap) else None
