"""The gating trace of a run: recorded, or drawn as the workload says; checked against the model."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxmoe.config import FileTrace, PresetTrace, ProcessTrace, Scenario, WorkloadConfig, build_model
from jaxmoe.memory import device_memory
from jaxmoe.models import MoEModel
from jaxmoe.traces import GatingTrace, Hints, TraceError, read_trace, synthetic_trace
from jaxmoe.traces.synthesis import GatingProcess, preset_process, read_process, sample_trace
from jaxmoe.traces.synthetic import SEQUENCE_TOKENS
from jaxmoe.units import GIGA


def drawn_sequences(workload: WorkloadConfig) -> tuple[int, np.ndarray, np.ndarray | None] | None:
    """Tokens of a trace that is still to be drawn, the first of every sequence, and every token's phase, if told.

    `None` for a recorded trace.
    """
    match workload.trace:
        case FileTrace():
            return None
        case ProcessTrace(path=path) as drawn:
            process = read_process(Path(path))
        case PresetTrace(preset=name) as drawn:
            process = preset_process(name)
        case trace:
            return trace.tokens, np.arange(0, trace.tokens, SEQUENCE_TOKENS), None
    deal = process.requests.deal(drawn.tokens, drawn.seed)
    return drawn.tokens, deal.seq_start, deal.phases()


def source_of(scenario: Scenario) -> str:
    """A name of the synthetic trace for messages and reports: its process file or preset."""
    match scenario.workload.trace:
        case ProcessTrace(path=path):
            return f"synthetic from {path}"
        case PresetTrace(preset=name):
            return f"synthetic from preset {name}"
        case _:
            return "synthetic"


def drawn_trace(scenario: Scenario, moe: MoEModel, layer_ids: tuple[int, ...]) -> GatingTrace:
    """The synthetic trace of the workload, with at least these layers of it.

    Raises `TraceError` for one that memory does not hold.
    """
    asked = scenario.workload.trace
    assert not isinstance(asked, FileTrace)  # which is read, not drawn
    source, tokens = source_of(scenario), asked.tokens
    needed, there = tokens * len(moe.moe_layer_ids) * moe.top_k * 2, device_memory()  # of int16
    if needed > there:
        raise TraceError(
            f"workload.trace.tokens is {tokens}; a trace of so many needs {needed / GIGA:.0f} GB, and the memory is "
            f"{there / GIGA:.0f} GB; lower it"
        )
    match asked:
        case ProcessTrace(path=path) as drawn:
            return _sampled(read_process(Path(path)).up_to(layer_ids), moe, drawn, source)
        case PresetTrace(preset=name) as drawn:
            return _sampled(preset_process(name).up_to(layer_ids), moe, drawn, source)
        case trace:
            shape = {"layer_ids": moe.moe_layer_ids, "num_experts": moe.num_experts, "top_k": moe.top_k}
            return synthetic_trace(**(trace.model_dump(exclude={"kind"}) | shape))


def _sampled(process: GatingProcess, moe: MoEModel, drawn: ProcessTrace | PresetTrace, source: str) -> GatingTrace:
    if process.num_experts != moe.num_experts:
        raise TraceError(
            f"{source}: is of a model with {process.num_experts} experts, but model.num_experts is {moe.num_experts}; "
            "use a process of this model"
        )
    return sample_trace(process, drawn.tokens, drawn.seed, logits=drawn.logits)


def recorded_trace(path: Path, moe: MoEModel) -> GatingTrace:
    """A trace file as one of this model. Raises `TraceError`."""
    try:
        return read_trace(path, moe.num_experts, hints_of_model(moe))
    except TraceError as error:
        raise TraceError(f"{error}{_other_model(path, moe)}") from None


def check_recorded(path: Path, scenario: Scenario) -> None:
    """Raise `TraceError` for a trace file that no layer of the scenario's model fits."""
    moe, workload = build_model(scenario.model), scenario.workload.model_copy(update={"batch_tokens": 1})
    trace = recorded_trace(path, moe)
    common = {*moe.moe_layer_ids} & {*trace.layer_ids.tolist()}
    fitting_trace(trace, moe, tuple(sorted(common)) or moe.moe_layer_ids, workload, str(path))


def hints_of_model(moe: MoEModel) -> Hints:
    """Sizes of the model that a trace file may not state."""
    return Hints(moe.num_experts, moe.top_k, moe.moe_layer_ids, moe.num_layers)


def _other_model(path: Path, moe: MoEModel) -> str:
    """A remark on a trace that can be read, but not as one of this model."""
    try:
        stated = read_trace(path, hints=replace(hints_of_model(moe), num_experts=None)).num_experts
    except TraceError:
        return ""
    return f" (model.num_experts is {moe.num_experts}, the trace has {stated})"


def fitting_trace(
    trace: GatingTrace, moe: MoEModel, layer_ids: tuple[int, ...], workload: WorkloadConfig, source: str
) -> GatingTrace:
    """The layers of this run, from a trace that fits the model. Raises `TraceError`."""
    if workload.drop_repeats:
        trace = trace.without_repeats()
    if trace.top_k != moe.top_k:
        raise TraceError(
            f"{source}: tokens chose {trace.top_k} experts, but model.top_k is {moe.top_k}; "
            "use a trace of this model, or set model.top_k"
        )
    if not set(layer_ids) <= set(trace.layer_ids.tolist()):
        raise TraceError(
            f"{source}: has the layers {trace.layer_ids.tolist()}, but this run needs {list(layer_ids)} "
            "(model.moe_layer_ids); use a trace of this model, or choose layers with --layers"
        )
    chosen = trace.select_layers(layer_ids).without_missing()
    if workload.batch_tokens > chosen.num_tokens:
        raise TraceError(
            f"{source}: has {chosen.num_tokens} tokens with all their choices, but workload.batch_tokens is "
            f"{workload.batch_tokens}; lower it"
        )
    return chosen
