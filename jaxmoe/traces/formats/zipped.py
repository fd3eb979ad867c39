"""Arrays in zip files, read and written in bounded memory.

A member that is stored uncompressed is mapped in place; a large compressed one is unpacked to a temporary file
that has no name (see the environment variable TMPDIR) and mapped there.
"""

import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from jaxmoe.traces.formats.source import AGAIN
from jaxmoe.traces.trace import TraceError

UNPACKED_BYTES = 2**28  # compressed members up to this size are unpacked in memory
PIECE_BYTES = 2**24
_LOCAL_HEADER = 30  # bytes before a member's name


def member_names(path: Path) -> list[str]:
    """Names of all members. Raises `TraceError`."""
    try:
        with ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, ValueError, BadZipFile, NotImplementedError) as error:
        raise _unreadable(error) from None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz. Raises `TraceError`; pickled objects are refused before anything of them runs."""
    try:
        with ZipFile(path) as archive:
            return {info.filename.removesuffix(".npy"): _array(path, archive, info) for info in archive.infolist()}
    # What a damaged archive raises depends on where it is damaged.
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error, RuntimeError, KeyError) as error:
        raise _unreadable(error) from None


def write_member(archive: ZipFile, name: str, shape: tuple[int, ...], dtype: Any, parts: Iterable[np.ndarray]) -> None:
    """Store an array of which the parts, along its first axis, come one after another."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for part in parts:
            member.write(np.ascontiguousarray(part, dtype).data)


def _unreadable(error: BaseException) -> TraceError:
    return TraceError(f"not a readable npz ({error}); {AGAIN}")


def _array(path: Path, archive: ZipFile, info: ZipInfo) -> np.ndarray:
    if info.compress_type == ZIP_STORED:
        with archive.open(info) as member, path.open("rb") as file:
            file.seek(_start(file, info))
            array = _mapped(file, file.tell() + info.file_size)
            if array is not None:
                while member.read(PIECE_BYTES):  # compares the check sum
                    pass
                return array
    with archive.open(info) as member:
        if info.file_size > UNPACKED_BYTES:
            with tempfile.TemporaryFile() as unpacked:
                while piece := member.read(PIECE_BYTES):
                    unpacked.write(piece)
                end = unpacked.tell()
                unpacked.seek(0)
                array = _mapped(unpacked, end)
                if array is not None:
                    return array
                unpacked.seek(0)
                return np.lib.format.read_array(unpacked, allow_pickle=False)
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read():  # reading to the end compares the check sum
            raise ValueError(f"{info.filename} is longer than its array")
        return array


def _start(file: IO[bytes], info: ZipInfo) -> int:
    """Where the data of a member start in the archive."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + _LOCAL_HEADER + lengths


def _mapped(file: IO[bytes], end: int) -> np.ndarray | None:
    """The array from here to `end` of a file, mapped read-only; `None` for one that is no matrix, or is empty."""
    if np.lib.format.read_magic(file) != (1, 0):
        return None
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(shape) < 2 or size == 0 or dtype.hasobject:
        return None
    if file.tell() + size != end:
        raise ValueError(f"an array of {size} bytes in {end - file.tell()}")
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran_order else "C")
