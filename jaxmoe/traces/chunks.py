"""Going through arrays of any size in bounded memory, a run of tokens at a time."""

import math
import mmap
from collections.abc import Iterator

import numpy as np

CHUNK_BYTES = 2**26


def chunks(shape: tuple[int, ...], itemsize: int, most_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices of the first axis of an array of this shape that cover it in order, about `most_bytes` each."""
    rows = max(1, most_bytes // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def release(*arrays: np.ndarray | None) -> None:
    """Let go of the memory of what was read from arrays that are mapped from a file; they can be read again."""
    for array in arrays:
        mapping = getattr(array, "_mmap", None)
        if isinstance(mapping, mmap.mmap):
            mapping.madvise(mmap.MADV_DONTNEED)
