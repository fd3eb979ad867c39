"""Damage to files: to their bytes, and to what they are made of, so that the damage gets past the first check."""

import ast
import base64
import binascii
import io
import json
import warnings
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

MAGIC = b"\x93NUMPY"
NUMBERS = (-1, 0, 1, 2, 7, 2**15, 2**31, 2**40, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320)
ODD = (
    *NUMBERS,
    float("nan"),
    float("inf"),
    None,
    True,
    False,
    "",
    "x",
    "1",
    "٣",
    "\ud800",
    "9" * 5000,
    "../..",
    "K" * 300,
)
EMPTY = ([], {}, [[]], [[[]]], [None], {"": None}, {"0": []}, [[0, 1]], [[[0, 1]]], {"1": [[0, 1], [2, 1]]})
TYPES = ("|O", "|V8", "<U0", "|S0", "<U999999999", "<M8[ns]", "<c16", "<i16", ">i8", ">f4", "<f16", "|b1", "i", "", 3)
TYPES = (*TYPES, [("a", "<i4")], ("<i4", (10**9,)), None, "<u8", "<f2", "<U3")
TALL = (
    (2**62,),
    (2**40, 2),
    (-1, 3),
    (-2, -3),
    (10**30,),
    (0, 10**12),
    (10**12, 0),
    (1,) * 70,
    (),
    (0,),
    "ab",
    5,
    (1.5,),
)
CLAIMS = (0, 1, 2**16, 2**31 - 1, 2**32 - 1)
NESTINGS = (100, 330, 900, 980, 3000, 100_000)


def damaged(content: bytes, rng: Random, others: list[bytes]) -> bytes:
    """The content with one to three damages; `others` are whole files of any format to splice in."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kinds = [kind for known, kind in STRUCTURES if known(content)]
        kind = rng.choice(kinds) if kinds and rng.random() < 0.6 else _in_bytes
        content = kind(content, rng, others)
    return content


def _in_bytes(content: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Bytes flipped, set, deleted, inserted, doubled, cut off, or taken from another file."""
    if not content:
        return rng.choice(others)[: rng.randrange(1, 64)]
    a = rng.randrange(len(content))
    b = min(len(content), a + rng.choice((1, 1, 2, 4, 8, 64, 512)))
    part = content[a:b]
    other = rng.choice(others)
    c = rng.randrange(len(other) or 1)
    middle = rng.choice(
        (
            bytes([part[0] ^ 1 << rng.randrange(8)]) + part[1:],
            bytes(rng.choice((0, 255, 127, 128, 10, 34)) for _ in part),
            rng.randbytes(len(part)),
            b"",
            part * rng.choice((2, 3, 100)),
            part + rng.randbytes(rng.randrange(1, 16)),
            other[c : c + rng.choice((1, 16, 256, 4096))],
        )
    )
    end = rng.random()
    return content[:a] + middle + (b"" if end < 0.1 else other[c:] if end < 0.15 else content[b:])


def _in_json(content: bytes, rng: Random, others: list[bytes]) -> bytes:
    """One place in a JSON value, or in one of its lines, replaced, left out, repeated or nested."""
    lines = [content] if _is_json(content) else content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = _dumped(changed_value(json.loads(lines[at]), rng, others), rng)
    if rng.random() < 0.05:
        lines.insert(at, lines[rng.randrange(len(lines))])
    return b"\n".join(lines)


def changed_value(value: Any, rng: Random, others: list[bytes]) -> Any:
    """A value of JSON or YAML with one place in it changed."""
    places = list(_places(value))
    if not places or rng.random() < 0.03:
        return rng.choice((*ODD, *EMPTY))
    holder, key = rng.choice(places)
    choice = rng.random()
    if isinstance(holder[key], str) and _decoded(holder[key]) and choice < 0.7:
        inside = damaged(_decoded(holder[key]), rng, others)
        holder[key] = base64.b64encode(inside).decode()
    elif choice < 0.1:
        del holder[key]
    elif choice < 0.2 and isinstance(holder, list):
        holder += [holder[key]] * rng.choice((1, 2, 1000))
    elif choice < 0.2:
        holder[str(rng.choice((*ODD, *holder)))] = holder.pop(key)
    elif choice < 0.3:
        other, name = rng.choice(places)
        holder[key] = other[name] if not isinstance(other[name], list | dict) else rng.choice(EMPTY)
    elif choice < 0.4 and type(holder[key]) is int:
        holder[key] = holder[key] * rng.choice((-1, 2, 10, 10**6)) + rng.choice((-1, 0, 1))
    else:
        holder[key] = rng.choice((*ODD, *EMPTY))
    return value


def _dumped(value: Any, rng: Random) -> bytes:
    text = json.dumps(value)
    if rng.random() < 0.1 and any(letter.isdigit() for letter in text):
        at = rng.choice([i for i, letter in enumerate(text) if letter.isdigit()])
        deep = rng.choice(NESTINGS)
        opening, closing = rng.choice((("[", "]"), ('{"1":', "}")))
        text = text[:at] + opening * deep + text[at] + closing * deep + text[at + 1 :]
    return text.encode()


