"""Responses of inference servers (vLLM and others) that tell which experts every token chose, as JSON."""

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.arrays import npy_array
from jaxmoe.traces.formats.expert_choices import (
    RecordedSequence,
    check_rows,
    joined,
    names,
    naming,
    parted,
    phases,
    prefill_lengths,
)
from jaxmoe.traces.formats.source import AGAIN, Format, Hints, TraceSource, check_whole, decode_base64, lacks, shown
from jaxmoe.traces.trace import MAX_EXPERTS, GatingTrace, LoadCounts, TraceError

KEY, PROMPT_KEY, START_KEY = "routed_experts", "prompt_routed_experts", "routed_experts_start_len"
# Responses of inference servers that tell which experts every token chose, as JSON or JSON lines.
#
# Where the choices are differs between servers and versions: in a choice of the response, in its `meta_info`,
# `sgl_ext` or `sglext`, or bare. A token that was not run has no row, so the last one of a response has none.

_HOLDERS = ("meta_info", "sgl_ext", "sglext")


@dataclass(frozen=True)
class Payload:
    """The choices of one response as its server encodes them, and what else it tells of them.

    `prompt` are those of prompt tokens where they are apart; `start` tokens before the first have no row.
    """

    place: str
    name: str | None
    value: Any
    prompt: Any = None
    start: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def payloads(values: list[Any]) -> list[Payload]:
    """All choices in the values of a JSON file; none where it is of another kind. Raises `TraceError`."""
    records = values[0] if len(values) == 1 and _is_batch(values[0]) else values
    found = [_of_record(f"record {number}", record) for number, record in enumerate(records)]
    if not any(found):
        return []
    if not all(found):
        number = [bool(some) for some in found].index(False)
        raise TraceError(f"record {number} has no {KEY}; ask the server for them in every request")
    return [payload for some in found for payload in some]


def phase_of(payload: Payload, tokens: int) -> np.ndarray | None:
    """Phases of the tokens of a response, int8 [token]; `None` where it does not count its tokens.

    Raises `TraceError` where the counts tell of more or fewer tokens than have rows.
    """
    if payload.prompt_tokens is None or payload.completion_tokens is None:
        return None
    expected = payload.prompt_tokens + max(payload.completion_tokens, 1) - 1
    if tokens != expected:
        raise TraceError(
            f"has choices of {tokens} tokens, but {payload.prompt_tokens} prompt and {payload.completion_tokens} "
            f"completion tokens make {expected}, the last one not run; get the response again"
        )
    return phases(payload.prompt_tokens, tokens)


def _is_batch(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(record, dict) for record in value)


def _of_record(place: str, record: object) -> list[Payload]:
    """Recorded experts of one response: a payload for each of its choices, none where it recorded none.

    Raises `TraceError` where some choices have recorded experts and others do not.
    """
    if isinstance(record, str) or (isinstance(record, list) and record and isinstance(record[0], list)):
        return [Payload(place, None, record)]
    if not isinstance(record, dict):
        return []
    choices = record.get("choices")
    holders = choices if isinstance(choices, list) and choices else [record]
    found = [
        _of_holder(f"{place}, choice {i}" if len(holders) > 1 else place, record, holder)
        for i, holder in enumerate(holders)
    ]
    if any(found) and not all(found):
        raise TraceError(f"{place}: some choices have no {KEY}; ask the server for them in every request")
    return [payload for payload in found if payload is not None]


def _of_holder(place: str, record: dict[str, Any], choice: object) -> Payload | None:
    parts = [choice] if isinstance(choice, dict) else []
    parts += [part[key] for part in (*parts, record) for key in _HOLDERS if isinstance(part.get(key), dict)]
    holder = next((part for part in parts if part.get(KEY) is not None), None)
    if holder is None:
        return None
    alone = not isinstance(record.get("choices"), list) or len(record["choices"]) == 1
    usage = record["usage"] if isinstance(record.get("usage"), dict) and alone else {}
    facts = {
        key: part[key] for part in (record, usage, *reversed(parts)) for key in _FACTS if part.get(key) is not None
    }
    for key in _FACTS[1:]:
        if key in facts and not (type(facts[key]) is int and facts[key] >= 0):
            raise TraceError(f"{place}: {key} is {shown(facts[key])}, expected a whole number")
    return Payload(
        place,
        facts["id"] if isinstance(facts.get("id"), str) else None,
        holder[KEY],
        record.get(PROMPT_KEY),
        facts.get(START_KEY, 0),
        facts.get("prompt_tokens"),
        facts.get("completion_tokens"),
    )


