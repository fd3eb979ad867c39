"""The traces of the data-movement study (Hugging Face dataset core12345/MoE_expert_selection_trace).

One JSON file for each request, in folders `org/model/benchmark/subject/`: a list of which element 0 is the prefill
and every other one a decode step; an element is an object of layer number -> list over tokens of lists of expert
ids, or null for a dense layer. Model and dataset are what the folders are called. It has neither the number of
experts, which without a hint is the largest id + 1, nor missing choices. Writing a trace that does not know its
phases puts all tokens in the prefill.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.expert_choices import (
    RecordedSequence,
    choices_of,
    is_layers,
    joined,
    layer_number,
    names,
    naming,
    parted,
    phases,
    prefill_lengths,
    stacked_layers,
)
from jaxmoe.traces.formats.source import AGAIN, Format, Hints, TraceSource, check_whole, json_values, shown
from jaxmoe.traces.trace import GatingTrace, TraceError

FOLDERS = 4  # org, model, benchmark, subject


def _matches(source: TraceSource) -> bool:
    if source.path.is_dir():
        return any(name.endswith(".json") for name in source.files)
    return len(source.values) == 1 and _is_request(source.values[0])


def _is_request(value: object) -> bool:
    return isinstance(value, list) and bool(value) and is_layers(value[0])


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    order: list[int] = []
    sequences: list[RecordedSequence] = []
    for name, file in source.files.items():
        with naming(name if source.path.is_dir() else ""):
            values = json_values(file) if source.path.is_dir() else source.values
            layers, sequence = _request(name, values)
            if order and layers != order:
                raise TraceError(f"has experts in layers {layers}, but {sequences[0].name} in {order}; use one model")
            order = layers
        sequences.append(sequence)
    facts = {"source": source.path.name} | _facts(source)
    return joined(sequences, order, hints.num_experts, facts)


def _request(name: str, values: list[Any]) -> tuple[list[int], RecordedSequence]:
    """The layers with experts and the choices in one file."""
    if len(values) != 1 or not _is_request(values[0]):
        raise TraceError(f"not a request, a list of one object of layers for each step; {AGAIN}")
    steps = values[0]
    tokens: dict[int, list[Any]] = {}
    lengths = []
    for number, step in enumerate(steps):
        with naming(f"step {number}"):
            lengths.append(_extend(tokens, step, first=number == 0))
    if not tokens:
        raise TraceError("has null for every layer; use a trace of a model with experts")
    experts = stacked_layers({layer: choices_of(f"layer {layer}", chosen) for layer, chosen in tokens.items()})
    return sorted(tokens), RecordedSequence(name, experts, phases(lengths[0], sum(lengths)))


def _extend(tokens: dict[int, list[Any]], step: object, first: bool) -> int:
    """Add the tokens of a step to every layer, and tell how many they are."""
    if not isinstance(step, dict):
        raise TraceError(f"holds {shown(step)}, expected an object of layers")
    added = {layer_number(layer): chosen for layer, chosen in step.items() if chosen is not None}
    if first:
        tokens.update({layer: [] for layer in added})
    elif added.keys() != tokens.keys():
        raise TraceError(f"has experts in layers {sorted(added)}, but step 0 in {sorted(tokens)}")
    for layer, chosen in added.items():
        if not isinstance(chosen, list) or not chosen:
            raise TraceError(f"layer {layer} holds {shown(chosen)}, expected a list of tokens")
        tokens[layer] += chosen
    counts = {layer: len(chosen) for layer, chosen in added.items()}
    if len(set(counts.values())) > 1:
        raise TraceError(f"layers have different numbers of tokens: {counts}")
    return next(iter(counts.values()), 0)


def _facts(source: TraceSource) -> dict[str, str]:
    """Model and dataset, from the folders of the files; nothing where the files lie at different depths."""
    depths = {name.count("/") for name in source.files}
    if len(depths) > 1:
        return {}
    folders = sorted({file.absolute().parts[-1 - FOLDERS : -1] for file in source.files.values()})
    if len(folders[0]) < FOLDERS or "/" in folders[0]:
        return {}
    models = sorted({"/".join(parts[:2]) for parts in folders})
    if len(models) > 1:
        raise TraceError(f"has files of {len(models)} models, {', '.join(models[:4])}; read the folder of one")
    benchmarks = sorted({parts[2] for parts in folders})
    return {"model": models[0], "dataset": "/".join(folders[0][2:]) if len(folders) == 1 else ", ".join(benchmarks)}


def _write(path: Path, trace: GatingTrace) -> list[str]:
    check_whole(trace, "data_movement")
    prefill = prefill_lengths(trace, "data_movement")
    model, dataset = trace.facts.get("model", "unknown"), trace.facts.get("dataset", "unknown")
    folder = Path(*_two(model), *_two(dataset))
    with atomic_write(path) as aside:
        for number, (name, part) in enumerate(zip(names(trace), parted(trace), strict=True)):
            file = aside / folder / f"{number:05d}_{_file_name(name)}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            experts = trace.experts[part]
            steps = _steps(experts, trace.layer_ids, len(experts) if prefill is None else prefill[number])
            file.write_text(json.dumps(steps), encoding="utf-8")
    unnamed = ["seq_name becomes the names of files"] if trace.seq_name is not None else []
    return unnamed + (["phase is not known: all tokens are in the prefill"] if prefill is None else [])


def _steps(experts: np.ndarray, layer_ids: np.ndarray, prefill: int) -> list[dict[str, Any]]:
    """The elements of a request's list. Layers below the last that the trace has not are dense."""
    rows = {layer: row for row, layer in enumerate(layer_ids.tolist())}
    cuts = [0, *range(max(prefill, 1), len(experts) + 1)]
    return [
        {str(layer): experts[a:b, rows[layer]].tolist() if layer in rows else None for layer in range(max(rows) + 1)}
        for a, b in pairwise(cuts)
    ]


def _two(name: str) -> tuple[str, str]:
    """Names of two folders."""
    first, _, second = name.partition("/")
    return (_file_name(first), _file_name(second)) if second else ("unknown", _file_name(first))


def _file_name(text: str) -> str:
    """A text as part of the name of a file."""
    kept = "".join(letter if letter.isalnum() or letter in "-_.," else "_" for letter in text.removesuffix(".json"))
    return kept.strip(".")[:80] or "unknown"


TRACE = Format("data_movement", _matches, _read, _write, holds=frozenset({"seq_start", "phase", "seq_name"}))
