"""Gating traces and load counts as arrays, and walking through large ones in chunks."""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from jaxmoe.errors import InputError

# Going through arrays of any size in bounded memory, a run of tokens at a time.

CHUNK_BYTES = 2**26
ROWS_AT_ONCE = 128


def chunks(shape: tuple[int, ...], itemsize: int, most_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices of the first axis of an array of this shape that cover it in order, about `most_bytes` each."""
    rows = max(1, most_bytes // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def take(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of an array, given by index.

    Those of an array that is mapped from a file are copied a few at a time: the system may map megabytes with each.
    """
    if not _mapping(array):
        return array[rows]
    taken = np.empty((len(rows), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        taken[part] = array[rows[part]]
        release(array)
    return taken


def release(*arrays: np.ndarray | None) -> None:
    """Let go of the memory of what was read from arrays that are mapped from a file; they can be read again."""
    for array in arrays:
        if mapping := _mapping(array):
            mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(array: np.ndarray | None) -> mmap.mmap | None:
    """The mapping of an array that is mapped from a file."""
    mapping = getattr(array, "_mmap", None)
    return mapping if isinstance(mapping, mmap.mmap) else None


# A gating trace: which experts the tokens of a model really chose.

MAX_EXPERTS = 2**15  # ids are int16
CHECKED_BYTES = 2**22  # at a time: what stays in the cache
MOST_COMPARED = 16  # choices of a token, each with each
MISSING = -1  # in place of an expert: what the token chose there is not known
PREFILL, DECODE = 0, 1
PER_TOKEN = ("experts", "weights", "logits", "is_repeat", "phase")  # arrays whose first axis is tokens


class TraceError(InputError):
    """A trace that cannot be used, with the reason and the remedy."""


@dataclass(frozen=True)
class GatingTrace:
    """Recorded gating, in token order. Raises `TraceError` when the parts do not fit together.

    `experts` int16 [token, layer, top_k], column 0 the strongest choice, no expert twice in one choice, -1
    where a choice is missing; `layer_ids` the layers' numbers in the full model, int [layer]; `seq_start` the
    first token of every sequence, ascending from 0, int [sequence]; `is_repeat` marks tokens that run an
    earlier context again, bool [token] or `None`; `facts` are strings about the source.

    What not every source has is `None` elsewhere: `weights` of the gate, float [token, layer, top_k];
    `logits` of the router, float [token, layer, expert]; `phase` of a token, 0 prefill or 1 decode, int
    [token]; `seq_name` of a sequence, such as its topic. Large arrays may be mapped from a file.
    """

    experts: np.ndarray
    num_experts: int
    layer_ids: np.ndarray
    seq_start: np.ndarray
    is_repeat: np.ndarray | None
    facts: dict[str, str]
    weights: np.ndarray | None = None
    logits: np.ndarray | None = None
    phase: np.ndarray | None = None
    seq_name: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise TraceError(f"num_experts is {self.num_experts}, expected 1 to {MAX_EXPERTS}")
        self._check_types()
        self._check_shapes()
        for part in chunks(self.experts.shape, self.experts.dtype.itemsize, CHECKED_BYTES):
            self._check_choices(part.start, self.experts[part])
            self._check_numbers(part)
            release(self.experts, self.weights, self.logits)
        # After the check, so that no id can wrap around.
        object.__setattr__(self, "experts", self.experts.astype(np.int16, copy=False))

    def _check_types(self) -> None:
        for name, kinds, expected in (
            ("experts", "iu", "whole numbers"),
            ("layer_ids", "iu", "whole numbers"),
            ("seq_start", "iu", "whole numbers"),
            ("is_repeat", "b", "bool"),
            ("weights", "f", "floating-point numbers"),
            ("logits", "f", "floating-point numbers"),
            ("phase", "iu", "0 for prefill or 1 for decode"),
        ):
            array = getattr(self, name)
            if array is not None and array.dtype.kind not in kinds:
                raise TraceError(f"{name} has type {array.dtype}, expected {expected}")

    def _check_shapes(self) -> None:
        if self.experts.ndim != 3 or 0 in self.experts.shape:
            raise TraceError(f"experts has shape {self.experts.shape}, expected non-empty [token, layer, top_k]")
        tokens, layers, top_k = self.experts.shape
        for name, shape, meaning in (
            ("layer_ids", (layers,), "one id per layer"),
            ("is_repeat", (tokens,), "one mark per token"),
            ("phase", (tokens,), "one phase per token"),
            ("weights", (tokens, layers, top_k), "as experts"),
            ("logits", (tokens, layers, self.num_experts), "one per token, layer and expert"),
        ):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise TraceError(f"{name} has shape {array.shape}, expected {shape}, {meaning}")
        if len(set(self.layer_ids.tolist())) < layers:
            raise TraceError(f"layer_ids names a layer twice: {self.layer_ids.tolist()}")
        start = self.seq_start
        if start.ndim != 1 or start[:1].tolist() != [0] or start[-1] >= tokens or (start[1:] <= start[:-1]).any():
            raise TraceError(f"seq_start must be a list that ascends from 0 and stays below {tokens}, the tokens")
        if self.seq_name is not None and len(self.seq_name) != len(start):
            raise TraceError(f"seq_name has {len(self.seq_name)} names for the {len(start)} sequences of seq_start")
        if self.phase is not None and not np.isin(self.phase, (PREFILL, DECODE)).all():
            at = int(np.flatnonzero(~np.isin(self.phase, (PREFILL, DECODE)))[0])
            raise TraceError(f"token {at} has phase {self.phase[at]}, expected 0 for prefill or 1 for decode")

    def _check_choices(self, first: int, experts: np.ndarray) -> None:
        if experts.min() < MISSING or experts.max() >= self.num_experts:
            at = np.argwhere((experts < MISSING) | (experts >= self.num_experts))[0]
            raise TraceError(
                f"{self._place(first, at)} chose expert {experts[tuple(at)]}, expected 0..{self.num_experts - 1} "
                "or -1 for a missing choice; use the model that the trace is of"
            )
        twice = _chosen_twice(experts)
        if twice.any():
            at = np.argwhere(twice)[0]
            ordered = np.sort(experts[tuple(at)])
            expert = next(one for one, other in pairwise(ordered) if one == other != MISSING)
            raise TraceError(f"{self._place(first, at)} chose expert {expert} twice; a token chooses it once")

    def _check_numbers(self, part: slice) -> None:
        for name in ("weights", "logits"):
            array = getattr(self, name)
            if array is not None and not (finite := np.isfinite(array[part])).all():
                at = np.argwhere(~finite)[0]
                raise TraceError(f"{name} of {self._place(part.start, at)} are not finite; record the trace again")

    def _place(self, first: int, at: np.ndarray) -> str:
        return f"layer {self.layer_ids[at[1]]}, token {first + at[0]}"

    @property
    def num_tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    def without_repeats(self) -> "GatingTrace":
        """The trace without tokens that are marked as re-runs; itself where none is marked."""
        if self.is_repeat is None:
            return self
        kept = np.flatnonzero(~self.is_repeat)
        if kept.size == 0:
            raise TraceError("every token is marked as a repeat; keep repeats or use another trace")
        return self.select_tokens(kept)

    def without_missing(self) -> "GatingTrace":
        """The trace without tokens of which a choice is missing; itself where none is."""
        whole = np.concatenate(
            [(self.experts[part] != MISSING).all(axis=(1, 2)) for part in chunks(self.experts.shape, 2)]
        )
        if whole.all():
            return self
        if not whole.any():
            raise TraceError("every token misses a choice; select layers that were recorded, or use another trace")
        return self.select_tokens(np.flatnonzero(whole))

    def select_tokens(self, tokens: np.ndarray) -> "GatingTrace":
        """The trace of some tokens, given by ascending index. A sequence starts at its first kept token."""
        starts = np.searchsorted(tokens, self.seq_start)
        # A sequence of which nothing is kept starts where the next one does, or after the last token.
        kept = np.flatnonzero(np.diff(starts, append=len(tokens)) > 0)
        parts: dict[str, Any] = {name: getattr(self, name) for name in PER_TOKEN}
        parts = {name: None if array is None else take(array, tokens) for name, array in parts.items()}
        names = None if self.seq_name is None else tuple(self.seq_name[i] for i in kept)
        return replace(self, seq_start=starts[kept], seq_name=names, **parts)

    def halves(self) -> tuple["GatingTrace", "GatingTrace"]:
        """Every other sequence, to tune on, and the rest, to evaluate on. Raises `TraceError` for a single one."""
        if len(self.seq_start) < 2:
            raise TraceError("the trace has one sequence, which halves would cut; use one of several")
        number = np.searchsorted(self.seq_start, np.arange(self.num_tokens), side="right")
        odd, even = (self.select_tokens(np.flatnonzero(number % 2 == part)) for part in (1, 0))
        return odd, even

    def select_layers(self, layer_ids: Sequence[int]) -> "GatingTrace":
        """The trace of some layers, in the order given. Raises `TraceError` for a layer it does not have."""
        rows = {int(layer): row for row, layer in enumerate(self.layer_ids)}
        missing = [layer for layer in layer_ids if layer not in rows]
        if missing:
            raise TraceError(f"layers {missing} are not in the trace, which has {sorted(rows)}")
        order = [rows[layer] for layer in layer_ids]
        if order == list(range(len(self.layer_ids))):
            return self  # a copy of a large trace might not fit in memory
        return replace(
            self,
            experts=self.experts[:, order],
            layer_ids=np.asarray(layer_ids),
            weights=None if self.weights is None else self.weights[:, order],
            logits=None if self.logits is None else self.logits[:, order],
        )


def _chosen_twice(experts: np.ndarray) -> np.ndarray:
    """Where a token chose an expert twice in one layer, bool [token, layer]."""
    if experts.shape[2] > MOST_COMPARED:
        ordered = np.sort(experts, axis=2)
        return ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != MISSING)).any(axis=2)
    # Comparing a few whole columns is several times as fast as sorting every choice.
    columns = np.ascontiguousarray(np.moveaxis(experts, 2, 0))
    twice = np.zeros(experts.shape[:2], bool)
    for one, other in combinations(columns, 2):
        twice |= (one == other) & (one != MISSING)
    return twice


# Load counts: how many tokens were routed to every expert, where their order is not known.


@dataclass(frozen=True)
class LoadCounts:
    """Tokens routed to each expert. Raises `TraceError` when the parts do not fit together.

    `counts` int64 [window, layer, expert], where a window is a stretch of time, a request or a topic, named by
    `window_name`; `layer_ids` the layers' numbers in the full model, int [layer]; `top_k` experts chosen per
    token, `None` where the source does not say; `facts` are strings about the source.
    """

    counts: np.ndarray
    layer_ids: np.ndarray
    top_k: int | None
    window_name: tuple[str, ...]
    facts: dict[str, str]

    def __post_init__(self) -> None:
        counts, ids = self.counts, self.layer_ids
        if counts.dtype.kind not in "iu":
            raise TraceError(f"counts has type {counts.dtype}, expected whole numbers")
        if counts.ndim != 3 or 0 in counts.shape:
            raise TraceError(f"counts has shape {counts.shape}, expected non-empty [window, layer, expert]")
        if counts.shape[2] > MAX_EXPERTS:
            raise TraceError(f"counts is of {counts.shape[2]} experts, expected at most {MAX_EXPERTS}")
        if ids.dtype.kind not in "iu" or ids.shape != counts.shape[1:2] or len(set(ids.tolist())) < ids.size:
            raise TraceError(
                f"layer_ids is {ids.dtype} of shape {ids.shape}, expected {counts.shape[1]} different whole numbers"
            )
        if counts.dtype.kind == "i" and counts.min() < 0:
            window, layer, expert = np.argwhere(counts < 0)[0]
            raise TraceError(f"counts of layer {ids[layer]}, expert {expert}, window {window} are negative")
        if self.top_k is not None and not 1 <= self.top_k <= counts.shape[2]:
            raise TraceError(f"top_k is {self.top_k}, expected 1 to {counts.shape[2]}, the experts")
        if len(self.window_name) != counts.shape[0]:
            raise TraceError(f"window_name has {len(self.window_name)} names for {counts.shape[0]} windows")
        object.__setattr__(self, "counts", counts.astype(np.int64, copy=False))

    @property
    def num_experts(self) -> int:
        return self.counts.shape[2]

    def total(self) -> "LoadCounts":
        """All windows as one."""
        return replace(self, counts=self.counts.sum(axis=0, keepdims=True), window_name=("all",))


def load_counts(trace: GatingTrace) -> LoadCounts:
    """The loads of a trace, one window. Missing choices count for no expert."""
    counts = np.zeros((trace.experts.shape[1], trace.num_experts), np.int64)
    for part in chunks(trace.experts.shape, 16):
        counts += tally(trace.experts[part], trace.num_experts)
        release(trace.experts)
    return LoadCounts(
        counts=counts[None],
        layer_ids=trace.layer_ids,
        top_k=trace.top_k,
        window_name=("all",),
        facts=trace.facts,
    )


def tally(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """How often each expert was chosen, int64 [layer, expert], in choices int [token, layer, top_k]."""
    layers = experts.shape[1]
    place = experts.astype(np.int64) + 1 + np.arange(layers)[:, None] * (num_experts + 1)
    # The first slot of a layer is for missing choices.
    return np.bincount(place.ravel(), minlength=layers * (num_experts + 1)).reshape(layers, -1)[:, 1:]
