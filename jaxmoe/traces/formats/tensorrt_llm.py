"""The expert statistics of TensorRT-LLM (https://github.com/NVIDIA/TensorRT-LLM, EXPERT_STATISTIC_PATH).

A folder with `meta_info.json` (`num_experts`, `num_experts_per_token`) and `rank{N}.safetensors`, of which an array
`{iteration}_{layer}` holds counts [expert]: load counts, where every iteration is a window and ranks add up. Some
versions also write `token_selected_experts_rank{N}.safetensors`, arrays [token, top_k] of ids under the same names:
a trace, of which every rank is a sequence, its tokens iteration by iteration. Layers are numbered as in the model.
Missing choices are not in it. Written is a trace as one iteration with a rank for each sequence.
"""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.arrays import read_safetensors, write_safetensors
from jaxmoe.traces.formats.expert_choices import (
    RecordedSequence,
    by_rank,
    check_not_negative,
    joined,
    names,
    naming,
    parted,
    stacked_layers,
)
from jaxmoe.traces.formats.source import AGAIN, MOST_DIGITS, Format, Hints, TraceSource, check_whole, parse_json, shown
from jaxmoe.traces.trace import MAX_EXPERTS, GatingTrace, LoadCounts, TraceError, load_counts

META = "meta_info.json"
COUNTS = r"rank(\d+)\.safetensors"
CHOICES = r"token_selected_experts_rank(\d+)\.safetensors"

_NAME = re.compile(f"([0-9]{{1,{MOST_DIGITS}}})_([0-9]{{1,{MOST_DIGITS}}})")

Arrays = dict[int, dict[int, np.ndarray]]
"""By iteration and layer."""


def _is_trace(source: TraceSource) -> bool:
    return bool(source.matching(CHOICES))


def _is_loads(source: TraceSource) -> bool:
    # A lone file, too, so that an error tells what is missing.
    return not _is_trace(source) and (bool(source.matching(COUNTS)) or META in source.files)


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    num_experts, top_k = _meta(source, hints)
    files, counted = by_rank(source, CHOICES), source.matching(COUNTS)
    if counted and len(counted) != len(files):
        raise TraceError(f"has counts of {len(counted)} ranks, but choices of {len(files)}; get the other files, too")
    recorded = [(name, _arrays(name, file)) for name, file in files]
    order = _layers(recorded)
    sequences = [_sequence(name, arrays, top_k) for name, arrays in recorded]
    return joined(sequences, order, num_experts, {"source": source.path.name})


def _read_loads(source: TraceSource, hints: Hints) -> LoadCounts:
    num_experts, top_k = _meta(source, hints)
    if not source.matching(COUNTS):
        raise TraceError(f"has {META} but no rank0.safetensors; get the files of all ranks")
    recorded = [(name, _arrays(name, file)) for name, file in by_rank(source, COUNTS)]
    order, iterations = _layers(recorded), sorted(recorded[0][1])
    for name, arrays in recorded:
        if sorted(arrays) != iterations:
            raise TraceError(f"{name} has other iterations than {recorded[0][0]}; get the files of one run")
        for iteration, layer in product(iterations, order):
            shape = arrays[iteration][layer].shape
            if shape != (num_experts,):
                raise TraceError(f"{name}: {iteration}_{layer} has shape {shape}, expected ({num_experts},)")
    ranks = [[[arrays[i][layer] for layer in order] for i in iterations] for _, arrays in recorded]
    total = np.asarray(ranks, np.int64).sum(axis=0)
    windows = tuple(f"iteration {iteration}" for iteration in iterations)
    return LoadCounts(total, np.asarray(order), top_k, windows, {"source": source.path.name})


def _meta(source: TraceSource, hints: Hints) -> tuple[int, int]:
    """The numbers of experts and of experts per token."""
    if META not in source.files:
        raise TraceError(f"has no {META}; give the folder that it is in")
    try:
        meta = parse_json(source.files[META].read_bytes())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{META}: not readable as JSON ({error}); {AGAIN}") from None
    experts, top_k = (meta.get(f"num_experts{per}") if isinstance(meta, dict) else None for per in ("", "_per_token"))
    if type(experts) is not int or type(top_k) is not int or not 1 <= top_k <= experts <= MAX_EXPERTS:
        raise TraceError(
            f"{META} holds {shown(meta)}, expected num_experts, 1 to {MAX_EXPERTS}, and num_experts_per_token"
        )
    hints.agreed_experts(experts)
    return experts, top_k


