"""The router traces of Megatron-core (https://github.com/NVIDIA/Megatron-LM, --moe-routing-trace-path).

`router_trace_rank{N}.jsonl`, a line for each step, layer and rank: `step, stage, block, layer, rank, num_tokens,
topk, top_indices`; with captured logits also `logit_offset, logit_bytes, logit_shape` in the sidecar
`logits_rank{N}.bin`, bfloat16. Lines of the block `mtp`, which predict further tokens, are no layers of the model
and are left out. `layer` counts from 0 in lines with a block; older versions without one count from 1.

Every rank is a sequence: its tokens step by step. Where ranks share tokens (tensor parallelism) read one file
alone. Pipeline stages number their layers anew, so ranks with different layers are refused. Missing choices are
not in it, nor the number of experts without logits: without a hint it is the largest id + 1. Written are the
sequences as ranks, each in one step.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.expert_choices import (
    RecordedSequence,
    by_rank,
    choices_of,
    joined,
    names,
    naming,
    parted,
    stacked_layers,
)
from jaxmoe.traces.formats.source import AGAIN, Format, Hints, TraceSource, check_whole, shown
from jaxmoe.traces.trace import GatingTrace, TraceError

FILES = r"router_trace_rank(\d+)\.jsonl"
COUNTS = ("step", "layer", "rank", "num_tokens", "topk")
LOGITS = ("logit_offset", "logit_bytes", "logit_shape")


def _matches(source: TraceSource) -> bool:
    if source.path.is_dir():
        return bool(source.matching(FILES))
    return bool(source.values) and isinstance(source.values[0], dict) and "top_indices" in source.values[0]


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    if source.path.is_dir():
        recorded = [_rank(name, TraceSource(file)) for name, file in by_rank(source, FILES)]
    else:
        recorded = [_rank("", source)]
    order, first = recorded[0]
    for layers, sequence in recorded[1:]:
        if layers != order:
            raise TraceError(
                f"{sequence.name} has layers {layers}, but {first.name} has {order}; "
                "trace without pipeline parallelism, or read one file"
            )
    sequences = [sequence for _, sequence in recorded]
    widths = {sequence.logits.shape[2] for sequence in sequences if sequence.logits is not None}
    if len(widths) > 1:
        raise TraceError(f"logits are of {sorted(widths)} experts in different ranks; use one model")
    num_experts = hints.agreed_experts(next(iter(widths), None))
    return joined(sequences, order, num_experts, {"source": source.path.name})


def _rank(name: str, file: TraceSource) -> tuple[list[int], RecordedSequence]:
    """The layers and the choices in one file."""
    with naming(name):
        lines = [(number, _line(number, value)) for number, value in enumerate(file.values, start=1)]
        lines = [(number, line) for number, line in lines if line.get("block") != "mtp"]
        if not lines:
            raise TraceError("has no lines of layers; trace again")
        if len({"block" in line for _, line in lines}) > 1:
            raise TraceError("has lines with and without a block, which count layers from 0 and from 1; trace again")
        if len({line["rank"] for _, line in lines}) > 1:
            raise TraceError(f"has lines of ranks {sorted({line['rank'] for _, line in lines})}; keep one file a rank")
        offset = 0 if "block" in lines[0][1] else 1
        lines.sort(key=lambda line: line[1]["step"])  # keeps the order of equal steps, micro-batches
        choices: dict[int, list[np.ndarray]] = {}
        for number, line in lines:
            choices.setdefault(line["layer"] - offset, []).append(_choices(number, line))
        _check_steps(lines)
        experts = {layer: _one_width(layer, parts) for layer, parts in choices.items()}
        if min(experts) < 0:
            raise TraceError("has layer 0 in lines without a block, where layers count from 1; trace again")
        logits = _logits(file.path.parent, lines, offset)
        return sorted(experts), RecordedSequence(name, stacked_layers(experts), logits=logits)


def _line(number: int, value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not {*COUNTS, "top_indices"} <= value.keys():
        held = shown(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise TraceError(f"line {number} has {held}, expected {', '.join((*COUNTS, 'top_indices'))}")
    for key in COUNTS:
        if type(value[key]) is not int or value[key] < 0:
            raise TraceError(f"line {number}: {key} is {shown(value[key])}, expected a whole number")
    return value


def _choices(number: int, line: dict[str, Any]) -> np.ndarray:
    experts = choices_of(f"line {number}, layer {line['layer']}", line["top_indices"])
    if experts.shape != (line["num_tokens"], line["topk"]):
        raise TraceError(
            f"line {number} has {len(experts)} tokens with {experts.shape[1]} experts each, but num_tokens is "
            f"{line['num_tokens']} and topk {line['topk']}; {AGAIN}"
        )
    return experts


def _one_width(layer: int, parts: list[np.ndarray]) -> np.ndarray:
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1:
        raise TraceError(f"layer {layer} has tokens with {sorted(widths)} experts; every token needs as many")
    return np.concatenate(parts)


def _check_steps(lines: list[tuple[int, dict[str, Any]]]) -> None:
    """Raise `TraceError` for the first step in which layers have different tokens."""
    tokens: dict[int, dict[int, int]] = {}
    for _, line in lines:
        layers = tokens.setdefault(line["step"], {})
        layers[line["layer"]] = layers.get(line["layer"], 0) + line["num_tokens"]
    expected = set().union(*tokens.values())
    for step, layers in tokens.items():
        if set(layers) != expected:
            raise TraceError(f"step {step} misses layers {sorted(expected - set(layers))}; {AGAIN}")
        if len(set(layers.values())) > 1:
            raise TraceError(f"step {step} has different numbers of tokens in its layers: {layers}; {AGAIN}")


def _logits(folder: Path, lines: list[tuple[int, dict[str, Any]]], offset: int) -> np.ndarray | None:
    """The logits of one rank, float32 [token, layer, expert]; `None` where none were captured."""
    without = [number for number, line in lines if not {*LOGITS} <= line.keys()]
    if len(without) == len(lines):
        return None
    if without:
        raise TraceError(f"line {without[0]} has no logits, other lines have; trace again")
    sidecar = folder / f"logits_rank{lines[0][1]['rank']}.bin"
    if not sidecar.is_file():
        raise TraceError(f"{sidecar.name}, the logits, is not beside it; get that file, too")
    content = np.memmap(sidecar, np.uint8, "r") if sidecar.stat().st_size else np.zeros(0, np.uint8)
    layers: dict[int, list[np.ndarray]] = {}
    for number, line in lines:
        with naming(f"line {number}"):
            layers.setdefault(line["layer"] - offset, []).append(_block(content, line))
    if len({part.shape[1] for parts in layers.values() for part in parts}) > 1:
        raise TraceError("logit_shape tells of different numbers of experts; trace again")
    return stacked_layers({layer: np.concatenate(parts) for layer, parts in layers.items()})


def _block(content: np.ndarray, line: dict[str, Any]) -> np.ndarray:
    """The logits of one line, float32 [token, expert]."""
    start, size, shape = (line[key] for key in LOGITS)
    whole_numbers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (start, size, *shape))
    if not whole_numbers or len(shape) != 2 or shape[0] != line["num_tokens"] or size != 2 * math.prod(shape):
        place = f"logits of shape {shown(shape)} in {shown(size)} bytes at {shown(start)}"
        raise TraceError(f"{place} do not fit {line['num_tokens']} tokens; {AGAIN}")
    if start + size > len(content):
        raise TraceError(f"logits end at byte {start + size}, but the sidecar has {len(content)}; get it again")
    return _float32(content[start : start + size].view("<u2")).reshape(shape)


def _write(path: Path, trace: GatingTrace) -> list[str]:
    check_whole(trace, "megatron")
    logits = trace.logits
    rounded = None if logits is None else _bfloat16(logits)
    with atomic_write(path) as aside:
        aside.mkdir()
        for rank, part in enumerate(parted(trace)):
            lines = [_record(trace, rank, row, part) for row in range(len(trace.layer_ids))]
            if rounded is not None:
                _write_logits(aside / f"logits_rank{rank}.bin", rounded[part], lines)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (aside / f"router_trace_rank{rank}.jsonl").write_text(text, encoding="utf-8")
    exact = rounded is None or logits is None or np.array_equal(_float32(rounded), logits)
    called = [f"router_trace_rank{rank}.jsonl" for rank in range(len(trace.seq_start))] == names(trace)
    renamed = trace.seq_name is not None and not called
    return ["seq_name becomes numbers of ranks"] * renamed + ["logits are rounded to bfloat16"] * (not exact)


def _record(trace: GatingTrace, rank: int, row: int, part: slice) -> dict[str, Any]:
    return {
        "step": 0,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": int(trace.layer_ids[row]),
        "rank": rank,
        "num_tokens": int(part.stop - part.start),
        "topk": trace.top_k,
        "top_indices": trace.experts[part, row].tolist(),
    }


def _write_logits(sidecar: Path, logits: np.ndarray, lines: list[dict[str, Any]]) -> None:
    """Write the logits of one rank, uint16 [token, layer, expert], and tell its lines where they are."""
    with sidecar.open("wb") as file:
        for row, line in enumerate(lines):
            block = np.ascontiguousarray(logits[:, row], "<u2")
            line |= {"logit_offset": file.tell(), "logit_bytes": block.nbytes, "logit_shape": list(block.shape)}
            file.write(block.tobytes())


def _float32(halves: np.ndarray) -> np.ndarray:
    """Numbers given as bfloat16, which is the upper half of float32, in uint16."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _bfloat16(logits: np.ndarray) -> np.ndarray:
    """Numbers rounded to bfloat16, half to even, as uint16."""
    bits = logits.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


TRACE = Format("megatron", _matches, _read, _write, holds=frozenset({"seq_start", "logits", "seq_name"}))
