"""What every format offers: a detector, a reader and a writer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from jaxmoe.traces.formats.hints import Hints
from jaxmoe.traces.formats.source import Source
from jaxmoe.traces.loads import LoadCounts
from jaxmoe.traces.trace import MISSING, GatingTrace, TraceError

Content = TypeVar("Content", GatingTrace, LoadCounts)


@dataclass(frozen=True)
class Format(Generic[Content]):
    """A kind of file or folder. `read` raises `TraceError` without the source's name, and `OSError`.

    `write` puts the content at a path where nothing is yet, and returns notes on what it had to change. It
    raises `TraceError` for what the format cannot tell. `holds` are the optional parts of a trace that come
    back; a format of files gives them the `suffix`, a format of folders has none.
    """

    name: str
    matches: Callable[[Source], bool]
    read: Callable[[Source, Hints], Content]
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
