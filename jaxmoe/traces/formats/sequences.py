"""A trace put together of sequences, and taken apart into them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from jaxmoe.traces.trace import DECODE, PREFILL, GatingTrace, TraceError


@dataclass(frozen=True)
class Recorded:
    """One sequence, with the parts of a `GatingTrace`. `experts` may be of any whole-number type; the name may be
    empty where there is only one.
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
    sequences: Sequence[Recorded], layer_ids: Sequence[int], num_experts: int | None, facts: dict[str, str]
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


def _alone(part: Recorded, layer_ids: Sequence[int], num_experts: int, facts: dict[str, str]) -> GatingTrace:
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
