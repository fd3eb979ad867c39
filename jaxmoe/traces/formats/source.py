"""Common parts of all trace formats: the file or folder, the user's hints about the model, readers and writers."""

import binascii
import json
import re
import reprlib
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from jaxmoe.traces.trace import MISSING, GatingTrace, LoadCounts, TraceError

# What a file may leave open about the model that its trace is of.


@dataclass(frozen=True)
class Hints:
    """Facts about the model, used where a file does not state them; `None` is not known.

    `layer_ids` are the layers with routed experts as numbered in the full model, which has `num_layers` layers,
    dense ones counted. `num_experts` must agree with a file that states it.
    """

    num_experts: int | None = None
    top_k: int | None = None
    layer_ids: tuple[int, ...] | None = None
    num_layers: int | None = None

    def agreed_experts(self, stated: int | None) -> int | None:
        """The number of experts that file and caller agree on, `None` when neither knows."""
        if None not in (stated, self.num_experts) and stated != self.num_experts:
            raise TraceError(
                f"is of a model with {stated} experts, not {self.num_experts}; use a trace of the same model"
            )
        return self.num_experts if stated is None else stated


def lacks(what: str, option: str) -> TraceError:
    """The error for a hint that a file cannot be read without."""
    return TraceError(f"does not state {what}; give --model, or {option} to jaxmoe trace")


# Where a trace is read from: a file or a folder, looked at once for all formats.

AGAIN = "the file is damaged or of another kind; get it again"
MOST_DIGITS = 9  # of a number in a name: more are no layer, iteration or rank
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 8, 4, 40, 40, 40
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{12,}={0,2}")


@dataclass(frozen=True)
class TraceSource:
    """A file or folder that a trace or load counts are read from. Raises `OSError` for what cannot be read."""

    path: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        """All files by their path inside the folder, sorted; a file is alone in it. Hidden ones are left out."""
        if not self.path.is_dir():
            return {self.path.name: self.path}
        inside = {file.relative_to(self.path): file for file in self.path.rglob("*") if file.is_file()}
        shown = {name: file for name, file in inside.items() if not any(part.startswith(".") for part in name.parts)}
        return {name.as_posix(): shown[name] for name in sorted(shown)}

    @cached_property
    def head(self) -> bytes:
        """The first bytes of a file, none of a folder."""
        if self.path.is_dir():
            return b""
        with self.path.open("rb") as file:
            return file.read(16)

    @cached_property
    def values(self) -> list[Any]:
        """The JSON in a file: one value, or one for each line. None of a folder."""
        return [] if self.path.is_dir() else json_values(self.path)

    @cached_property
    def json_objects(self) -> list[dict[str, Any]]:
        """The objects in a file of JSON, one or one for each line; none of anything else."""
        if not self.head.lstrip().startswith(b"{"):
            return []
        try:
            return [value for value in self.values if isinstance(value, dict)]
        except TraceError:
            return []

    def matching(self, pattern: str) -> dict[str, Path]:
        """Files whose whole path inside the folder matches a regular expression."""
        return {name: file for name, file in self.files.items() if re.fullmatch(pattern, name)}


def json_values(path: Path) -> list[Any]:
    """The value in a JSON file, or those of its lines; bare base64 counts as a text. Raises `TraceError`."""
    content = path.read_bytes()
    if _BASE64.fullmatch(content.strip()) and not content.strip().isdigit():
        return [content.strip().decode()]
    try:
        return [parse_json(content)]
    except (ValueError, RecursionError) as error:
        if isinstance(error, TraceError):
            raise
        lines = content.split(b"\n")
        if not _is_object(lines[0]):
            raise TraceError(f"neither npz nor JSON ({error}); {AGAIN}") from None
    return [_line_value(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def parse_json(content: bytes) -> Any:
    """A JSON value. Raises `TraceError` for equal keys, `ValueError` and `RecursionError` for what is no JSON."""
    return json.loads(content, object_pairs_hook=_without_repeats)


def shown(value: object) -> str:
    """A JSON value of any size and depth as a few words of an error message."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def decode_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"not readable as base64 ({error}); {AGAIN}") from None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except (ValueError, RecursionError):
        return False


def _line_value(number: int, line: bytes) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number} is not JSON ({error}); {AGAIN}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, which would keep only the last of equal keys."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TraceError(f"JSON has the key {shown(twice)} twice; keep one of them")
    return dict(pairs)


# What every format offers: a detector, a reader and a writer.

Content = TypeVar("Content", GatingTrace, LoadCounts)


@dataclass(frozen=True)
class Format(Generic[Content]):
    """A kind of file or folder. `read` raises `TraceError` without the source's name, and `OSError`.

    `write` puts the content at a path where nothing is yet, and returns notes on what it had to change. It
    raises `TraceError` for what the format cannot tell. `holds` are the optional parts of a trace that come
    back; a format of files gives them the `suffix`, a format of folders has none.
    """

    name: str
    matches: Callable[[TraceSource], bool]
    read: Callable[[TraceSource, Hints], Content]
    write: Callable[[Path, Content], list[str]]
    suffix: str = ""
    holds: frozenset[str] = frozenset()


def not_held(trace: GatingTrace, holds: frozenset[str]) -> list[str]:
    """Notes on the parts of a trace that a format has no place for."""
    given = [
        name for name in ("weights", "logits", "phase", "is_repeat", "seq_name") if getattr(trace, name) is not None
    ]
    given += ["seq_start"] if len(trace.seq_start) > 1 else []
    return [f"{name} is left out" for name in given if name not in holds]


def check_whole(trace: GatingTrace, name: str) -> None:
    """Raise `TraceError` for the first missing choice, which the format cannot tell."""
    if (trace.experts == MISSING).any():
        token, layer, _ = np.argwhere(trace.experts == MISSING)[0]
        raise TraceError(
            f"layer {trace.layer_ids[layer]}, token {token} misses a choice, which {name} has no place for; "
            "leave out tokens with missing choices, or write npz"
        )
