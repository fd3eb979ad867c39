"""Reads and writes files and folders of traces and load counts; their format is detected from their content."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from jaxmoe.registry import LOADS, TRACES
from jaxmoe.traces.formats.arrays import MAGIC
from jaxmoe.traces.formats.source import Format, Hints, TraceSource, not_held
from jaxmoe.traces.trace import GatingTrace, LoadCounts, TraceError, load_counts


@dataclass(frozen=True)
class Recording:
    """A trace or load counts as read from a file or folder, and the name of the format."""

    format: str
    content: GatingTrace | LoadCounts


def read_any(path: str | Path, hints: Hints | None = None) -> Recording:
    """Read a trace or load counts. Raises `TraceError` with the name of the file or folder for anything else."""
    path = Path(path)
    with _named(path):
        source, hints = opened(path), hints or Hints()
        loads = loads_format(source)
        if loads is not None:
            return Recording(loads.name, loads.read(source, hints))
        found = trace_format(source)
        return Recording(found.name, found.read(source, hints))


def read_trace(path: str | Path, num_experts: int | None = None, hints: Hints | None = None) -> GatingTrace:
    """Read a trace.

    `num_experts` is what the model has, also where the hints leave it open; it must agree with a file that states
    it. Raises `TraceError` with the name of the file or folder for anything else, load counts among it.
    """
    path, hints = Path(path), hints or Hints()
    with _named(path):
        source = opened(path)
        if loads_format(source) is not None:
            raise TraceError("load counts have no token order; use a trace")
        return trace_format(source).read(
            source, hints if num_experts is None else replace(hints, num_experts=num_experts)
        )


def read_loads(path: str | Path, hints: Hints | None = None) -> LoadCounts:
    """Read load counts, or count those of a trace. Raises `TraceError` with the name of the file or folder."""
    content = read_any(path, hints).content
    return load_counts(content) if isinstance(content, GatingTrace) else content


def write_trace(path: str | Path, trace: GatingTrace) -> None:
    """Write a trace as npz; an older file of that name is replaced at once, or not at all.

    Raises `TraceError` when a fact has the name of an array.
    """
    TRACES["npz"].write(Path(path), trace)


def write_as(name: str, path: Path, content: GatingTrace | LoadCounts) -> list[str]:
    """Write a trace or load counts in the format of this name, at once or not at all.

    Returns notes on what the format has no place for. Raises `TraceError` for missing choices and whatever else
    would change the meaning, and for a format that does not exist for this content.
    """
    if isinstance(content, GatingTrace):
        return not_held(content, TRACES[name].holds) + TRACES[name].write(path, content)
    if name not in LOADS:
        raise TraceError(f"load counts cannot be written as {name}, which tells of tokens; use {', '.join(LOADS)}")
    return LOADS[name].write(path, content)


def suffix_of(name: str, content: GatingTrace | LoadCounts) -> str:
    """How the names of files in a format end; empty for a format of folders."""
    formats = TRACES if isinstance(content, GatingTrace) else LOADS
    return formats[name].suffix if name in formats else ""


# Which format a source has.


def opened(path: Path) -> TraceSource:
    """Open a source. Raises `TraceError` for an empty one, and `OSError`."""
    source = TraceSource(path)
    if path.is_dir():
        if not source.files:
            raise TraceError("not readable (an empty directory); expected the files of a trace")
    elif not source.head:
        raise TraceError("the file is empty; get it again")
    return source


def loads_format(source: TraceSource) -> Format[LoadCounts] | None:
    """The format of load counts that a source has, by its content; `None` for none of them."""
    return next((some for some in LOADS.values() if some.matches(source)), None)


def trace_format(source: TraceSource) -> Format[GatingTrace]:
    """The format of traces that a source has, by its content. Raises `TraceError` for none of them."""
    if source.head.startswith(MAGIC):
        raise TraceError(
            "a single array (.npy), not of counts [layer, expert]; write an npz with experts [token, layer, top_k] and "
            "num_experts for a trace, or with counts [window, layer, expert]"
        )
    # A user's own come first: to look at formats of JSON fails where a file is none.
    for name in (*TRACES.added, *TRACES):
        if TRACES[name].matches(source):
            return TRACES[name]
    if source.path.is_dir():
        held = ", ".join(list(source.files)[:4])
        raise TraceError(f"a directory of no known kind, with {held}; expected one of {', '.join(TRACES)}")
    if not source.values:
        raise TraceError("holds nothing; get it again")
    first = source.values[0]
    kind = "an empty object" if first == {} else f"a {type(first).__name__}"
    raise TraceError(f"JSON holds {kind}, expected an object of layer number -> list of tokens, or another trace")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the path before every error."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file; check the path") from None
    except OSError as error:
        named = error.filename or path  # of a folder it may be one file
        raise TraceError(f"{named}: not readable ({error.strerror or error}); expected a trace file") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
