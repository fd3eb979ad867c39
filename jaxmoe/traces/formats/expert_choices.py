"""Choices of experts as formats have them, and the sequences that tokens belong to."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.traces.formats.source import AGAIN, MOST_DIGITS, Hints, TraceSource, shown
from jaxmoe.traces.trace import DECODE, PREFILL, GatingTrace, TraceError

# Lists of expert ids as arrays, and the first of them that does not fit.


def choices_of(place: str, tokens: object) -> np.ndarray:
    """A list over tokens of lists of expert ids as int64 [token, top_k]; `place` names it in a `TraceError`."""
    if not isinstance(tokens, list) or not tokens:
        raise TraceError(f"{place} holds {shown(tokens)}, expected a list of tokens")
    _name_misfit(place, tokens, [type(chosen) is list for chosen in tokens], "a list of expert ids")
    top_k = len(tokens[0])
    _name_misfit(place, tokens, [len(chosen) == top_k for chosen in tokens], f"{top_k} expert ids as in token 0")
    # One look at all types is fast; the search runs only when one of them is wrong.
    if set(map(type, chain.from_iterable(tokens))) - {int}:
        whole = [all(type(expert) is int for expert in chosen) for chosen in tokens]
        _name_misfit(place, tokens, whole, "whole numbers")
    try:
        experts = np.asarray(tokens, np.int64)
    except OverflowError:
        raise TraceError(f"{place} holds an expert id of more than 64 bits; {AGAIN}") from None
    check_not_negative(place, experts)
    return experts


def check_not_negative(place: str, experts: np.ndarray) -> None:
    """Raise `TraceError` for the first negative id: -1 stands for a missing choice in npz alone."""
    if (experts < 0).any():
        at = tuple(np.argwhere(experts < 0)[0])
        raise TraceError(f"{place}, token {at[0]} chose expert {experts[at]}, expected 0 or more; {AGAIN}")


def check_rows(row: str, experts: np.ndarray) -> None:
    """Raise `TraceError` for the first negative id in choices [token, layer, top_k]; `row` says what a layer is."""
    for layer in np.flatnonzero((experts < 0).any(axis=(0, 2))):
        check_not_negative(f"{row} {layer}", experts[:, layer])


def is_layers(value: object) -> bool:
    """Whether a JSON value is an object in which some key is a layer number."""
    return isinstance(value, dict) and any(key.isascii() and key.isdecimal() for key in value)


def layer_number(key: object) -> int:
    """The layer that a key of a JSON object names."""
    if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MOST_DIGITS):
        raise TraceError(f"JSON has the key {shown(key)}, expected only layer numbers")
    return int(key)


def stacked_layers(rows: dict[int, np.ndarray]) -> np.ndarray:
    """Arrays [token, top_k] of layers as [token, layer, top_k], layers ascending. Raises where they differ."""
    order = sorted(rows)
    for layer in order:
        if rows[layer].shape != rows[order[0]].shape:
            shapes = "{} tokens with {} experts each".format
            raise TraceError(
                f"layer {layer} has {shapes(*rows[layer].shape)}, but layer {order[0]} has "
                f"{shapes(*rows[order[0]].shape)}; every layer needs the same tokens"
            )
    return np.stack([rows[layer] for layer in order], axis=1)


def _name_misfit(place: str, tokens: list[Any], fits: list[bool], expected: str) -> None:
    """Raise `TraceError` for the first token that does not fit."""
    if not all(fits):
        token = fits.index(False)
        raise TraceError(f"{place}, token {token} is {shown(tokens[token])}, expected {expected}")


# Which rows are layers with experts, in sources that have a row for every layer and zeros in dense ones.


def expert_layers(used: np.ndarray, hints: Hints) -> list[int]:
    """The layers with experts, given which rows have anything but zeros, bool [layer].

    Without a hint they are those rows. Raises `TraceError` where the model has another number of layers, or no
    experts in a row that is used.
    """
    if hints.num_layers not in (None, len(used)):
        raise TraceError(f"has rows of {len(used)} layers, but the model has {hints.num_layers}; use a trace of it")
    layers = np.flatnonzero(used).tolist() if hints.layer_ids is None else list(hints.layer_ids)
    if not layers:
        raise TraceError("has zeros in every layer; record the trace again")
    beyond = [layer for layer in layers if not 0 <= layer < len(used)]
    if beyond:
        raise TraceError(f"has rows of {len(used)} layers, but the model has experts in {beyond}; use a trace of it")
    strange = sorted(set(np.flatnonzero(used).tolist()) - set(layers))
    if strange:
        raise TraceError(f"has choices in layers {strange}, where the model has no experts; use a trace of this model")
    return layers


def layers_of_rows(used: np.ndarray, hints: Hints) -> tuple[list[int], list[int]]:
    """The layers of rows that say nothing of layers, given which have anything but zeros, bool [row]; and their rows.

    As many rows as the model has layers with experts are these in order, as many as it has layers are all of them.
    Without a hint rows are numbered from 0. Raises `TraceError` for another number: nobody could tell which they are.
    """
    if hints.layer_ids is None:
        return [*range(len(used))], [*range(len(used))]
    if len(used) == len(hints.layer_ids):
        return list(hints.layer_ids), [*range(len(used))]
    if len(used) == hints.num_layers:
        layers = expert_layers(used, hints)
        return layers, layers
    raise TraceError(
        f"has rows of {len(used)} layers, but the model has experts in {len(hints.layer_ids)}; give a row for each of "
        "these, or state them, as layer_ids beside counts in an npz"
    )


def with_dense(rows: np.ndarray, layer_ids: Sequence[int]) -> np.ndarray:
    """Rows [some, layer, ...] of layers with experts among zeros, one for every layer up to the last of them."""
    full = np.zeros((rows.shape[0], max(layer_ids) + 1, *rows.shape[2:]), rows.dtype)
    full[:, list(layer_ids)] = rows
    return full


# Folders with a file for each rank.


def by_rank(source: TraceSource, pattern: str) -> list[tuple[str, Path]]:
    """Files whose name in the folder matches, the rank in the first group, by rank.

    Raises `TraceError` where a rank from 0 to the last is missing.
    """
    ranks = {int(re.sub(pattern, r"\1", name)): (name, file) for name, file in source.matching(pattern).items()}
    if len(ranks) <= max(ranks):
        missing = islice((rank for rank in range(max(ranks)) if rank not in ranks), 8)
        raise TraceError(f"misses the files of ranks {list(missing)} of {max(ranks) + 1}; get them, too")
    return [ranks[rank] for rank in sorted(ranks)]


# A trace put together of sequences, and taken apart into them.


@dataclass(frozen=True)
class RecordedSequence:
    """One recorded sequence of tokens, with the fields of a `GatingTrace`.

    `experts` may be of any whole-number type. `name` may be empty where there is only one sequence.
    """

    name: str
    experts: np.ndarray
    phase: np.ndarray | None = None
    weights: np.ndarray | None = None
    logits: np.ndarray | None = None


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Put the name of a file or record, where it has one, before every `TraceError` from inside."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{place}: {error}" if place else str(error)) from None


def joined(
    sequences: Sequence[RecordedSequence], layer_ids: Sequence[int], num_experts: int | None, facts: dict[str, str]
) -> GatingTrace:
    """The trace of all sequences in order, checked one by one so that an error names its sequence.

    Where the number of experts is not known it is the largest id + 1, and the facts say so. What some
    sequences lack (weights, logits, phase) the trace has not.
    """
    first = sequences[0]
    for other in sequences[1:]:
        if other.experts.shape[1:] != first.experts.shape[1:]:
            shapes = "{} layers with {} experts per token".format
            raise TraceError(
                f"{other.name} has {shapes(*other.experts.shape[1:])}, but {first.name} has "
                f"{shapes(*first.experts.shape[1:])}; every sequence needs the same model"
            )
    if num_experts is None:
        num_experts = max(int(part.experts.max(initial=0)) for part in sequences) + 1
        facts = facts | {"num_experts_from": "largest id + 1"}
    checked = [_alone(part, layer_ids, num_experts, facts) for part in sequences]
    lengths = [part.num_tokens for part in checked]
    return GatingTrace(
        experts=np.concatenate([part.experts for part in checked]),
        num_experts=num_experts,
        layer_ids=np.asarray(layer_ids),
        seq_start=np.cumsum([0, *lengths[:-1]]),
        is_repeat=None,
        facts=facts,
        weights=_together([part.weights for part in checked]),
        logits=_together([part.logits for part in checked]),
        phase=_together([part.phase for part in checked]),
        seq_name=tuple(part.name for part in sequences) if first.name else None,
    )


def parted(trace: GatingTrace) -> list[slice]:
    """The tokens of every sequence."""
    return [slice(a, b) for a, b in zip(trace.seq_start, [*trace.seq_start[1:], trace.num_tokens], strict=True)]


def names(trace: GatingTrace) -> list[str]:
    """A name for every sequence: its own, or its number."""
    return [str(i) for i in range(len(trace.seq_start))] if trace.seq_name is None else list(trace.seq_name)


def prefill_lengths(trace: GatingTrace, name: str) -> list[int] | None:
    """Tokens of every sequence before its first decoded one; `None` where phases are not known.

    Raises `TraceError` where a sequence goes back to prefill, which the format of this name cannot tell.
    """
    if trace.phase is None:
        return None
    lengths = []
    for number, part in enumerate(parted(trace)):
        phase = trace.phase[part]
        if (phase[1:] < phase[:-1]).any():
            raise TraceError(
                f"sequence {number} goes back from decode to prefill, which {name} has no place for; write npz"
            )
        lengths.append(int((phase == PREFILL).sum()))
    return lengths


def phases(prefill: int, tokens: int) -> np.ndarray:
    """The phase of every token of a sequence, int8 [token]."""
    return np.repeat(np.array([PREFILL, DECODE], np.int8), [prefill, tokens - prefill])


def _alone(part: RecordedSequence, layer_ids: Sequence[int], num_experts: int, facts: dict[str, str]) -> GatingTrace:
    with naming(part.name):
        return GatingTrace(
            experts=part.experts,
            num_experts=num_experts,
            layer_ids=np.asarray(layer_ids),
            seq_start=np.zeros(1, np.int64),
            is_repeat=None,
            facts=facts,
            weights=part.weights,
            logits=part.logits,
            phase=part.phase,
        )


def _together(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if len(present) == len(arrays) else None
