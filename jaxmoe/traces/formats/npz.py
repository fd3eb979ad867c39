"""The project's npz: traces, and load counts.

Traces: `experts` int [token, layer, top_k], -1 where a choice is missing, and 0-d `num_experts`; optional
`layer_ids` int [layer], `seq_start` int [sequence], `seq_name` text [sequence], `is_repeat` bool [token], `phase`
int [token], `weights` float [token, layer, top_k], `logits` float [token, layer, expert]. Every other 0-d array,
a text `phase` among them, is a fact about the source.

Loads: `counts` int [layer, expert], or [window, layer, expert]; optional `counts_by_request` int [request, layer,
expert], or `counts_by_group` with `group_name`, of which `counts` is the sum; 0-d `top_k`. Other arrays are left in the
file.

Arrays that are stored uncompressed are mapped, not read: a trace may be larger than memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO
from zipfile import ZipFile

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.arrays import member_names, read_arrays, write_member
from jaxmoe.traces.formats.expert_choices import layers_of_rows
from jaxmoe.traces.formats.source import Format, Hints, TraceSource
from jaxmoe.traces.trace import GatingTrace, LoadCounts, TraceError, chunks, release

REQUIRED = ("experts", "num_experts", "layer_ids", "seq_start")
OPTIONAL = ("is_repeat", "phase", "seq_name", "weights", "logits")
LOADS = ("counts", "counts_by_group", "group_name", "num_experts", "layer_ids", "top_k")
COMPRESSED_BYTES = 2**30  # arrays of more than this in all are stored as they are, so that they can be mapped


Part = tuple[np.ndarray, np.ndarray]
"""Some tokens: experts int [token, layer, top_k], and logits float32 [token, layer, expert], or of no experts."""


def write_trace_in_parts(
    path: Path,
    parts: Iterable[np.ndarray] | Iterable[Part],
    *,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    layer_ids: Sequence[int],
    facts: dict[str, str],
    seq_start: np.ndarray | None = None,
    seq_name: tuple[str, ...] | None = None,
    phase: np.ndarray | None = None,
    logits: bool = False,
) -> None:
    """Write a trace of which `parts`, experts int [some tokens, layer, top_k], come one after another.

    With `logits`, parts have these beside them; they wait in a file aside until all choices are written. No more than
    one part is held. Raises `TraceError` for parts that are no choices of this model or not `num_tokens` in all; then
    an older file of that name stays as it is.
    """
    frame = GatingTrace(  # all but the choices, checked as a trace of one layer
        experts=np.broadcast_to(np.int16(0), (num_tokens, 1, 1)),
        num_experts=num_experts,
        layer_ids=np.zeros(1, np.int64),
        seq_start=np.zeros(1, np.int64) if seq_start is None else seq_start,
        is_repeat=None,
        facts=facts,
        seq_name=seq_name,
        phase=phase,
    )
    entries = _entries(frame) | {"layer_ids": np.asarray(layer_ids)}
    del entries["experts"]
    shape = (num_tokens, len(layer_ids), top_k)
    with atomic_write(path) as aside, ZipFile(aside, "w") as archive, TemporaryFile(dir=path.parent) as waiting:
        for name, array in entries.items():
            write_member(archive, name, array.shape, array.dtype, [array])
        chosen = _checked(_kept(parts, waiting), shape, num_experts, np.asarray(layer_ids))
        write_member(archive, "experts", shape, np.int16, chosen)
        if logits:
            waiting.flush()
            values = np.memmap(waiting, np.float32, "r", shape=(num_tokens, len(layer_ids), num_experts))
            write_member(archive, "logits", values.shape, values.dtype, _pieces(values))


def _kept(parts: Iterable[np.ndarray] | Iterable[Part], waiting: IO[bytes]) -> Iterator[np.ndarray]:
    """The choices of parts, whose logits go to a file that waits."""
    for part in parts:
        if isinstance(part, tuple):
            waiting.write(np.ascontiguousarray(part[1], np.float32).tobytes())
            yield part[0]
        else:
            yield part


def _matches(source: TraceSource, array: str) -> bool:
    return source.head.startswith(b"PK") and f"{array}.npy" in member_names(source.path)


def _is_loads(source: TraceSource) -> bool:
    return _matches(source, "counts") and not _matches(source, "experts")


def _is_trace(source: TraceSource) -> bool:
    """Any other zip, too, so that an error tells what is missing; but not one of pickled tensors."""
    return source.head.startswith(b"PK") and not any(name.endswith("data.pkl") for name in member_names(source.path))


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    arrays = read_arrays(source.path)
    if "experts" not in arrays:
        raise TraceError(f"has no array experts, only {sorted(arrays)}; use a trace file")
    experts, phase, names = arrays["experts"], arrays.get("phase"), arrays.get("seq_name")
    if names is not None and (names.ndim != 1 or names.dtype.kind != "U"):
        raise TraceError(f"seq_name is {names.dtype} of shape {names.shape}, expected a list of texts")
    num_experts = hints.agreed_experts(_whole(arrays, "num_experts"))
    if num_experts is None:
        raise TraceError("does not state num_experts; add that array or name the model")
    return GatingTrace(
        experts=experts,
        num_experts=num_experts,
        layer_ids=arrays.get("layer_ids", np.arange(experts.shape[1] if experts.ndim > 1 else 0)),
        seq_start=arrays.get("seq_start", np.zeros(1, np.int64)),
        is_repeat=arrays.get("is_repeat"),
        facts=_facts(arrays, {*REQUIRED, *OPTIONAL} - {"phase"}),
        weights=arrays.get("weights"),
        logits=arrays.get("logits"),
        phase=phase if phase is not None and phase.ndim > 0 else None,
        seq_name=None if names is None else tuple(names.tolist()),
    )


def _read_loads(source: TraceSource, hints: Hints) -> LoadCounts:
    arrays = read_arrays(source.path)
    if arrays["counts"].ndim == 3 and "counts_by_group" not in arrays:  # windows alone
        arrays |= {"counts": arrays["counts"].sum(axis=0), "counts_by_group": arrays["counts"]}
    counts = arrays["counts"]
    if counts.ndim != 2:
        raise TraceError(f"counts has shape {counts.shape}, expected [layer, expert], or [window, layer, expert]")
    stated = hints.agreed_experts(_whole(arrays, "num_experts"))
    if stated not in (None, counts.shape[1]):
        raise TraceError(f"counts has {counts.shape[1]} experts, but num_experts is {stated}")
    windows, window_name = _windows(arrays)
    top_k = _whole(arrays, "top_k")
    layers, kept = (
        (arrays["layer_ids"], slice(None))
        if "layer_ids" in arrays
        else layers_of_rows(np.asarray(counts.any(axis=1)), hints)
    )
    loads = LoadCounts(
        counts=windows[:, kept],
        layer_ids=np.asarray(layers),
        top_k=hints.top_k if top_k is None else top_k,
        window_name=window_name,
        facts=_facts(arrays, {*LOADS}),
    )
    if not np.array_equal(loads.total().counts[0], counts[kept]):
        raise TraceError("counts is not the sum of its windows; the file was changed, get it again")
    return loads


def _windows(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Counts [window, layer, expert] as fine as the file has them, and the windows' names."""
    name = next((name for name in ("counts_by_request", "counts_by_group") if name in arrays), None)
    if name is None:
        return arrays["counts"][None], ("all",)
    windows = arrays[name]
    if windows.shape[1:] != arrays["counts"].shape:
        raise TraceError(f"{name} has shape {windows.shape}, expected windows of {arrays['counts'].shape}")
    if name == "counts_by_request":
        return windows, tuple(f"request {i}" for i in range(len(windows)))
    groups = arrays.get("group_name", np.arange(len(windows)))
    if groups.ndim != 1:
        raise TraceError(f"group_name has shape {groups.shape}, expected one name for each of counts_by_group")
    return windows, tuple(map(str, groups.tolist()))