_FACTS = ("id", START_KEY, "prompt_tokens", "completion_tokens")


# The routed experts that vLLM returns (https://docs.vllm.ai, --enable-return-routed-experts).
#
# Expert ids [token, MoE layer, top_k], int16 as base64 of a .npy, or nested lists: a bare payload, or responses with
# `routed_experts` in their choices and, in some versions, `prompt_routed_experts`. The rows are of MoE layers only, in
# order, so `layer_ids` must come from a hint. It has neither missing choices nor the number of experts, which without
# a hint is the largest id + 1. Written are JSON lines, a response for each sequence.

NPY = base64.b64encode(b"\x93NUMPY").decode()  # how base64 of every .npy starts


def _matches(source: TraceSource) -> bool:
    found = payloads(source.values)
    return bool(found) and (isinstance(found[0].value, list) or _is_npy(found[0].value))


def _is_npy(value: object) -> bool:
    return isinstance(value, str) and value.startswith(NPY)


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    found = payloads(source.values)
    sequences = [_sequence(payload, number, len(found)) for number, payload in enumerate(found)]
    rows = sequences[0].experts.shape[1]
    if hints.layer_ids is None:
        bare = "JSON holds a list, expected an object of layers; as routed experts of vLLM it "
        error = lacks(f"which layers of the model its {rows} rows are", "--layer-ids")
        raise TraceError(f"{bare if isinstance(source.values[0], list) else ''}{error}")
    if len(hints.layer_ids) != rows:
        raise TraceError(
            f"has rows of {rows} layers, but the model has experts in {len(hints.layer_ids)}; use a trace of this model"
        )
    return joined(sequences, hints.layer_ids, hints.num_experts, {"source": source.path.name})


def _sequence(payload: Payload, number: int, count: int) -> RecordedSequence:
    with naming(payload.place):
        experts = _ids(payload.value)
        phase = None
        if payload.prompt is not None:
            prompt = _ids(payload.prompt)
            if prompt.shape[1:] != experts.shape[1:]:
                raise TraceError(f"choices of the prompt have shape {prompt.shape}, of the completion {experts.shape}")
            experts = np.concatenate([prompt, experts])
            phase = phases(len(prompt), len(experts))
        elif payload.start == 0:
            phase = phase_of(payload, len(experts))
        return RecordedSequence(payload.name or (str(number) if count > 1 else ""), experts, phase)


def _ids(value: object) -> np.ndarray:
    """Expert ids [token, layer, top_k]."""
    array = _from_npy(value) if isinstance(value, str) else _from_lists(value)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise TraceError(
            f"{KEY} are {array.dtype} of shape {array.shape}, expected whole numbers [token, layer, top_k]"
        )
    check_rows("row", array)
    return array


def _from_npy(text: str) -> np.ndarray:
    if not _is_npy(text):
        raise TraceError(f"{KEY} are not base64 of a .npy as in the other records; get the response again")
    content = decode_base64(text)
    try:
        return npy_array(content)
    except TraceError as error:
        raise TraceError(f"{KEY}: {error}; {AGAIN}") from None


def _from_lists(value: object) -> np.ndarray:
    if not isinstance(value, list):
        raise TraceError(f"{KEY} are {shown(value)}, expected lists or base64 of a .npy")
    expected = _shape(value[0]) if value else None
    for token, chosen in enumerate(value):
        if expected is None or _shape(chosen) != expected:
            raise TraceError(f"token {token} is {shown(chosen)}, expected the same layers and top_k as token 0")
        strange = {type(expert) for row in chosen for expert in row} - {int}
        if strange:
            raise TraceError(f"token {token} is {shown(chosen)}, expected whole numbers")
    try:
        return np.asarray(value, np.int64)
    except OverflowError:
        raise TraceError(f"{KEY} hold an expert id of more than 64 bits; {AGAIN}") from None


def _shape(token: object) -> tuple[int, int] | None:
    """Layers and top_k of the lists of a token; `None` where they are no such lists."""
    if not isinstance(token, list) or not token or not all(isinstance(row, list) for row in token):
        return None
    sizes = {len(row) for row in token}
    return (len(token), sizes.pop()) if len(sizes) == 1 else None


