"""Loads and times of traffic on any network, walking its paths link by link."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import jax
import numpy as np

from jaxmoe.hardware import AbstractTopology
from jaxmoe.hardware.networks import link_ends, reverse_links


def walks(topology: AbstractTopology, mirrored: bool = False) -> Iterator[tuple[int, int, list[int]]]:
    """Source, destination and links of every path between two nodes; or of the way back over it."""
    back = np.asarray(topology.reverse_links).tolist()
    for source, row in enumerate(topology.paths()):
        for destination, path in enumerate(row):
            if source != destination and mirrored:
                yield destination, source, [back[link] for link in reversed(path)]
            elif source != destination:
                yield source, destination, list(path)


def link_loads(topology: AbstractTopology, traffic: np.ndarray, mirrored: bool = False) -> np.ndarray:
    """What every link carries."""
    load = np.zeros(topology.num_links)
    for source, destination, path in walks(topology, mirrored):
        for link in path:
            load[link] += traffic[source, destination]
    return load


def path_values(topology: AbstractTopology, per_link: np.ndarray, combine: Callable) -> np.ndarray:
    """`combine` (sum or max) of a per-link value over the path of every pair; 0 for a node to itself."""
    values = np.zeros((topology.num_nodes, topology.num_nodes))
    for source, destination, path in walks(topology):
        values[source, destination] = combine(float(per_link[link]) for link in path)
    return values


def port_loads(topology: AbstractTopology, traffic: np.ndarray) -> np.ndarray:
    """What every injection port, then every ejection port carries, of those there are."""
    sent, received = np.zeros(topology.num_nodes), np.zeros(topology.num_nodes)
    for source, destination in np.argwhere(traffic > 0):
        if source != destination:
            sent[source] += traffic[source, destination]
            received[destination] += traffic[source, destination]
    injection = [] if topology.injection_bandwidth is None else sent
    ejection = [] if topology.ejection_bandwidth is None else received
    return np.concatenate([injection, ejection])


def port_rates(topology: AbstractTopology) -> np.ndarray:
    """Bandwidth of every injection port, then of every ejection port, of those there are."""
    limits = [topology.injection_bandwidth, topology.ejection_bandwidth]
    return np.concatenate([[], *(np.asarray(limit, float) for limit in limits if limit is not None)])


def at(numbers: jax.Array, which: list[int]) -> list[float]:
    """Some of the numbers; taken from JAX one by one, they would take longer than all else."""
    return np.asarray(numbers)[np.asarray(which, int)].tolist()


def station_rates(topology: AbstractTopology, source: int, destination: int, path: list[int]) -> list[float]:
    """Bandwidths of the ports and links that a message passes, in order."""
    first = [] if topology.injection_bandwidth is None else at(topology.injection_bandwidth, [source])
    last = [] if topology.ejection_bandwidth is None else at(topology.ejection_bandwidth, [destination])
    return [*first, *at(topology.link_bandwidth, path), *last]


def congestion(
    topology: AbstractTopology, traffic: np.ndarray, chunk_bytes: float, cut_through: bool, mirrored: bool = False
) -> tuple[float, np.ndarray, np.ndarray]:
    """Seconds of one message from every node to every other, and of every link and port in it."""
    longest = 0.0
    for source, destination, path in walks(topology, mirrored):
        size = traffic[source, destination]
        if size > 0:
            chunk = min(chunk_bytes, size) if chunk_bytes > 0 else size
            waits = [chunk / rate for rate in station_rates(topology, source, destination, path)]
            delay = float(topology.endpoint_latency) + sum(at(topology.link_latency, path))
            longest = max(longest, delay if cut_through else delay + sum(waits) - max(waits))
    efficiency = float(topology.efficiency)
    link_bandwidth = np.asarray(topology.link_bandwidth, float)
    link_time = link_loads(topology, traffic, mirrored) / (link_bandwidth * efficiency)
    port_time = port_loads(topology, traffic) / (port_rates(topology) * efficiency)
    return max([*link_time, *port_time]) + longest, link_time, port_time


def slowest_pair(topology: AbstractTopology, traffic: np.ndarray, pipelined: bool, mirrored: bool = False) -> float:
    """Seconds of the slowest message if all were alone: every hop for itself, or all at the pace of the slowest."""
    slowest = 0.0
    for source, destination, path in walks(topology, mirrored):
        size, latency = traffic[source, destination], sum(at(topology.link_latency, path))
        if size > 0:
            rates = np.asarray(topology.link_bandwidth)[np.asarray(path, int)] * np.asarray(topology.efficiency)
            hops = [size / rate for rate in rates.tolist()]
            slowest = max(slowest, latency + (max(hops) if pipelined else sum(hops)))
    return slowest


def lone_message(rates: list[float], size: float, chunk_bytes: float) -> float:
    """Seconds in which stations, without latency, store and forward one message, chunk by chunk."""
    free, rest = np.zeros(len(rates)), size
    while rest > 0:
        chunk, at = min(chunk_bytes, rest), 0.0
        for station, rate in enumerate(rates):
            at = free[station] = max(at, free[station]) + chunk / rate
        rest -= chunk
    return float(free[-1])


# Paths on a mesh, hop by hop.


@lru_cache
def _link_index(shape: tuple[int, int]) -> dict[tuple[int, int], int]:
    return {(int(a), int(b)): i for i, (a, b) in enumerate(link_ends(shape))}


def xy_path(shape: tuple[int, int], source: int, destination: int) -> list[int]:
    """Links of the path from `source` to `destination`: along x first, then along y."""
    index, path = _link_index(shape), []
    x, y = divmod(source, shape[1])
    to_x, to_y = divmod(destination, shape[1])
    while (x, y) != (to_x, to_y):
        step = (x + np.sign(to_x - x), y) if x != to_x else (x, y + np.sign(to_y - y))
        path.append(index[x * shape[1] + y, int(step[0] * shape[1] + step[1])])
        x, y = int(step[0]), int(step[1])
    return path


def yx_path(shape: tuple[int, int], source: int, destination: int) -> list[int]:
    """Links of the path along y first, then along x: the XY path of the way back, walked backwards."""
    back = reverse_links(shape)
    return [int(back[link]) for link in reversed(xy_path(shape, destination, source))]
