"""One replayed layer as a timeline: a file for trace viewers, and a picture beside it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.des import Fabric, RecordedLayer, record_layer, served_batch, timeline_events
from jaxmoe.des.timeline import Slices, run_slices, server_rows
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import Inputs, OptionError
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.experiment.validation import Trial
from jaxmoe.files import atomic_write
from jaxmoe.methods import SystemRecording
from jaxmoe.placement import Placement
from jaxmoe.report import GanttRow, plot_gantt
from jaxmoe.traces import Batch

DRAWN = 16  # links, and as many nodes


def check_target(path: Path | None, of: str | None) -> None:
    """Raise `OptionError` where no timeline can be written to `path`, or `--timeline-of` is given without a file."""
    if path is None:
        if of is not None:
            raise OptionError("--timeline-of is given without --timeline FILE.json; say where to write the timeline")
        return
    if path.name == "summary.json":
        raise OptionError(f"--timeline is {path}, but summary.json is the name of the results; give another name")
    if path.suffix != ".json":
        raise OptionError(f"--timeline is {path}, expected a name that ends in .json; the picture gets .png instead")
    obstacle = _obstacle(path)
    if obstacle is not None:
        raise OptionError(f"--timeline: cannot write {path}: {obstacle}; give another file")


def chosen_layer(text: str | None, strategies: Sequence[Strategy], inputs: Inputs) -> tuple[str, int] | None:
    """Name of the strategy and row of the layer that `--timeline-of` names. Raises `OptionError` for a wrong name."""
    if text is None:
        return None
    name, _, layer = text.rpartition(":")
    names, layers = [strategy.name for strategy in strategies], [str(number) for number in inputs.layer_ids]
    if name not in names or layer not in layers:
        raise OptionError(
            f"--timeline-of is {text!r}, expected STRATEGY:LAYER with a strategy of {', '.join(names)} "
            f"and a layer of {', '.join(layers)}"
        )
    return name, layers.index(layer)


@dataclass(frozen=True)
class ShownLayer:
    """One layer and batch of a run, as NumPy arrays; `facts` say which, for the file of the timeline."""

    name: str  # of the strategy or system
    row: int
    placement: Placement
    batch: Batch
    served: np.ndarray | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def write_timeline(path: Path, inputs: Inputs, trial: Trial, row: int | None) -> None:
    """Record the first batch of one layer, by default of the slowest one in the simulator; write and draw it."""
    row = int(trial.simulated.total.mean(axis=1).argmax()) if row is None else row
    batches = inputs.first_batches(inputs.batches_of(trial.tokens))
    batch = jax.tree.map(lambda leaf: np.asarray(leaf)[row, 0], batches)
    shown = ShownLayer(trial.strategy.name, row, trial.strategy.placement, batch, facts={"batch": 0})
    write_layer(path, inputs, shown)


def write_layer(path: Path, inputs: Inputs, shown: ShownLayer) -> None:
    """Record a layer; write its timeline and draw it."""
    placement, row = shown.placement, shown.row
    layer = describe(inputs, placement.computed_mode, placement.exchanges()[row])
    batch, copies = shown.batch, placement.copies
    if copies is not None:
        layer, batch = replace(layer, serving=copies.serving), served_batch(copies, row, batch)
    recorded = record_layer(layer, placement.computed[row], batch, shown.served)
    run = f"{shown.name}, layer {inputs.layer_ids[shown.row]}, {len(shown.batch.experts)} tokens"
    write_recorded(path, inputs, recorded, layer.fabric, run, _facts(inputs, shown, recorded))


def write_recorded(
    path: Path,
    inputs: Inputs,
    recorded: RecordedLayer | SystemRecording,
    fabric: Fabric,
    shown: str,
    facts: dict[str, Any],
) -> None:
    """Write the timeline of what was recorded and draw it; `shown` says what it is."""
    link_ends = np.asarray(inputs.model.machine.topology.link_ends)
    _write(path, timeline_events(recorded.run, fabric, link_ends, recorded.stage), facts)
    title = f"{inputs.scenario.name}: {shown}; busiest links and nodes"
    plot_gantt(path.with_suffix(".png"), _gantt_rows(recorded, fabric, link_ends), title, recorded.run.makespan)


def write_layers(path: Path, inputs: Inputs, recorded: SystemRecording) -> None:
    """Write the timeline of layers that a system recorded, and draw it."""
    facts = _known(inputs, recorded) | recorded.facts
    write_recorded(path, inputs, recorded, recorded.fabric, recorded.shown, facts)


def _obstacle(path: Path) -> str | None:
    """Why `path` and the picture beside it cannot be written."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    for target in (path, path.with_suffix(".png")):
        if target.is_dir():
            return f"{target} is a folder"
    try:
        _aside(path).touch()
    except OSError as error:
        return error.strerror or str(error)
    _aside(path).unlink()
    return None


def _known(inputs: Inputs, recorded: RecordedLayer | SystemRecording) -> dict[str, Any]:
    """Facts in the file of every timeline: version of jaxmoe, name of the scenario, and total time, s."""
    return {"jaxmoe": version("jaxmoe"), "scenario": inputs.scenario.name, "total_s": recorded.run.makespan}


def _facts(inputs: Inputs, shown: ShownLayer, recorded: RecordedLayer) -> dict[str, Any]:
    """Which run the timeline shows."""
    return _known(inputs, recorded) | {
        "strategy": shown.name,
        "exchange": shown.placement.exchange[shown.row],
        "layer_id": inputs.layer_ids[shown.row],
        "batch_tokens": len(shown.batch.experts),
        **shown.facts,
    }


def _write(path: Path, events: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    trace = {"displayTimeUnit": "ns", "otherData": facts, "traceEvents": events}
    with atomic_write(path) as aside:
        aside.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _gantt_rows(recorded: RecordedLayer | SystemRecording, fabric: Fabric, link_ends: np.ndarray) -> list[GanttRow]:
    """The busiest links, then the nodes that compute longest."""
    slices, names = run_slices(recorded.run, fabric), [row.name for row in server_rows(fabric, link_ends)]
    computing = len(fabric.rate)
    names[computing:] = [f"node {node}" for node in range(fabric.num_nodes)]
    stage = np.array(recorded.stage)[slices.task]
    links, nodes = range(fabric.num_links), range(computing, len(names))

    def row(server: int) -> GanttRow:
        own = slices.server == server
        return GanttRow(names[server], slices.begin[own], slices.end[own], stage[own].tolist())

    return [row(server) for servers in (links, nodes) for server in _busiest(slices, stage, servers)]


def _busiest(slices: Slices, stage: np.ndarray, servers: range) -> list[int]:
    """The busiest of each stage in turn, so that no stage hides another."""
    here = (slices.server >= servers.start) & (slices.server < servers.stop)
    ranked = []
    for name in dict.fromkeys(stage[here].tolist()):
        chosen = here & (stage == name)
        seconds = slices.end[chosen] - slices.begin[chosen]
        busy = np.bincount(slices.server[chosen] - servers.start, seconds, len(servers))
        # Rounded, so that equals stay in the order of their numbers.
        ranked.append(np.argsort(-np.round(busy, 12), kind="stable").tolist())
    in_turn = dict.fromkeys(chain.from_iterable(zip(*ranked, strict=True)))
    return [servers[index] for index in in_turn][:DRAWN]