def _write(path: Path, trace: GatingTrace) -> list[str]:
    check_whole(trace, "vllm")
    prefill = prefill_lengths(trace, "vllm")
    model = trace.facts.get("model", "unknown")
    with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
        for number, (name, part) in enumerate(zip(names(trace), parted(trace), strict=True)):
            array = io.BytesIO()
            np.lib.format.write_array(array, trace.experts[part], allow_pickle=False)
            choice = {"index": 0, KEY: base64.b64encode(array.getvalue()).decode()}
            response: dict[str, Any] = {"object": "text_completion", "model": model, "choices": [choice]}
            if trace.seq_name is not None:
                response["id"] = name
            if prefill is not None:
                decoded = part.stop - part.start - prefill[number]
                response["usage"] = {"prompt_tokens": int(prefill[number]), "completion_tokens": int(decoded) + 1}
            file.write(json.dumps(response) + "\n")
    return ["layer_ids are left out: rows are of MoE layers in order"]


TRACE = Format("vllm", _matches, _read, _write, ".jsonl", frozenset({"seq_start", "seq_name", "phase"}))


# The load statistics of vLLM's open proposal of a file for EPLB (pull request 41141, `expert_load_stats_path`).
#
# JSON lines, of which those with the `record_type` below are a window each: `expert_load` [MoE layer, slot] are tokens,
# `p2l_map` the expert in every slot. The rows are of MoE layers only, in order. Other records are left out.

STATISTICS = "eplb_load_stats"


def _statistics(source: TraceSource) -> list[dict[str, Any]]:
    return [record for record in source.json_objects if record.get("record_type") == STATISTICS]


def _read_loads(source: TraceSource, hints: Hints) -> LoadCounts:
    found, loads, experts = _statistics(source), [], []
    for number, record in enumerate(found):
        with naming(f"{STATISTICS} {number}"):
            loads.append(_slots(record, "expert_load"))
            experts.append(_slots(record, "p2l_map"))
            if not loads[0].shape[0] == len(loads[-1]) or loads[-1].shape != experts[-1].shape:
                raise TraceError(f"expert_load is {loads[-1].shape}, p2l_map {experts[-1].shape}; {AGAIN}")
    layers, used = len(loads[0]), max(int(slots.max()) for slots in experts) + 1
    if hints.layer_ids is not None and len(hints.layer_ids) != layers:
        raise TraceError(f"has {layers} layers, but the model has experts in {len(hints.layer_ids)}; use its own file")
    num_experts = hints.num_experts or used
    if used > min(num_experts, MAX_EXPERTS):
        raise TraceError(f"has the expert {used - 1}, but the model {num_experts} experts; use a file of this model")
    counts = np.zeros((len(found), layers, num_experts), np.int64)
    for window, load, held in zip(counts, loads, experts, strict=True):
        np.add.at(window, (np.arange(layers)[:, None], held), load)
    steps = tuple(f"step {record.get('step', number)}" for number, record in enumerate(found))
    ids = np.asarray(hints.layer_ids or range(layers))
    return LoadCounts(counts, ids, hints.top_k, steps, {"source": source.path.name})


def _slots(record: dict[str, Any], key: str) -> np.ndarray:
    """Whole numbers [layer, slot] of a record."""
    try:
        rows = np.array(record.get(key))
    except ValueError:
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.dtype.kind != "i" or not rows.size or rows.min() < 0:
        raise TraceError(f"{key} is {shown(record.get(key))}, expected whole numbers [layer, slot]; {AGAIN}")
    return rows


def _write_loads(path: Path, loads: LoadCounts) -> list[str]:
    held = [[*range(loads.num_experts)]] * len(loads.layer_ids)
    with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
        for step, counts in enumerate(loads.counts.tolist()):
            record = {"record_type": STATISTICS, "version": 1, "step": step, "num_ranks": 1}
            file.write(json.dumps(record | {"expert_load": counts, "p2l_map": held}) + "\n")
    return ["layer_ids become positions", *(["top_k is left out"] if loads.top_k is not None else [])]


LOAD_COUNTS = Format("vllm", lambda source: bool(_statistics(source)), _read_loads, _write_loads, suffix=".jsonl")
