"""The JSON that hd_moe publishes (https://github.com/angerybob/HD-MoE).

An object of layer number -> list over tokens of lists of expert ids. It has neither sequences nor the number of
experts, which without a hint is the largest id + 1, and no missing choices.
"""

import json
from pathlib import Path

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.expert_choices import (
    RecordedSequence,
    choices_of,
    is_layers,
    joined,
    layer_number,
    stacked_layers,
)
from jaxmoe.traces.formats.source import Format, Hints, TraceSource, check_whole
from jaxmoe.traces.trace import GatingTrace, TraceError


def _matches(source: TraceSource) -> bool:
    return len(source.values) == 1 and is_layers(source.values[0])


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    rows = {key: layer_number(key) for key in source.values[0]}
    layers = {number: choices_of(f"layer {number}", source.values[0][key]) for key, number in rows.items()}
    if len(layers) < len(rows):
        raise TraceError(f"layer_ids names a layer twice: {sorted(rows.values())}")
    sequence = RecordedSequence("", stacked_layers(layers))
    return joined([sequence], sorted(layers), hints.num_experts, {"source": source.path.name})


def _write(path: Path, trace: GatingTrace) -> list[str]:
    check_whole(trace, "hd_moe")
    layers = {str(layer): trace.experts[:, row].tolist() for row, layer in enumerate(trace.layer_ids.tolist())}
    with atomic_write(path) as aside:
        aside.write_text(json.dumps(layers), encoding="utf-8")
    return []


TRACE = Format("hd_moe", _matches, _read, _write, suffix=".json")
