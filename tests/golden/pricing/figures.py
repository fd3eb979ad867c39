"""Figures of priced times, by the names under which they were recorded."""

from typing import Any

import numpy as np

from jaxmoe.engine import LayerTime
from jaxmoe.methods.expert_streaming.system import StreamedRun
from jaxmoe.methods.moentwine.system import LayoutRun

from ..store import Arrays


def figures_of(time: LayerTime) -> Arrays:
    """Seconds of stages, of busy resources and in all, and energy, by name."""
    found = {f"stages/{name}": seconds for name, seconds in time.stages.items()}
    for stage, kinds in time.busy.items():
        found |= {f"busy/{stage}/{kind}": seconds for kind, seconds in kinds.items() if seconds is not None}
    found |= {"total": time.total} | {f"energy/{name}": joules for name, joules in time.energy.items()}
    return {name: np.asarray(value) for name, value in found.items()}


def figures_of_run(run: Any, time: LayerTime) -> Arrays:
    """Figures of a run, as they were recorded: streams by names of their own, energy without weights that migrate."""
    found = figures_of(time)
    match run:
        case StreamedRun():
            memory = run.layer.machine.memory[-1].name
            busy = {kind: found.pop(f"busy/stream/{kind}") for kind in ("node", "port", "link")}
            found["busy/compute/node"], found["channels"] = busy["node"], found.pop(f"busy/stream/{memory}")
            found["moves"] = np.concatenate([busy["port"], busy["link"]], axis=-1)
        case LayoutRun() if time.energy and "migration" in time.busy:
            machine = run.model.machine
            carried = time.busy["migration"]["link"] * np.asarray(machine.topology.link_rate, float)
            for kind, each in machine.energy.links.items():
                found[f"energy/{kind}"] = found[f"energy/{kind}"] - carried @ np.asarray(each, float)
    return found
