"""`jaxmoe network`: how long given traffic takes on a network, in the time models and in the event simulator."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxmoe.cli.interrupts import Interrupts
from jaxmoe.cli.network_pictures import draw_agreement, draw_matrix
from jaxmoe.cli.network_report import Findings, network_report, print_findings
from jaxmoe.cli.output import OutputFolder
from jaxmoe.cli.progress import progress_bars
from jaxmoe.config import HardwareConfig, build_time_model, build_topology, load_hardware, resolved
from jaxmoe.des import fabric_of
from jaxmoe.des.traffic import Order
from jaxmoe.experiment.clock import StageClock
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.summary import surroundings
from jaxmoe.experiment.traffic import Matrices, loads_of, predict, read_matrices, simulate
from jaxmoe.hardware import AbstractTopology

MOST_CHUNKS = 10_000_000  # of one matrix, that the simulator can hold


@dataclass(frozen=True)
class Task:
    """What one run is about."""

    hardware: HardwareConfig
    topology: AbstractTopology
    matrices: Matrices
    order: Order
    seed: int


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    traffic: Path,
    overrides: list[str] | None,
    order: str | None,
    seed: int,
    show: str | None,
) -> None:
    """Tell how long given traffic takes on a network of any kind, and which link or port limits it."""
    with StageClock() as clock:
        with clock.stage("load"):
            task = _read(config, overrides, traffic, order, seed)
            if show is not None and show not in task.matrices:
                raise OptionError(f"--show is {show!r}, expected one of {_some(task.matrices)} from {traffic}")
        with progress_bars(interrupts.check) as report:
            findings = _find(task, clock, lambda done, total: report("simulate", done, total))
        machine = task.hardware.name
        with clock.stage("draw"):
            row = findings.names.index(show) if show is not None else int(findings.model.argmax())
            draw_matrix(folder, machine, task.topology, task.matrices[findings.names[row]], findings, row)
            draw_agreement(folder, machine, findings)
        shown = {"shown": findings.names[row]}
        summary = _provenance(task, traffic) | network_report(task.hardware, task.topology, findings) | shown
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        print_findings(task.topology, findings, f"{machine}: completion of given traffic")


def _read(config: Path, overrides: list[str] | None, traffic: Path, order: str | None, seed: int) -> Task:
    """Read and check everything. Raises `ConfigError` or `OptionError`."""
    known = {name: name for name in get_args(Order)}
    if order is not None and order not in known:
        raise OptionError(f"--order is {order!r}, expected one of {', '.join(known)}")
    hardware = load_hardware(config, overrides or ())
    if order is None:
        order = "shuffled" if hardware.router.switching == "cut_through" else "staggered"
    topology = build_topology(hardware)
    matrices = read_matrices(traffic, topology.num_nodes)
    for name, matrix in matrices.items():
        _check_chunks(f"{traffic}: {name}", matrix, hardware.router.chunk_B)
    return Task(hardware, topology, matrices, known[order], seed)


def _check_chunks(label: str, matrix: np.ndarray, chunk_B: int | None) -> None:
    chunks = np.ceil(matrix / chunk_B).sum() if chunk_B is not None else 0
    if chunks > MOST_CHUNKS:
        raise OptionError(
            f"{label} makes {chunks:.3g} chunks of {chunk_B} B, and the simulator takes at most {MOST_CHUNKS:.0e}; "
            "raise router.chunk_B with --set, or set it to null to send messages whole"
        )


def _find(task: Task, clock: StageClock, report: Callable[[int, int], None]) -> Findings:
    router = task.hardware.router
    chunk = None if router.chunk_B is None else float(router.chunk_B)
    with clock.stage("model"):
        prediction = predict(build_time_model(task.hardware), task.topology, task.matrices)
    with clock.stage("simulate"):
        fabric = fabric_of(task.topology, chunk, router.switching == "cut_through")
        simulated = simulate(fabric, task.matrices, task.order, task.seed, report)
        loads = loads_of(fabric, task.matrices)
    return Findings(list(task.matrices), prediction, simulated, loads)


def _provenance(task: Task, traffic: Path) -> dict[str, Any]:
    return {
        "command": "network",
        "hardware": resolved(task.hardware),
        "seed": task.seed,
        **surroundings(),
        "traffic": {"path": str(traffic), "matrices": len(task.matrices), "order": task.order},
    }


def _some(matrices: Matrices) -> str:
    names = list(matrices)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