def _whole(arrays: dict[str, np.ndarray], name: str) -> int | None:
    """One whole number, `None` where it is not stated."""
    stated = arrays.get(name)
    if stated is None:
        return None
    if stated.ndim != 0 or stated.dtype.kind not in "iu":
        raise TraceError(f"{name} is {stated.dtype} of shape {stated.shape}, expected one whole number")
    return int(stated)


def _facts(arrays: dict[str, np.ndarray], taken: set[str]) -> dict[str, str]:
    return {name: str(array) for name, array in arrays.items() if name not in taken and array.ndim == 0}


def _entries(trace: GatingTrace) -> dict[str, np.ndarray]:
    """The arrays of a trace's file. Raises `TraceError` when a fact has the name of one."""
    optional = {name: getattr(trace, name) for name in OPTIONAL if getattr(trace, name) is not None}
    taken = {*REQUIRED, *OPTIONAL} - ({"phase"} - optional.keys())
    entries = {name: getattr(trace, name) for name in REQUIRED} | optional
    return _with_facts(entries, trace.facts, taken)


def _with_facts(entries: dict[str, Any], facts: dict[str, str], taken: set[str]) -> dict[str, np.ndarray]:
    clash = facts.keys() & (taken | {"file", "allow_pickle"})  # the last two are numpy's
    if clash:
        raise TraceError(f"facts named {sorted(clash)} cannot be written; rename them")
    return {
        name: np.asarray(entry) if not isinstance(entry, np.ndarray) else entry
        for name, entry in (entries | facts).items()
    }


