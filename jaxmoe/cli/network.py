"""`jaxmoe network`: how long given traffic takes on a network of any kind, in time models and in the simulator."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.comparison_figures import draw_scatter
from jaxmoe.cli.comparison_output import print_table
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import HardwareConfig, build_time_model, build_topology, load_hardware, resolved
from jaxmoe.des import fabric_of
from jaxmoe.des.traffic import Order
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.experiment.traffic import Matrices, Prediction, TrafficLoads, loads_of, predict, read_matrices, simulate
from jaxmoe.experiment.validation import agreement
from jaxmoe.hardware import AbstractTopology, bisection_bandwidth
from jaxmoe.hardware.networks import mesh_link_order
from jaxmoe.network.contention import Order as ModelOrder
from jaxmoe.report import MeshPanel, plot_mesh_loads, plot_network, plot_traffic
from jaxmoe.report.html import MachineLoads, write_loads
from jaxmoe.report.style import LINK_BYTES, NODE_BYTES, PALETTE, Measure, byte_unit, digits, time_unit

MOST_ROWS, SHOWN_ROWS = 40, 20


# Output of `jaxmoe network`: the summary for programs and the table for people. Times are seconds.


@dataclass(frozen=True)
class NetworkResult:
    """Modelled and simulated times of every traffic matrix, and loads of links and ports, in the order of `names`."""

    names: list[str]
    prediction: Prediction
    simulated: np.ndarray  # s [matrix]
    loads: TrafficLoads

    @property
    def model(self) -> np.ndarray:
        """Completion time of every matrix in the congestion model, s [matrix]."""
        return self.prediction.completion["model"]


def network_report(hardware: HardwareConfig, topology: AbstractTopology, findings: NetworkResult) -> dict[str, Any]:
    """Network, matrices, and how the simulator agrees."""
    return {
        "network": {
            "kind": hardware.kind,
            "nodes": topology.num_nodes,
            "switches": len(topology.positions()) - topology.num_nodes,
            "links": topology.num_links,
            "bisection_B_per_s": bisection_bandwidth(topology),
        },
        "matrices": {name: _matrix(topology, findings, row) for row, name in enumerate(findings.names)},
        "agreement": agreement(findings.model, findings.simulated),
    }


def print_findings(topology: AbstractTopology, findings: NetworkResult, title: str) -> None:
    """One line for each matrix; of many, those that take longest."""
    rows = np.arange(len(findings.names))
    if len(rows) > MOST_ROWS:
        rows = np.argsort(-findings.model, kind="stable")[:SHOWN_ROWS]
    table = Table(title=escape(title), caption=_left_out(len(findings.names) - len(rows)))
    columns = dict(_columns(findings, rows))
    table.add_column("matrix", overflow="fold")
    for heading in (*columns, "busiest\nfrom, to", "off\n%"):
        table.add_column(heading, justify="right")
    ends = topology.link_ends[findings.loads.link.argmax(axis=1)]
    for line, row in enumerate(rows):
        figures = [digits(values[line], 4) for values in columns.values()]
        start, end = ends[row]
        difference = _difference(findings.model[row], findings.simulated[row])
        table.add_row(escape(findings.names[row]), *figures, f"{start}, {end}", difference)
    print_table(table)


def _columns(findings: NetworkResult, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Headings with a unit, and the values of these matrices in it."""
    loads, longest = findings.loads, np.maximum(findings.model, findings.simulated)
    busiest = loads.link.max(axis=1)
    for name, values, largest, unit in (
        ("bytes", loads.total, loads.total, byte_unit),
        ("bytes x hops", loads.hops, loads.hops, byte_unit),
        ("busiest link", busiest, busiest, byte_unit),
        ("model", findings.model, longest, time_unit),
        ("simulated", findings.simulated, longest, time_unit),
    ):
        factor, unit_name = unit(float(largest[rows].max()))
        yield f"{name}\n{unit_name}", values[rows] * factor


def _matrix(topology: AbstractTopology, findings: NetworkResult, row: int) -> dict[str, Any]:
    loads = findings.loads
    predicted = {name: float(seconds[row]) for name, seconds in findings.prediction.completion.items()}
    return {
        "completion_s": {"model": predicted.pop("model"), "des": float(findings.simulated[row])} | predicted,
        "bytes": float(loads.total[row]),
        "bytes_hops": float(loads.hops[row]),
        "max_link_load_B": float(loads.link[row].max()),
        "max_inject_B": float(loads.sent[row].max()),
        "max_eject_B": float(loads.received[row].max()),
        "bottleneck": _bottleneck(topology, findings.prediction, row),
    }


def _bottleneck(topology: AbstractTopology, prediction: Prediction, row: int) -> dict[str, Any] | None:
    """The link or port that is busy for longest in the model, `None` where nothing is sent."""
    busy = np.concatenate([prediction.link_time[row], prediction.port_time[row]])
    longest = int(busy.argmax())
    if busy[longest] == 0:
        return None
    if longest < topology.num_links:
        where = {"part": "link", "ends": topology.link_ends[longest].tolist()}
    else:
        port = longest - topology.num_links
        sends = topology.injection_bandwidth is not None and port < topology.num_nodes
        where = {"part": "injection" if sends else "ejection", "node": port % topology.num_nodes}
    return where | {"busy_s": float(busy[longest])}


def _difference(model: float, simulated: float) -> str:
    # Adding zero takes the sign from a zero.
    return f"{round(100 * (model / simulated - 1), 2) + 0:+.2f}" if simulated > 0 else "-"


def _left_out(count: int) -> str | None:
    return f"and {count} more, which take less time; summary.json has them all" if count else None


# The figures of `jaxmoe network`.

