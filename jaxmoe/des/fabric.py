"""The network as the simulator sees it: servers with rates and latencies, and the servers of every path."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.hardware import AbstractTopology

Paths = list[list[tuple[int, ...]]]


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
    paths: Paths  # servers of the path of a message, [source][destination]
    mirrored: Paths  # the same for what retraces the path of a message from destination to source
    hops: Int[np.ndarray, "node node2"]  # links of every path
    chunk_bytes: float | None
    cut_through: bool


def fabric_of(topology: AbstractTopology, chunk_bytes: float | None, cut_through: bool = False) -> Fabric:
    """Describe a network to the simulator.

    Its efficiency slows every link and port. A message has its end points' latency at its ejection port.
    """
    nodes, links = topology.num_nodes, topology.num_links
    forward = topology.paths()
    back = np.asarray(topology.reverse_links).tolist()
    backward = [
        [tuple(back[link] for link in reversed(forward[destination][source])) for destination in range(nodes)]
        for source in range(nodes)
    ]
    rate, latency = [np.asarray(topology.link_bandwidth, float)], [np.asarray(topology.link_latency, float)]
    before: list[tuple[int, ...]] = [()] * nodes
    after: list[tuple[int, ...]] = [()] * nodes
    if topology.injection_bandwidth is not None:
        before = [(links + node,) for node in range(nodes)]
        rate.append(np.asarray(topology.injection_bandwidth, float))
        latency.append(np.zeros(nodes))
    endpoint = float(topology.endpoint_latency)
    if topology.ejection_bandwidth is not None or endpoint > 0:
        first = sum(map(len, rate))
        after = [(first + node,) for node in range(nodes)]
        unlimited = topology.ejection_bandwidth is None
        rate.append(np.full(nodes, np.inf) if unlimited else np.asarray(topology.ejection_bandwidth, float))
        latency.append(np.full(nodes, endpoint))

    def with_ports(paths: Paths) -> Paths:
        return [
            [before[s] + path + after[d] if s != d else () for d, path in enumerate(row)] for s, row in enumerate(paths)
        ]

    return Fabric(
        num_nodes=nodes,
        num_links=links,
        rate=np.concatenate(rate) * float(topology.efficiency),
        latency=np.concatenate(latency),
        paths=with_ports(forward),
        mirrored=with_ports(backward),
        hops=np.array([[len(path) for path in row] for row in forward]),
        chunk_bytes=chunk_bytes,
        cut_through=cut_through,
    )
