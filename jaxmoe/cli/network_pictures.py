"""The figures of `jaxmoe network`."""

import re

import numpy as np

from jaxmoe.cli.network_report import Findings
from jaxmoe.cli.output import OutputFolder
from jaxmoe.cli.pictures import draw_scatter
from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.plotting import MeshPanel, plot_mesh_loads, plot_network, plot_traffic
from jaxmoe.plotting.scales import LINK_BYTES, NODE_BYTES, Measure
from jaxmoe.plotting.style import PALETTE, time_unit

FEWEST_POINTS = 3  # of a scatter that shows anything
SECONDS = Measure("completion", time_unit)


def draw_matrix(
    folder: OutputFolder, machine: str, topology: AbstractTopology, traffic: np.ndarray, findings: Findings, row: int
) -> None:
    """One matrix, and what the network carries under it."""
    name, link, received = findings.names[row], findings.loads.link[row], findings.loads.received[row]
    times = f"{SECONDS.show(findings.model[row])} in the model, {SECONDS.show(findings.simulated[row])} simulated"
    title = f"{machine}, {name}: {times}"
    plot_traffic(folder.target("traffic.png"), traffic, f"{machine}, {name}: what every node sends")
    if isinstance(topology, Mesh):
        panel = MeshPanel("bytes received by nodes and carried by links", received, link)
        plot_mesh_loads(folder.target("network.png"), topology.shape, [panel], title, (NODE_BYTES, LINK_BYTES))
    else:
        ends, positions = topology.link_ends, topology.positions()
        plot_network(
            folder.target("network.png"), ends, positions, link, received, title=title, num_nodes=topology.num_nodes
        )


def draw_agreement(folder: OutputFolder, machine: str, findings: Findings) -> None:
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
