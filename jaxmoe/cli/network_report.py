"""What `jaxmoe network` tells: the summary for programs and the table for people. Times are seconds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.tables import print_table
from jaxmoe.config import HardwareConfig
from jaxmoe.experiment.traffic import Loads, Prediction
from jaxmoe.experiment.validation import agreement
from jaxmoe.hardware import AbstractTopology, bisection_bandwidth
from jaxmoe.plotting.style import byte_unit, digits, time_unit

MOST_ROWS, SHOWN_ROWS = 40, 20


@dataclass(frozen=True)
class Findings:
    """What was found of every matrix, in the order of `names`."""

    names: list[str]
    prediction: Prediction
    simulated: np.ndarray  # s [matrix]
    loads: Loads

    @property
    def model(self) -> np.ndarray:
        """Completion as the congestion model has it, s [matrix]."""
        return self.prediction.completion["model"]


def network_report(hardware: HardwareConfig, topology: AbstractTopology, findings: Findings) -> dict[str, Any]:
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


def print_findings(topology: AbstractTopology, findings: Findings, title: str) -> None:
    """One line for each matrix; of many, those that take longest."""
    rows = np.arange(len(findings.names))
    if len(rows) > MOST_ROWS:
        rows = np.argsort(-findings.model, kind="stable")[:SHOWN_ROWS]
    table = Table(title=escape(title), caption=_left_out(len(findings.names) - len(rows)))
    columns = dict(_columns(findings, rows))
    table.add_column("matrix", overflow="fold")
    for heading in (*columns, "busiest link\nfrom, to", "difference\n%"):
        table.add_column(heading, justify="right")
    ends = topology.link_ends[findings.loads.link.argmax(axis=1)]
    for line, row in enumerate(rows):
        figures = [digits(values[line], 4) for values in columns.values()]
        start, end = ends[row]
        difference = _difference(findings.model[row], findings.simulated[row])
        table.add_row(escape(findings.names[row]), *figures, f"{start}, {end}", difference)
    print_table(table)


def _columns(findings: Findings, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
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


def _matrix(topology: AbstractTopology, findings: Findings, row: int) -> dict[str, Any]:
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
