"""Files of named arrays in the safetensors format: an 8-byte length, a JSON header, raw data."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.traces.formats.source import AGAIN, parse_json
from jaxmoe.traces.trace import TraceError

TYPES = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8"}
TYPES |= {"I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}


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
    return {name: _array(name, entry, memoryview(content)[start:]) for name, entry in header.items()}


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    codes = {np.dtype(kind): code for code, kind in TYPES.items()}
    header, end = {}, 0
    for name, array in arrays.items():
        span = [end, end := end + array.nbytes]
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _array(name: str, entry: Any, data: memoryview) -> np.ndarray:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        numbers = False
    if not numbers:
        raise TraceError(f"{name} is described as {str(entry)[:80]}; {AGAIN}")
    if kind not in TYPES:
        raise TraceError(f"{name} has type {kind}, expected one of {', '.join(TYPES)}")
    if end - begin != math.prod(shape) * np.dtype(TYPES[kind]).itemsize or end > len(data):
        raise TraceError(f"{name} of shape {shape} is at bytes {begin} to {end} of {len(data)}; {AGAIN}")
    return np.frombuffer(data[begin:end], TYPES[kind]).reshape(shape)
