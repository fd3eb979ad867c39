"""The formats of traces and load counts, and which of them a source has."""

from pathlib import Path

from jaxmoe.registry import LOADS, TRACES
from jaxmoe.traces.formats.source import Format, TraceSource
from jaxmoe.traces.trace import GatingTrace, LoadCounts, TraceError


def opened(path: Path) -> TraceSource:
    """Open a source. Raises `TraceError` for an empty one or a single array, and `OSError`."""
    source = TraceSource(path)
    if path.is_dir():
        if not source.files:
            raise TraceError("not readable (an empty directory); expected the files of a trace")
    elif not source.head:
        raise TraceError("the file is empty; get it again")
    elif source.head.startswith(b"\x93NUMPY"):
        raise TraceError("a single array (.npy); write an npz with the arrays experts and num_experts")
    return source


def loads_format(source: TraceSource) -> Format[LoadCounts] | None:
    """The format of load counts that a source has, by its content; `None` for none of them."""
    return next((some for some in LOADS.values() if some.matches(source)), None)


def trace_format(source: TraceSource) -> Format[GatingTrace]:
    """The format of traces that a source has, by its content. Raises `TraceError` for none of them."""
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
