"""Loads and times of messages on a mesh, path by path."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import link_ends, num_links
from oracles.paths import xy_path


@dataclass
class NumpyMachine:
    """The numbers of a machine, as NumPy arrays; `None` where it has no such limit."""

    shape: tuple[int, int]
    link_bandwidth: np.ndarray
    link_latency: np.ndarray
    flops: np.ndarray
    injection: np.ndarray | None = None
    ejection: np.ndarray | None = None
    memory_bandwidth: np.ndarray | None = None

    @property
    def num_nodes(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def topology(self) -> Mesh:
        """The network as the model sees it."""
        given = (self.link_bandwidth, self.link_latency, self.injection, self.ejection)
        numbers = (None if values is None else jax.device_put(np.array(values, float)) for values in given)
        return Mesh(*numbers, shape=self.shape)


def incidence(shape: tuple[int, int]) -> np.ndarray:
    """1 where the path of a pair uses a link, [link, source, destination]."""
    nodes = shape[0] * shape[1]
    uses = np.zeros((num_links(shape), nodes, nodes))
    for source in range(nodes):
        for destination in range(nodes):
            for link in xy_path(shape, source, destination):
                uses[link, source, destination] += 1
    return uses


def link_loads(shape: tuple[int, int], traffic: np.ndarray) -> np.ndarray:
    """Load of every link, by the dense incidence matrix."""
    return np.einsum("msd,sd->m", incidence(shape), traffic)


def path_values(shape: tuple[int, int], per_link: np.ndarray, combine) -> np.ndarray:
    """`combine` (sum or max) of a per-link value over the path of every pair; 0 for an empty path."""
    nodes = shape[0] * shape[1]
    values = np.zeros((nodes, nodes))
    for source in range(nodes):
        for destination in range(nodes):
            path = xy_path(shape, source, destination)
            values[source, destination] = combine([per_link[link] for link in path]) if path else 0
    return values


def backwards(shape: tuple[int, int], path: list[int]) -> list[int]:
    """The links of a path walked from its end to its start."""
    ends = [tuple(int(node) for node in pair) for pair in link_ends(shape)]
    return [ends.index(ends[link][::-1]) for link in reversed(path)]


def stage(
    machine: NumpyMachine,
    messages: np.ndarray,
    vector_bytes: float,
    chunk_bytes: float,
    rounds: int = 1,
    mirrored: bool = False,
    vectors: np.ndarray | float = 1.0,
) -> tuple[float, np.ndarray]:
    """Seconds of a stage, and of every link in it. Mirrored: every message goes back over its path.

    `messages` counts messages from source to destination; each is of `vectors` hidden vectors.
    """
    vectors = np.broadcast_to(vectors, messages.shape)
    load = np.zeros(num_links(machine.shape))
    sent, received = np.zeros(machine.num_nodes), np.zeros(machine.num_nodes)
    longest = 0.0
    for source, destination in np.argwhere(messages > 0):
        if source == destination:
            continue
        message_bytes = vectors[source, destination] * vector_bytes
        amount = messages[source, destination] * message_bytes
        path = xy_path(machine.shape, int(source), int(destination))
        if mirrored:
            path, source, destination = backwards(machine.shape, path), destination, source
        sent[source] += amount
        received[destination] += amount
        rates = [machine.link_bandwidth[link] for link in path]
        rates += [] if machine.injection is None else [machine.injection[source]]
        rates += [] if machine.ejection is None else [machine.ejection[destination]]
        chunks = [min(chunk_bytes, message_bytes) / rate for rate in rates]
        for link in path:
            load[link] += amount
        longest = max(longest, sum(machine.link_latency[link] for link in path) + sum(chunks) - max(chunks))
    link_time = rounds * load / machine.link_bandwidth
    busy = list(link_time)
    if machine.injection is not None:
        busy += list(rounds * sent / machine.injection)
    if machine.ejection is not None:
        busy += list(rounds * received / machine.ejection)
    return max(busy) + rounds * longest, link_time
