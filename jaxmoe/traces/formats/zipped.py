"""Arrays in zip files, read and written in bounded memory.

A member that is stored uncompressed is mapped in place; a large compressed one is unpacked to a temporary file
that has no name (see the environment variable TMPDIR) and mapped there.
"""

import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from jaxmoe.traces.formats.arrays import check_claim, npy_array, read_header
from jaxmoe.traces.formats.sequences import naming
from jaxmoe.traces.formats.source import AGAIN
from jaxmoe.traces.trace import TraceError

UNPACKED_BYTES = 2**28  # compressed members up to this size are unpacked in memory
PIECE_BYTES = 2**24
DEFLATE_GROWTH = 1032  # the most that deflate can make of a byte
_LOCAL_HEADER = 30  # bytes before a member's name


def member_names(path: Path) -> list[str]:
    """Names of all members. Raises `TraceError`."""
    with _readable(path) as archive:
        return archive.namelist()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz. Raises `TraceError`; pickled objects are refused before anything of them runs."""
    with _readable(path) as archive:
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
def _readable(path: Path) -> Iterator[ZipFile]:
    """The archive at a path, whatever goes wrong in it as a `TraceError`."""
    try:
        with ZipFile(path) as archive:
            yield archive
    # What a damaged archive raises depends on where it is damaged.
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error, RuntimeError, KeyError, struct.error) as error:
        raise TraceError(f"not a readable npz ({error}); {AGAIN}") from None


def _array(path: Path, archive: ZipFile, info: ZipInfo) -> np.ndarray:
    _check_claim(path, info)
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


def _check_claim(path: Path, info: ZipInfo) -> None:
    """Raise `ValueError` for a member of more bytes than can be in the file."""
    growth = {ZIP_STORED: 1, ZIP_DEFLATED: DEFLATE_GROWTH}.get(info.compress_type)
    if growth is None:
        raise ValueError(f"{info.filename} is compressed in a way that NumPy does not use")
    if info.compress_size > path.stat().st_size or info.file_size > growth * info.compress_size:
        raise ValueError(f"{info.filename} claims {info.file_size} bytes from {info.compress_size}")


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