def _checked(
    parts: Iterable[np.ndarray], shape: tuple[int, ...], num_experts: int, layer_ids: np.ndarray
) -> Iterator[np.ndarray]:
    """The parts as int16, once they are known to be choices of the model."""
    done = 0
    for part in parts:
        if part.shape[1:] != shape[1:] or done + len(part) > shape[0]:
            raise TraceError(f"the part at token {done} has shape {part.shape}, expected parts of {shape} in all")
        start = np.zeros(1, np.int64)
        yield GatingTrace(part, num_experts, layer_ids, start, None, {}).experts
        done += len(part)
    if done < shape[0]:
        raise TraceError(f"the parts have {done} tokens in all, expected {shape[0]}")


def _write(path: Path, trace: GatingTrace) -> list[str]:
    _save(path, _entries(trace))
    return []


def _write_loads(path: Path, loads: LoadCounts) -> list[str]:
    entries: dict[str, Any] = {"counts": loads.total().counts[0], "num_experts": loads.num_experts}
    entries["layer_ids"] = loads.layer_ids
    if loads.window_name != ("all",):
        entries |= {"counts_by_group": loads.counts, "group_name": loads.window_name}
    if loads.top_k is not None:
        entries["top_k"] = loads.top_k
    _save(path, _with_facts(entries, loads.facts, {*LOADS, "counts_by_request"}))
    return []


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic_write(path) as aside, aside.open("wb") as file:
        if sum(array.nbytes for array in arrays.values()) <= COMPRESSED_BYTES:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
        else:
            _store(file, arrays)


def _store(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    with ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            write_member(archive, name, array.shape, array.dtype, _pieces(array))


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    if array.ndim == 0:
        yield array
        return
    for part in chunks(array.shape, array.dtype.itemsize):
        yield array[part]
        release(array)


TRACE = Format("npz", _is_trace, _read, _write, suffix=".npz", holds=frozenset({*OPTIONAL, "seq_start"}))
LOAD_COUNTS = Format("npz", _is_loads, _read_loads, _write_loads, suffix=".npz")