MOST_MATRICES = 200  # whose loads are kept
FEWEST_POINTS = 3  # of a scatter that shows anything
SECONDS = Measure("completion", time_unit)


def draw_matrix(
    folder: OutputFolder,
    machine: str,
    topology: AbstractTopology,
    traffic: np.ndarray,
    findings: NetworkResult,
    row: int,
) -> None:
    """One matrix, and what the network carries under it."""
    name, link, received = findings.names[row], findings.loads.link[row], findings.loads.received[row]
    times = f"{SECONDS.show(findings.model[row])} in the model, {SECONDS.show(findings.simulated[row])} simulated"
    title = f"{machine}, {name}: {times}"
    plot_traffic(folder.target("traffic.png"), traffic, f"{machine}, {name}: what every node sends")
    if topology.grid is not None:
        carried = link[mesh_link_order(topology.grid, topology.link_ends)]
        panel = MeshPanel("bytes received by nodes and carried by links", received, carried)
        plot_mesh_loads(folder.target("network.png"), topology.grid, [panel], title, (NODE_BYTES, LINK_BYTES))
    else:
        ends, positions = topology.link_ends, topology.positions()
        plot_network(
            folder.target("network.png"), ends, positions, link, received, title=title, num_nodes=topology.num_nodes
        )


def write_matrix_loads(folder: OutputFolder, topology: AbstractTopology, findings: NetworkResult) -> None:
    """`loads.npz`: bytes that nodes receive and links carry, of the matrices that take longest, in their order."""
    rows = np.sort(np.argsort(-findings.model, kind="stable")[:MOST_MATRICES])
    loads = MachineLoads(
        names=["traffic"],
        frames=[findings.names[row] for row in rows],
        node=findings.loads.received[None, rows],
        link=findings.loads.link[None, rows],
        link_ends=np.asarray(topology.link_ends),
        positions=np.asarray(topology.positions()),
        unit="B",
        grid=topology.grid or (),
    )
    write_loads(folder.target("loads.npz"), loads)


def draw_agreement(folder: OutputFolder, machine: str, findings: NetworkResult) -> None:
    """Model against simulation, coloured by what matrices are called; none for fewer than three."""
    if len(findings.names) < FEWEST_POINTS:
        return
    families = [_family(name) for name in findings.names]
    if len(set(families)) > len(PALETTE):
        families = ["all matrices"] * len(families)
    member = {family: np.array([name == family for name in families]) for family in dict.fromkeys(families)}
    model = {family: findings.model[rows] for family, rows in member.items()}
    simulated = {family: findings.simulated[rows] for family, rows in member.items()}
    draw_scatter(folder, f"{machine}: completion of given traffic", model, simulated)


def _family(name: str) -> str:
    """A name without the number at its end."""
    return re.sub(r"[\W_]*\d+$", "", name) or name


MOST_CHUNKS = 10_000_000  # of one matrix, that the simulator can hold


@dataclass(frozen=True)
class NetworkInputs:
    """Checked inputs of one run: network, traffic matrices, and the order in which a node sends its messages."""

    hardware: HardwareConfig
    topology: AbstractTopology
    matrices: Matrices
    order: Order
    seed: int
    model_order: ModelOrder | None  # order of messages in the contention model; None: no contention


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
    with StageTimer() as clock:
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
            write_matrix_loads(folder, task.topology, findings)
        shown = {"shown": findings.names[row]}
        summary = _provenance(task, traffic) | network_report(task.hardware, task.topology, findings) | shown
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        print_findings(task.topology, findings, f"{machine}: completion of given traffic")


def _read(config: Path, overrides: list[str] | None, traffic: Path, order: str | None, seed: int) -> NetworkInputs:
    """Read and check everything. Raises `ConfigError` or `OptionError`."""
    known = {name: name for name in get_args(Order)}
    if order is not None and order not in known:
        raise OptionError(f"--order is {order!r}, expected one of {', '.join(known)}")
    hardware = load_hardware(config, overrides or ())
    asked = order is not None or hardware.router.num_vcs is not None
    if order is None:
        order = "shuffled" if hardware.router.cuts_through else "staggered"
    topology = build_topology(hardware)
    matrices = read_matrices(traffic, topology.num_nodes)
    for name, matrix in matrices.items():
        _check_chunks(f"{traffic}: {name}", matrix, hardware.router.chunk_B)
    orders: dict[str, ModelOrder] = {"staggered": "staggered", "by_destination": "by_destination"}
    return NetworkInputs(
        hardware, topology, matrices, known[order], seed, orders.get(order, "shuffled") if asked else None
    )


def _check_chunks(label: str, matrix: np.ndarray, chunk_B: int | None) -> None:
    chunks = np.ceil(matrix / chunk_B).sum() if chunk_B is not None else 0
    if chunks > MOST_CHUNKS:
        raise OptionError(
            f"{label} makes {chunks:.3g} chunks of {chunk_B} B, and the simulator takes at most {MOST_CHUNKS:.0e}; "
            "raise router.chunk_B with --set, or set it to null to send messages whole"
        )


def _find(task: NetworkInputs, clock: StageTimer, report: Callable[[int, int], None]) -> NetworkResult:
    router = task.hardware.router
    chunk = None if router.chunk_B is None else float(router.chunk_B)
    with clock.stage("model"):
        prediction = predict(build_time_model(task.hardware, task.model_order), task.topology, task.matrices)
    with clock.stage("simulate"):
        fabric = fabric_of(task.topology, chunk, router.cuts_through)
        simulated = simulate(fabric, task.matrices, task.order, task.seed, report)
        loads = loads_of(fabric, task.matrices)
    return NetworkResult(list(task.matrices), prediction, simulated, loads)


def _provenance(task: NetworkInputs, traffic: Path) -> dict[str, Any]:
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
