"""Arrays in files, mapped from disk where they are large: npz, npy, safetensors."""

import ast
import io
import json
import math
import re
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, runtime_checkable
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from jaxmoe.traces.formats.expert_choices import naming
from jaxmoe.traces.formats.source import AGAIN, parse_json, shown
from jaxmoe.traces.trace import TraceError

# Arrays in zip files, read and written in bounded memory.
#
# A member that is stored uncompressed is mapped in place; a large compressed one is unpacked to a temporary file that
# has no name (see the environment variable TMPDIR) and mapped there.

UNPACKED_BYTES = 2**28  # compressed members up to this size are unpacked in memory
PIECE_BYTES = 2**24
DEFLATE_GROWTH = 1032  # the most that deflate can make of a byte
_LOCAL_HEADER = 30  # bytes before a member's name


def member_names(path: Path) -> list[str]:
    """Names of all members. Raises `TraceError`."""
    with readable_zip(path) as archive:
        return archive.namelist()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz. Raises `TraceError`; pickled objects are refused before anything of them runs."""
    with readable_zip(path) as archive:
        arrays = {}
        for info in archive.infolist():
            with naming(info.filename):
                arrays[info.filename.removesuffix(".npy")] = _array(path, archive, info)
        return arrays


def write_member(archive: ZipFile, name: str, shape: tuple[int, ...], dtype: Any, parts: Iterable[np.ndarray]) -> None:
    """Store an array of which the parts, along its first axis, come one after another."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for part in parts:
            member.write(np.ascontiguousarray(part, dtype).data)


@contextmanager
def readable_zip(path: Path, kind: str = "readable npz") -> Iterator[ZipFile]:
    """The archive at a path, whatever goes wrong in it as a `TraceError`. No member claims more than it can have."""
    try:
        with ZipFile(path) as archive:
            for info in archive.infolist():
                _check_member(path, info)
            yield archive
    # What a damaged archive raises depends on where it is damaged.
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error, RuntimeError, KeyError, struct.error) as error:
        raise TraceError(f"not a {kind} ({error}); {AGAIN}") from None


def _array(path: Path, archive: ZipFile, info: ZipInfo) -> np.ndarray:
    if info.compress_type == ZIP_STORED:
        with archive.open(info) as member, path.open("rb") as file:
            file.seek(_start(file, info))
            array = _mapped(file, file.tell() + info.file_size, least_axes=2)
            if array is not None:
                while member.read(PIECE_BYTES):  # compares the check sum
                    pass
                return array
    with archive.open(info) as member:
        if info.file_size <= UNPACKED_BYTES:
            return npy_array(member.read())
        with tempfile.TemporaryFile() as unpacked:
            while piece := member.read(PIECE_BYTES):
                unpacked.write(piece)
            end = unpacked.tell()
            unpacked.seek(0)
            array = _mapped(unpacked, end, least_axes=1)
            if array is None:
                unpacked.seek(0)
                array = npy_array(unpacked.read())
            return array


def _check_member(path: Path, info: ZipInfo) -> None:
    """Raise `ValueError` for a member of more bytes than can be in the file."""
    growth = {ZIP_STORED: 1, ZIP_DEFLATED: DEFLATE_GROWTH}.get(info.compress_type)
    if growth is None:
        raise ValueError(f"{shown(info.filename)} is compressed in a way that NumPy does not use")
    if info.compress_size > path.stat().st_size or info.file_size > growth * info.compress_size:
        raise ValueError(f"{shown(info.filename)} claims {info.file_size} bytes from {info.compress_size}")


def _start(file: IO[bytes], info: ZipInfo) -> int:
    """Where the data of a member start in the archive."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + _LOCAL_HEADER + lengths


def _mapped(file: IO[bytes], end: int, least_axes: int) -> np.ndarray | None:
    """The array from here to `end` of a file, mapped read-only; `None` for one of fewer axes, of text, or empty."""
    header = read_header(file)
    if len(header.shape) < least_axes or 0 in header.shape or header.dtype.kind in "SU":
        return None
    check_claim(header.shape, header.dtype.itemsize, end - file.tell())
    return np.memmap(file, header.dtype, "r", file.tell(), header.shape, header.order)


# Arrays in files. What a header claims is held against the bytes that are there before anything is allocated.
#
# Of .npy, versions 1 and 2 are read, which NumPy writes for numbers and text; pickled objects never are. The
# `TraceError` of this module names no remedy: the caller knows what the bytes were to be.

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
    """Header of a .npy file: data type, shape, and memory order of its array (C or Fortran)."""

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


# Files of named arrays in the safetensors format: an 8-byte length, a JSON header, raw data.

SAFETENSORS_TYPES = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4"}
SAFETENSORS_TYPES |= {"U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file. Raises `TraceError` for a damaged one and for types that NumPy has not."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        header = parse_json(content[8:start]) if 8 < start <= len(content) else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise TraceError(f"not a readable safetensors file; {AGAIN}")
    header.pop("__metadata__", None)
    arrays = {name: _tensor(name, entry, memoryview(content)[start:]) for name, entry in header.items()}
    size = sum(array.nbytes for array in arrays.values())
    if size > len(content) - start:  # they lie over one another
        raise TraceError(f"has arrays of {size} bytes in {len(content) - start}; {AGAIN}")
    return arrays


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    codes = {np.dtype(kind): code for code, kind in SAFETENSORS_TYPES.items()}
    header, end = {}, 0
    for name, array in arrays.items():
        span = [end, end := end + array.nbytes]
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _tensor(name: str, entry: Any, data: memoryview) -> np.ndarray:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        numbers = False
    if not numbers:
        raise TraceError(f"{name} is described as {shown(entry)}; {AGAIN}")
    if kind not in SAFETENSORS_TYPES:
        raise TraceError(f"{name} has type {kind}, expected one of {', '.join(SAFETENSORS_TYPES)}")
    if not begin <= end <= len(data):
        raise TraceError(f"{name} of shape {shown(shape)} is at bytes {begin} to {end} of {len(data)}; {AGAIN}")
    with naming(name):
        return array_in(data[begin:end], Header(np.dtype(SAFETENSORS_TYPES[kind]), tuple(shape), "C"))
