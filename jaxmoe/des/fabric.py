"""The network as the simulator sees it: servers with rates and latencies, and the servers of every path."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.paths import Paths, mesh_paths, paths_of
from jaxmoe.hardware import AbstractTopology, Mesh


@dataclass(frozen=True)
class Fabric:
    """Servers are the links, then the injection ports, then the ejection ports, where there are any.

    A message is cut in chunks of `chunk_bytes` (`None`: sent whole), which every server either receives whole
    before it sends them on or, with `cut_through`, passes on as they come. SI units.
    """

    num_nodes: int
    num_links: int
    rate: Float[np.ndarray, " server"]  # B/s
    latency: Float[np.ndarray, " server"]  # s
    routes: Paths  # links alone
    crossed: Paths | None  # links of the paths along the other direction first; of a mesh
    opposite: Int[np.ndarray, " link"]  # the link that runs the other way
    injection: int | None  # number of the first port
    ejection: int | None
    mesh_shape: tuple[int, int] | None
    chunk_bytes: float | None
    cut_through: bool

    @cached_property
    def paths(self) -> Paths:
        """Servers that a message passes."""
        return self.routes.with_ports(self.injection, self.ejection)

    @cached_property
    def mirrored(self) -> Paths:
        """The same for what retraces the path of a message from destination to source."""
        return self.routes.mirrored(self.opposite).with_ports(self.injection, self.ejection)

    @property
    def hops(self) -> Int[np.ndarray, "node node2"]:
        """Links of every path."""
        return self.routes.hops


def fabric_of(topology: AbstractTopology, chunk_bytes: float | None, cut_through: bool = False) -> Fabric:
    """Describe a network to the simulator. A caller with many layers keeps the fabric, which holds all paths.

    Its efficiency slows every link and port. A message has its end points' latency at its ejection port.
    """
    nodes, links = topology.num_nodes, topology.num_links
    rate, latency = [np.asarray(topology.link_bandwidth, float)], [np.asarray(topology.link_latency, float)]
    injection = ejection = crossed = shape = None
    if topology.injection_bandwidth is not None:
        injection = links
        rate.append(np.asarray(topology.injection_bandwidth, float))
        latency.append(np.zeros(nodes))
    endpoint = float(topology.endpoint_latency)
    if topology.ejection_bandwidth is not None or endpoint > 0:
        ejection = sum(map(len, rate))
        unlimited = topology.ejection_bandwidth is None
        rate.append(np.full(nodes, np.inf) if unlimited else np.asarray(topology.ejection_bandwidth, float))
        latency.append(np.full(nodes, endpoint))
    if isinstance(topology, Mesh):
        shape = topology.shape
        crossed = mesh_paths(shape, "yx" if topology.routing == "xy" else "xy")
    return Fabric(
        num_nodes=nodes,
        num_links=links,
        rate=np.concatenate(rate) * float(topology.efficiency),
        latency=np.concatenate(latency),
        routes=paths_of(topology),
        crossed=crossed,
        opposite=np.asarray(topology.reverse_links),
        injection=injection,
        ejection=ejection,
        mesh_shape=shape,
        chunk_bytes=chunk_bytes,
        cut_through=cut_through,
    )
