"""SGLang: routed experts of responses, and the counts of its recorder."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.arrays import member_names
from jaxmoe.traces.formats.expert_choices import (
    RecordedSequence,
    check_rows,
    expert_layers,
    joined,
    names,
    naming,
    parted,
    prefill_lengths,
    with_dense,
)
from jaxmoe.traces.formats.source import AGAIN, Format, Hints, TraceSource, check_whole, decode_base64, lacks
from jaxmoe.traces.formats.tensors import PICKLE, read_tensors, write_tensors
from jaxmoe.traces.formats.vllm import KEY, START_KEY, Payload, payloads, phase_of
from jaxmoe.traces.trace import MISSING, GatingTrace, LoadCounts, TraceError

COUNTS = "logical_count"


def _matches_recorder(source: TraceSource) -> bool:
    if source.path.is_dir():
        return any(name.endswith(".pt") for name in source.files)
    if source.head.startswith(b"PK"):
        return any(name.endswith(PICKLE) for name in member_names(source.path))
    return any(COUNTS in found for found in source.json_objects[:1])


def _read_recorder(source: TraceSource, hints: Hints) -> LoadCounts:
    steps = []
    for name, file in source.files.items():
        if name.endswith(".pt") or not source.path.is_dir():
            with naming(name if source.path.is_dir() else ""):
                steps.append(_counts(source.json_objects[0] if source.json_objects else read_tensors(file)))
                if steps[-1].shape[1:] != steps[0].shape[1:]:
                    raise TraceError(f"has layers and experts {steps[-1].shape[1:]}, the others {steps[0].shape[1:]}")
    counts = np.concatenate(steps)
    hints.agreed_experts(counts.shape[2])
    layers = expert_layers(np.asarray(counts.any(axis=(0, 2))), hints)
    windows = tuple(f"step {number}" for number in range(len(counts)))
    return LoadCounts(counts[:, layers], np.asarray(layers), hints.top_k, windows, {"source": source.path.name})


def _counts(dump: object) -> np.ndarray:
    """The counts in a dump, [step, layer, expert]."""
    if not isinstance(dump, dict) or COUNTS not in dump:
        held = sorted(map(str, dump)) if isinstance(dump, dict) else type(dump).__name__
        raise TraceError(f"has no {COUNTS} but {held}; record with --expert-distribution-recorder-mode stat")
    counts = dump[COUNTS]
    if isinstance(counts, list):  # of JSON
        try:
            counts = np.array(counts)
        except ValueError:
            raise TraceError(f"{COUNTS} has rows of different lengths; {AGAIN}") from None
    if isinstance(counts, np.ndarray) and counts.ndim == 2:
        counts = counts[None]  # SGLang takes the sum of steps, too
    if not isinstance(counts, np.ndarray) or counts.ndim != 3 or 0 in counts.shape or counts.dtype.kind not in "iu":
        shape = counts.shape if isinstance(counts, np.ndarray) else type(counts).__name__
        raise TraceError(f"{COUNTS} is {shape}, expected whole numbers [step, layer, expert]; {AGAIN}")
    return counts


def _write_recorder(path: Path, loads: LoadCounts) -> list[str]:
    counts = with_dense(loads.counts, loads.layer_ids.tolist())
    with atomic_write(path) as aside:
        write_tensors(aside, {"rank": 0, COUNTS: counts})
    unnamed = tuple(f"step {number}" for number in range(len(counts))) == loads.window_name
    return ([] if unnamed else ["window_name is left out"]) + ["top_k is left out"] * (loads.top_k is not None)


LOAD_COUNTS = Format("sglang", _matches_recorder, _read_recorder, _write_recorder, suffix=".pt")


# The routed experts that SGLang returns (https://docs.sglang.io, --enable-return-routed-experts).
#
# Base64 of int32 ids [token, layer, top_k] in `routed_experts` of `meta_info` or `sgl_ext`, in responses or bare.
# There is a row for every layer of the model, zeros in dense ones, and no shape: the number of layers and top_k come
# from hints, and where top_k is 1 the layers with experts, too. `routed_experts_start_len` tokens at the start of a
# sequence were left out; they are read as missing choices. The number of experts without a hint is the largest id + 1.
#
# Written are JSON lines, a response for each sequence, with rows up to the last layer that has experts.

MOST_TOKENS = 2**22  # of a response that have no row


# Dumps of SGLang's expert distribution recorder in mode stat (--expert-distribution-recorder-mode).
#
# A `.pt` file, or a folder of them by time, with `logical_count` [step, layer, expert]. Or the same as JSON, also
# summed over steps, as --init-expert-location takes it. There is a row for every layer of the model, zeros in dense
# ones; the layers with experts are those with counts, or come from a hint. Every step is a window.


def _matches(source: TraceSource) -> bool:
    found = payloads(source.values)
    return bool(found) and isinstance(found[0].value, str)


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    if hints.num_layers is None:
        raise lacks("the number of layers", "--num-layers")
    if hints.top_k is None:
        raise lacks("top_k", "--top-k")
    found = payloads(source.values)
    rows = [_rows(payload, hints.num_layers, hints.top_k) for payload in found]
    layers = expert_layers(np.logical_or.reduce([some.any(axis=(0, 2)) for some in rows]), hints)
    if hints.top_k == 1 and hints.layer_ids is None and len(layers) < hints.num_layers:
        raise lacks("whether the layers with zeros only are dense or always chose expert 0", "--layer-ids")
    sequences = [
        _sequence(payload, some[:, layers], str(number) if len(found) > 1 else "")
        for number, (payload, some) in enumerate(zip(found, rows, strict=True))
    ]
    return joined(sequences, layers, hints.num_experts, {"source": source.path.name})


def _rows(payload: Payload, num_layers: int, top_k: int) -> np.ndarray:
    """The ids of a response, int32 [token, layer, top_k]."""
    with naming(payload.place):
        if not isinstance(payload.value, str):
            raise TraceError(f"{KEY} are a {type(payload.value).__name__}, expected base64 of int32")
        content = decode_base64(payload.value)
        if not content or len(content) % (4 * num_layers * top_k):
            raise TraceError(
                f"{KEY} have {len(content)} bytes, no multiple of {num_layers} layers x {top_k} experts x 4; "
                "they are damaged or of another model"
            )
        rows = np.frombuffer(content, "<i4").reshape(-1, num_layers, top_k)
        check_rows("layer", rows)
        return rows


def _sequence(payload: Payload, experts: np.ndarray, number: str) -> RecordedSequence:
    with naming(payload.place):
        if payload.start > MOST_TOKENS:
            raise TraceError(f"{START_KEY} is {payload.start}, expected at most {MOST_TOKENS} tokens; get it again")
        phase = phase_of(payload, payload.start + len(experts))
    if payload.start:
        unknown = np.full((payload.start, *experts.shape[1:]), MISSING, experts.dtype)
        experts = np.concatenate([unknown, experts])
    return RecordedSequence(payload.name or number, experts, phase)


def _write(path: Path, trace: GatingTrace) -> list[str]:
    prefill = prefill_lengths(trace, "sglang")
    starts = [_start(trace.experts[part]) for part in parted(trace)]
    recorded = [slice(part.start + start, part.stop) for part, start in zip(parted(trace), starts, strict=True)]
    for part in recorded:
        check_whole(trace.select_tokens(np.arange(part.start, part.stop)), "sglang but at the start of a sequence")
    with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
        for number, (name, part, start) in enumerate(zip(names(trace), recorded, starts, strict=True)):
            rows = with_dense(trace.experts[part].astype("<i4"), trace.layer_ids.tolist())
            meta: dict[str, Any] = {KEY: base64.b64encode(rows.tobytes()).decode(), START_KEY: start}
            if trace.seq_name is not None:
                meta["id"] = name
            if prefill is not None:
                tokens = start + len(rows)
                meta |= {"prompt_tokens": prefill[number], "completion_tokens": tokens - prefill[number] + 1}
            file.write(json.dumps({"text": "", "meta_info": meta}) + "\n")
    return []


def _start(experts: np.ndarray) -> int:
    """How many tokens at the start of a sequence miss all choices; the last token is never one of them."""
    known = (experts != MISSING).any(axis=(1, 2))
    return int(known.argmax()) if known.any() else 0


TRACE = Format("sglang", _matches, _read, _write, ".jsonl", frozenset({"seq_start", "seq_name", "phase"}))
