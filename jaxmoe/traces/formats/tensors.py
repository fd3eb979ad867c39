"""Files of tensors as PyTorch saves them, read and written without it.

They are zip files: `data.pkl` is a pickle of the value, in which a tensor is a call that names its storage, and
`data/KEY` has the bytes of a storage. Of all that a pickle can ask for, only tensors of numbers and ordered dicts are
admitted; it is refused at the first other name, before anything of it runs.
"""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZIP_STORED, ZipFile

import numpy as np

from jaxmoe.traces.formats.arrays import readable_zip
from jaxmoe.traces.formats.source import AGAIN
from jaxmoe.traces.trace import TraceError

PICKLE = "data.pkl"
REBUILD = ("torch._utils", "_rebuild_tensor_v2")
STORAGES = {"Bool": "?", "Byte": "u1", "Char": "i1", "Short": "<i2", "Int": "<i4", "Long": "<i8"}
STORAGES |= {"Half": "<f2", "Float": "<f4", "Double": "<f8"}
# Opcodes that change objects or make others than by a call, or allocate before they read.
_LEFT_OUT = {code[0] for code in (pickle.BUILD, pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX)}
_LEFT_OUT |= {code[0] for code in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER)}


class _RefusedError(Exception):
    """A pickle asks for something that it does not get."""


def read_tensors(path: Path) -> Any:
    """The value in a file, its tensors as arrays wherever they were. Raises `TraceError`."""
    with readable_zip(path, "dump of tensors") as archive:
        names = [name for name in archive.namelist() if name.endswith(PICKLE)]
        if not names:
            raise TraceError(f"not a dump of tensors (it has no {PICKLE}); {AGAIN}")
        name = names[0]
        if _has_big_endian(archive, name):
            raise TraceError("has tensors of a big-endian machine; save them on a little-endian one")
        reader = _Reader(io.BytesIO(archive.read(name)), archive, name.removesuffix(PICKLE))
        try:
            return reader.load()
        except _RefusedError as error:
            raise TraceError(f"not a dump of tensors (it holds {error}); {AGAIN}") from None
        # What a damaged pickle raises depends on where it is damaged.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            raise TraceError(f"not a dump of tensors ({reason}); {AGAIN}") from None


def _has_big_endian(archive: ZipFile, name: str) -> bool:
    order = name.removesuffix(PICKLE) + "byteorder"
    return order in archive.namelist() and archive.read(order) == b"big"


class _Reader(pickle._Unpickler):  # in Python: the one in C allocates what a damaged file claims
    dispatch: ClassVar = {code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _LEFT_OUT}

    def __init__(self, file: io.BytesIO, archive: ZipFile, folder: str) -> None:
        super().__init__(file)
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == REBUILD:
            return partial(_tensor)  # a fresh one, as a pickle may set attributes of what it gets
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        kind = name.removesuffix("Storage")
        if module == "torch" and name.endswith("Storage") and kind in STORAGES:
            return STORAGES[kind]
        raise _RefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        """The storage that a tensor names."""
        what, kind, key, _, _ = pid
        if what != "storage" or kind not in STORAGES.values() or not (isinstance(key, str) and key.isdigit()):
            raise _RefusedError("a storage of another kind")
        return np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), kind)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """The array that a tensor is, of whole storages or of parts of them."""
    sizes = (offset, *shape, *strides)
    if not (isinstance(storage, np.ndarray) and storage.ndim == 1 and len(shape) == len(strides)):
        raise _RefusedError("a tensor without a storage")
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise _RefusedError("a tensor whose shape and strides are not whole numbers")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if math.prod(shape) > storage.size or (math.prod(shape) and last >= storage.size):
        raise _RefusedError(f"a tensor of shape {shape} in a storage of {storage.size}")
    if not math.prod(shape):
        return np.zeros(shape, storage.dtype)
    steps = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps).copy()


# Writing.


def write_tensors(path: Path, values: Mapping[str, Any]) -> None:
    """Write a dict of arrays, whole numbers and `None`, as PyTorch saves it."""
    arrays: list[np.ndarray] = []
    content = pickle.MARK + b"".join(_text(name) + _value(value, arrays) for name, value in values.items())
    with ZipFile(path, "w", ZIP_STORED) as archive:
        archive.writestr(f"archive/{PICKLE}", b"\x80\x02" + pickle.EMPTY_DICT + content + pickle.SETITEMS + pickle.STOP)
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(arrays):
            archive.writestr(f"archive/data/{key}", array.tobytes())
        archive.writestr("archive/version", "3\n")


def _value(value: object, arrays: list[np.ndarray]) -> bytes:
    """The part of a pickle that makes a value; of an array it names the storage, which joins `arrays`."""
    if not isinstance(value, np.ndarray):
        return _plain(value)
    kind = next(name for name, code in STORAGES.items() if np.dtype(code) == value.dtype)
    array = np.ascontiguousarray(value, STORAGES[kind])
    arrays.append(array)
    storage = (_text("storage"), _global("torch", f"{kind}Storage"), _text(str(len(arrays) - 1)), _text("cpu"))
    steps = tuple(step // array.itemsize for step in array.strides)
    hooks = _global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    parts = [
        _tuple(*storage, _plain(array.size)) + pickle.BINPERSID,
        *map(_plain, (0, array.shape, steps, False)),
        hooks,
    ]
    return _global(*REBUILD) + _tuple(*parts) + pickle.REDUCE


def _tuple(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + len(text.encode()).to_bytes(4, "little") + text.encode()


def _plain(value: object) -> bytes:
    """A whole number, a truth value, `None` or a tuple of them."""
    if isinstance(value, tuple):
        return _tuple(*map(_plain, value))
    return pickle.dumps(value, protocol=2)[2:-1]
