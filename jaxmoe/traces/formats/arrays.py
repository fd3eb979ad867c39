"""Arrays in files. What a header claims is held against the bytes that are there before anything is allocated.

Of .npy, versions 1 and 2 are read, which NumPy writes for numbers and text; pickled objects never are. The
`TraceError` of this module names no remedy: the caller knows what the bytes were to be.
"""

import ast
import io
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxmoe.traces.trace import TraceError

MAGIC = b"\x93NUMPY"
MOST_HEADER_BYTES = 2**14
MOST_AXES = 8
MOST_EMPTY = 2**16  # along an axis of an array without data
_LENGTH_BYTES = {b"\x01\x00": 2, b"\x02\x00": 4}  # of the header's length, by version
_NUMBERS_OR_TEXT = re.compile(r"[<>|=]?[biufcSU][0-9]{1,9}")


@runtime_checkable
class Readable(Protocol):
    """A binary file, on disk or in memory."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Header:
    """What a .npy says of its array."""

    dtype: np.dtype
    shape: tuple[int, ...]
    order: Literal["C", "F"]


def read_header(file: Readable) -> Header:
    """The header of a .npy; after it the file is at the data. Raises `TraceError`."""
    start = file.read(len(MAGIC) + 2)
    length_bytes = _LENGTH_BYTES.get(start[len(MAGIC) :])
    if not start.startswith(MAGIC) or length_bytes is None:
        raise TraceError(f"not a .npy of version 1 or 2, it starts with {start!r}")
    length = int.from_bytes(file.read(length_bytes), "little")
    if length > MOST_HEADER_BYTES:
        raise TraceError(f"not a .npy, its header claims {length} bytes, expected at most {MOST_HEADER_BYTES}")
    text = file.read(length).decode("latin1").strip()
    try:
        return _header(ast.literal_eval(text))
    # What Python and NumPy say of a damaged header depends on where it is damaged.
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        raise TraceError(f"not a .npy of numbers or text without pickle, its header is {text[:80]!r}") from None


def npy_array(content: bytes) -> np.ndarray:
    """The array in a whole .npy, in the byte order of the machine. Raises `TraceError`."""
    file = io.BytesIO(content)
    header = read_header(file)
    return array_in(memoryview(content)[file.tell() :], header)


def array_in(data: memoryview, header: Header) -> np.ndarray:
    """The array that these bytes are, in the byte order of the machine. Raises `TraceError`."""
    check_claim(header.shape, header.dtype.itemsize, len(data))
    held = np.ndarray(header.shape, header.dtype, data, order=header.order)
    array = held.astype(header.dtype.newbyteorder("="))
    if array.dtype.kind == "U" and (array.reshape(-1).view(np.uint32) > sys.maxunicode).any():
        raise TraceError("holds text that is not Unicode")
    return array


def check_claim(shape: Sequence[int], itemsize: int, held: int) -> None:
    """Raise `TraceError` where an array of this shape, with axes of 0 or more, is not the `held` bytes."""
    size = math.prod(shape) * itemsize
    if size != held:
        raise TraceError(f"an array of shape {list(shape)[:MOST_AXES]} has {size} bytes, but there are {held}")
    if len(shape) > MOST_AXES or (size == 0 and max(shape, default=0) > MOST_EMPTY):
        raise TraceError(f"an array has {len(shape)} axes of up to {max(shape)}, expected {MOST_AXES} of {MOST_EMPTY}")


def _header(fields: Any) -> Header:
    """The header with these fields. Raises `ValueError`, `TypeError` or `KeyError`."""
    kind, shape = fields["descr"], fields["shape"]
    if not _NUMBERS_OR_TEXT.fullmatch(kind) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError
    dtype = np.dtype(kind)
    if dtype.itemsize == 0:
        raise ValueError
    return Header(dtype, tuple(shape), "F" if fields["fortran_order"] else "C")
