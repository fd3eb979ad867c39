"""Files of named arrays in the safetensors format: an 8-byte length, a JSON header, raw data."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.traces.formats.arrays import Header, array_in
from jaxmoe.traces.formats.sequences import naming
from jaxmoe.traces.formats.source import AGAIN, parse_json, shown
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
    arrays = {name: _array(name, entry, memoryview(content)[start:]) for name, entry in header.items()}
    size = sum(array.nbytes for array in arrays.values())
    if size > len(content) - start:  # they lie over one another
        raise TraceError(f"has arrays of {size} bytes in {len(content) - start}; {AGAIN}")
    return arrays


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
        numbers = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        numbers = False
    if not numbers:
        raise TraceError(f"{name} is described as {shown(entry)}; {AGAIN}")
    if kind not in TYPES:
        raise TraceError(f"{name} has type {kind}, expected one of {', '.join(TYPES)}")
    if not begin <= end <= len(data):
        raise TraceError(f"{name} of shape {shown(shape)} is at bytes {begin} to {end} of {len(data)}; {AGAIN}")
    with naming(name):
        return array_in(data[begin:end], Header(np.dtype(TYPES[kind]), tuple(shape), "C"))
