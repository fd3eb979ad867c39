"""The routed experts that vLLM returns (https://docs.vllm.ai, --enable-return-routed-experts).

Expert ids [token, MoE layer, top_k], int16 as base64 of a .npy, or nested lists: a bare payload, or responses with
`routed_experts` in their choices and, in some versions, `prompt_routed_experts`. The rows are of MoE layers only,
in order, so `layer_ids` must come from a hint. It has neither missing choices nor the number of experts, which
without a hint is the largest id + 1. Written are JSON lines, a response for each sequence.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.traces.formats.arrays import npy_array
from jaxmoe.traces.formats.aside import whole
from jaxmoe.traces.formats.choices import check_rows
from jaxmoe.traces.formats.format import Format, check_whole
from jaxmoe.traces.formats.hints import Hints, lacks
from jaxmoe.traces.formats.responses import KEY, Payload, payloads, phase_of
from jaxmoe.traces.formats.sequences import Recorded, joined, names, naming, parted, phases, prefill_lengths
from jaxmoe.traces.formats.source import AGAIN, Source, decode_base64, shown
from jaxmoe.traces.trace import GatingTrace, TraceError

NPY = base64.b64encode(b"\x93NUMPY").decode()  # how base64 of every .npy starts


def _matches(source: Source) -> bool:
    found = payloads(source.values)
    return bool(found) and (isinstance(found[0].value, list) or _is_npy(found[0].value))


def _is_npy(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(NPY)


def _read(source: Source, hints: Hints) -> GatingTrace:
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


def _sequence(payload: Payload, number: int, count: int) -> Recorded:
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
        return Recorded(payload.name or (str(number) if count > 1 else ""), experts, phase)


def _ids(value: Any) -> np.ndarray:
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


def _from_lists(value: Any) -> np.ndarray:
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


def _shape(token: Any) -> tuple[int, int] | None:
    """Layers and top_k of the lists of a token; `None` where they are no such lists."""
    if not isinstance(token, list) or not token or not all(isinstance(row, list) for row in token):
        return None
    sizes = {len(row) for row in token}
    return (len(token), sizes.pop()) if len(sizes) == 1 else None


def _write(path: Path, trace: GatingTrace) -> list[str]:
    check_whole(trace, "vllm")
    prefill = prefill_lengths(trace, "vllm")
    model = trace.facts.get("model", "unknown")
    with whole(path) as aside, aside.open("w", encoding="utf-8") as file:
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