def _arrays(name: str, file: Path) -> Arrays:
    """The arrays of one rank."""
    with naming(name):
        found: Arrays = {}
        for key, array in read_safetensors(file).items():
            numbers = _NAME.fullmatch(key)
            if numbers is None:
                raise TraceError(f"has an array {shown(key)}, expected names of iteration_layer")
            if array.dtype.kind not in "iu":
                raise TraceError(f"{key} has type {array.dtype}, expected whole numbers")
            found.setdefault(int(numbers[1]), {})[int(numbers[2])] = array
        if not found:
            raise TraceError("has no arrays; record iterations that were run")
        return found


def _layers(recorded: list[tuple[str, Arrays]]) -> list[int]:
    """The layers, which every iteration of every rank needs to have."""
    name, arrays = recorded[0]
    order = sorted(arrays[min(arrays)])
    for other, some in recorded:
        for iteration, layers in sorted(some.items()):
            if sorted(layers) != order:
                raise TraceError(
                    f"{other}: iteration {iteration} has layers {sorted(layers)}, but iteration {min(arrays)} of "
                    f"{name} has {order}; get the files of one whole run"
                )
    return order


def _sequence(name: str, arrays: Arrays, top_k: int) -> RecordedSequence:
    parts = []
    with naming(name):
        for iteration, layers in sorted(arrays.items()):
            for layer, chosen in layers.items():
                if chosen.ndim != 2 or chosen.shape[1] != top_k:
                    raise TraceError(f"{iteration}_{layer} has shape {chosen.shape}, expected [token, {top_k}]")
                check_not_negative(f"iteration {iteration}, layer {layer}", chosen)
            with naming(f"iteration {iteration}"):
                parts.append(stacked_layers(layers))
    return RecordedSequence(name, np.concatenate(parts))


def _write(path: Path, trace: GatingTrace) -> list[str]:
    check_whole(trace, "tensorrt_llm")
    with atomic_write(path) as aside:
        aside.mkdir()
        _write_meta(aside, trace.num_experts, trace.top_k)
        for rank, part in enumerate(parted(trace)):
            tokens = trace.select_tokens(np.arange(part.start, part.stop))
            keys = [f"0_{layer}" for layer in trace.layer_ids.tolist()]
            choices = {key: tokens.experts[:, row].astype(np.int32) for row, key in enumerate(keys)}
            counts = dict(zip(keys, load_counts(tokens).counts[0], strict=True))
            write_safetensors(aside / f"token_selected_experts_rank{rank}.safetensors", choices)
            write_safetensors(aside / f"rank{rank}.safetensors", counts)
    called = [f"token_selected_experts_rank{rank}.safetensors" for rank in range(len(trace.seq_start))]
    return ["seq_name becomes numbers of ranks"] * (trace.seq_name is not None and names(trace) != called)


def _write_loads(path: Path, loads: LoadCounts) -> list[str]:
    if loads.top_k is None:
        raise TraceError("top_k is not known, which tensorrt_llm states; give --top-k, or --model")
    with atomic_write(path) as aside:
        aside.mkdir()
        _write_meta(aside, loads.num_experts, loads.top_k)
        write_safetensors(
            aside / "rank0.safetensors",
            {
                f"{window}_{layer}": loads.counts[window, row]
                for window in range(len(loads.counts))
                for row, layer in enumerate(loads.layer_ids.tolist())
            },
        )
    named = tuple(f"iteration {window}" for window in range(len(loads.counts)))
    return ["window_name becomes numbers of iterations"] * (loads.window_name != named)


def _write_meta(folder: Path, num_experts: int, top_k: int) -> None:
    meta: dict[str, Any] = {"num_experts": num_experts, "num_experts_per_token": top_k}
    (folder / META).write_text(json.dumps(meta), encoding="utf-8")


TRACE = Format("tensorrt_llm", _is_trace, _read, _write, holds=frozenset({"seq_start", "seq_name"}))
LOAD_COUNTS = Format("tensorrt_llm", _is_loads, _read_loads, _write_loads)