def _places(value: Any) -> Any:
    """Holder and key of every place in a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _in_npy(content: bytes, rng: Random, others: list[bytes]) -> bytes:
    """Type, shape, order, version or length in the header of a .npy, or the data under it."""
    length = int.from_bytes(content[8:10], "little")
    text, data = content[10 : 10 + length], content[10 + length :]
    try:
        header = ast.literal_eval(text.decode().strip())
        header["shape"][:0]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):  # damaged before
        return _in_bytes(content, rng, others)
    choice = rng.randrange(6)
    if choice == 0:
        header["descr"] = rng.choice(TYPES)
    elif choice == 1:
        header["shape"] = rng.choice((*TALL, header["shape"] * 2, header["shape"][::-1], header["shape"][1:]))
    elif choice == 2:
        header[rng.choice(("fortran_order", "other", 3, "descr"))] = rng.choice((True, None, "x", 1))
    elif choice == 3:
        data = rng.choice((rng.randbytes(len(data)), data[:-1], data * 2, b"", bytes(len(data)), b"\xff" * len(data)))
    elif choice == 4:
        text = rng.choice((text[:-9], b"(" * 5000, b"{" + text, b"'" * 3, b"[" * 100 + text, rng.randbytes(length)))
        return content[:8] + len(text).to_bytes(2, "little") + text + data
    else:
        version = rng.choice((b"\x02\x00", b"\x03\x00", b"\x09\x09"))
        claim = rng.choice((*CLAIMS, length))
        return MAGIC + version + claim.to_bytes(4, "little") + text + data
    text = (repr(header) + "\n").encode("utf-8", "replace")
    return content[:8] + len(text).to_bytes(2, "little") + text + data


def _in_zip(content: bytes, rng: Random, others: list[bytes]) -> bytes:
    """A member damaged, of another type, left out, renamed or doubled, with right check sums; or a wrong claim."""
    if rng.random() < 0.25:
        return _claiming(content, rng)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = rng.randrange(len(members))
    name, member = members[at]
    choice = rng.random()
    if choice < 0.6:
        members[at] = name, damaged(member, rng, others)
    elif choice < 0.8:
        members[at] = name, _some_array(rng)
    elif choice < 0.87:
        del members[at]
    elif choice < 0.94:
        members[at] = rng.choice(members)[0], member
    else:
        members.append((rng.choice((name, "x.npy", "counts.npy", "experts.npy", "../x", "data.pkl")), _some_array(rng)))
    stored, deflated = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    packing = rng.choice((stored, stored, deflated, deflated, deflated, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    return zipped(members, packing)


def _claiming(content: bytes, rng: Random) -> bytes:
    """A number of a header of the archive replaced by another."""
    signature = rng.choice((b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"))
    starts = [i for i in range(len(content)) if content.startswith(signature, i)]
    if not starts:
        return content[:-1]
    at = rng.choice(starts) + rng.randrange(4, 42, 2)
    width = rng.choice((2, 4))
    return content[:at] + (rng.choice(CLAIMS) % 256**width).to_bytes(width, "little") + content[at + width :]


def _some_array(rng: Random) -> bytes:
    shape = rng.choice(((), (0,), (1,), (2,), (5,), (2, 2), (2, 5), (0, 2, 2), (3, 2, 2), (3, 2, 5), (1, 1, 3000)))
    kind = rng.choice(("i1", "i8", "u8", ">i4", "f2", "f8", ">f4", "f16", "?", "U3", "S3", "c8"))
    filling = rng.choice((0, 1, 3, 100))
    file = io.BytesIO()
    np.save(file, np.full(shape, filling).astype(kind))
    return file.getvalue()


def _in_safetensors(content: bytes, rng: Random, others: list[bytes]) -> bytes:
    """The JSON header changed, with its right length or a wrong one."""
    length = int.from_bytes(content[:8], "little")
    text = _dumped(changed_value(json.loads(content[8 : 8 + length]), rng, others), rng)
    claim = rng.choice((len(text), len(text), len(text), 0, 2**63, len(text) + 1))
    return claim.to_bytes(8, "little") + text + content[8 + length :]


def zipped(members: list[tuple[str, bytes]], packing: int) -> bytes:
    """An archive of these members; names may be there twice."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive, warnings.catch_warnings(action="ignore"):
        for name, member in members:
            archive.writestr(zipfile.ZipInfo(name), member, packing)
    return file.getvalue()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if len(text) > 12 else b""
    except (binascii.Error, ValueError):
        return b""


def _is_json(content: bytes) -> bool:
    return _loads(content) is not None


def _are_lines(content: bytes) -> bool:
    lines = content.splitlines()
    return 1 < len(lines) < 1000 and all(_loads(line) is not None for line in lines)


def _loads(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _is_zip(content: bytes) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return bool(archive.namelist()) and archive.testzip() is None
    except Exception:  # damaged before
        return False


def _is_safetensors(content: bytes) -> bool:
    length = int.from_bytes(content[:8], "little")
    return 8 < 8 + length <= len(content) and isinstance(_loads(content[8 : 8 + length]), dict)


STRUCTURES: tuple[tuple[Callable[[bytes], bool], Callable[[bytes, Random, list[bytes]], bytes]], ...] = (
    (lambda content: _is_json(content) or _are_lines(content), _in_json),
    (lambda content: content.startswith(MAGIC), _in_npy),
    (_is_zip, _in_zip),
    (_is_safetensors, _in_safetensors),
)
