"""`jaxmoe trace convert`: a trace or load counts of any format, written in another one."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from jaxmoe.cli.comparison_output import new_table, print_table, print_warnings
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.experiment.inputs import OptionError, hints_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.registry import TRACES
from jaxmoe.traces import DECODE, MISSING, PREFILL, GatingTrace, Hints, LoadCounts, Recording, read_any, write_as
from jaxmoe.traces.files import suffix_of
from jaxmoe.traces.trace import chunks, release


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    source: Path,
    to: str,
    model: str | None,
    num_experts: int | None,
    top_k: int | None,
    layer_ids: str | None,
    num_layers: int | None,
) -> None:
    """Write a trace or load counts of any format in another one, and tell what was read."""
    with StageTimer() as clock:
        with clock.stage("read"):
            if to not in TRACES:
                raise OptionError(f"--to is {to!r}, expected one of {', '.join(TRACES)}")
            recording = read_any(source, _hints(model, num_experts, top_k, layer_ids, num_layers))
        content = recording.content
        kind = "trace" if isinstance(content, GatingTrace) else "loads"
        target = folder.target(kind + suffix_of(to, content))
        with clock.stage("write"):
            notes = write_as(to, target, content)
        found = _found(recording)
        written = {"format": to, "path": str(target), "notes": notes}
        source_report = {"path": str(source), **found, "facts": content.facts}
        report = {"command": "trace convert", **surroundings(), "source": source_report, "written": written}
        folder.write_json("summary.json", report | {"wall_s": clock.report()})
        _print(found, f"{source.name} as {to}")
        print_warnings(notes)


def _hints(
    model: str | None, num_experts: int | None, top_k: int | None, layer_ids: str | None, num_layers: int | None
) -> Hints:
    """Hints for the reader of a trace: values of the options, and those of the model for options that are not given."""
    known = hints_of(model)
    return Hints(
        num_experts=known.num_experts if num_experts is None else num_experts,
        top_k=known.top_k if top_k is None else top_k,
        layer_ids=known.layer_ids if layer_ids is None else _layer_numbers(layer_ids),
        num_layers=known.num_layers if num_layers is None else num_layers,
    )


def _layer_numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--layer-ids is {text!r}, expected layer numbers such as 1,2,3") from None
    if list(numbers) != sorted({number for number in numbers if number >= 0}):
        raise OptionError(f"--layer-ids is {text!r}, expected different layer numbers from 0, ascending")
    return numbers


def _found(recording: Recording) -> dict[str, Any]:
    """Figures of the trace or load counts that were read: format, layers, experts, top-k, and those of their kind."""
    content = recording.content
    shape = _trace_figures(content) if isinstance(content, GatingTrace) else _load_figures(content)
    return {
        "format": recording.format,
        "layers": len(content.layer_ids),
        "layer_ids": content.layer_ids.tolist(),
        "num_experts": content.num_experts,
        "top_k": content.top_k,
        **shape,
    }


def _trace_figures(trace: GatingTrace) -> dict[str, Any]:
    phase = trace.phase
    return {
        "kind": "trace",
        "tokens": trace.num_tokens,
        "sequences": len(trace.seq_start),
        "prefill_tokens": None if phase is None else int((phase == PREFILL).sum()),
        "decode_tokens": None if phase is None else int((phase == DECODE).sum()),
        "missing_choices": _missing(trace),
        "weights": trace.weights is not None,
        "logits": trace.logits is not None,
    }


def _missing(trace: GatingTrace) -> int:
    count = 0
    for part in chunks(trace.experts.shape, trace.experts.dtype.itemsize):
        count += int(np.count_nonzero(trace.experts[part] == MISSING))
        release(trace.experts)
    return count


def _load_figures(loads: LoadCounts) -> dict[str, Any]:
    return {"kind": "load counts", "windows": len(loads.window_name), "choices": int(loads.counts.sum())}


def _print(found: dict[str, Any], title: str) -> None:
    table = new_table(title, "what was read", ("",))
    for name, value in found.items():
        shown = _ranges(value) if name == "layer_ids" else "unknown" if value is None else value
        if isinstance(value, bool):
            shown = "yes" if value else "no"
        table.add_row(name.replace("_", " "), escape(str(shown)))
    print_table(table)


def _ranges(numbers: list[int]) -> str:
    """Numbers such as 1-26, 30."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
