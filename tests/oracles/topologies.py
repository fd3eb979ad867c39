"""Small networks of every kind, and random numbers for them."""

import dataclasses

import numpy as np

from jaxmoe.hardware import (
    AbstractTopology,
    Graph,
    Mesh,
    build_graph,
    clusters,
    fully_connected,
    ring,
    switch,
    torus,
    wafers,
)
from jaxmoe.hardware.networks import num_links
from oracles.arrays import floats
from oracles.own_topologies import Dragonfly


def mesh(shape: tuple[int, int], bandwidth: float = 1.0, latency: float = 0.0, **options) -> Mesh:
    """A mesh whose links are all alike."""
    links = num_links(shape)
    numbers = (floats(np.full(links, value)) for value in (bandwidth, latency))
    return Mesh(*numbers, shape=shape, **options)


def both_ways(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    """The links of each pair, there and back."""
    return [*pairs, *((b, a) for a, b in pairs)]


def graph_of(nodes: int, ends: list[tuple[int, int]], routes=None, bandwidth: float = 1.0) -> Graph:
    """A graph whose links are all alike, on as many vertices as its links name."""
    vertices = max([nodes - 1, *np.ravel(ends)]) + 1
    numbers = (np.full(len(ends), bandwidth), np.zeros(len(ends)))
    return build_graph(nodes, ends, *numbers, np.arange(2.0 * vertices).reshape(-1, 2), routes)


def detours() -> Graph:
    """Four nodes in a ring and two at a switch; from 0 to 1 the long way, which the way back does not retrace."""
    ends = both_ways((0, 1), (1, 2), (2, 3), (0, 3), (3, 6), (4, 6), (5, 6))
    return graph_of(6, ends, {(0, 1): [0, 3, 2, 1], (2, 5): [2, 1, 0, 3, 6, 5]})


def random_graph(rng: np.random.Generator) -> Graph:
    """Up to six nodes and two switches on a random tree, and some links more."""
    nodes, switches = int(rng.integers(2, 7)), int(rng.integers(0, 3))
    vertices = nodes + switches
    pairs = {(int(rng.integers(vertex)), vertex) for vertex in range(1, vertices)}
    pairs |= {(a, b) for a in range(vertices) for b in range(a + 1, vertices) if rng.random() < 0.25}
    return graph_of(nodes, both_ways(*sorted(pairs)))


NETWORKS: dict[str, AbstractTopology] = {
    "mesh": mesh((2, 3)),
    "yx_mesh": mesh((3, 2), routing="yx"),
    "wafers": wafers((2, 1), (1, 3), 1.0, 0.0, 1.0, 0.0),
    "ring": ring(6, 1.0, 0.0),
    "torus": torus((2, 4), 1.0, 0.0),
    "switch": switch(5, 1.0, 0.0),
    "fully_connected": fully_connected(4, 1.0, 0.0),
    "clusters": clusters(2, 3, 1.0, 0.0, 1.0, 0.0),
    "spines": clusters(3, 2, 1.0, 0.0, 1.0, 0.0, spines=2),
    "detours": detours(),
    "dragonfly": Dragonfly.uniform(1.0, 0.0, groups=3, routers=2, terminals=1),
}


def with_random_numbers(topology: AbstractTopology, rng: np.random.Generator, ports: bool = True) -> AbstractTopology:
    """Every link and port has its own numbers, and the network an end point latency and an efficiency."""

    def numbers(low: float, high: float, *shape: int):
        return floats(rng.uniform(low, high, shape))

    return dataclasses.replace(
        topology,
        link_bandwidth=numbers(1e9, 4e9, topology.num_links),
        link_latency=numbers(1e-7, 1e-6, topology.num_links),
        injection_bandwidth=numbers(1e9, 4e9, topology.num_nodes) if ports else None,
        ejection_bandwidth=numbers(1e9, 4e9, topology.num_nodes) if ports else None,
        endpoint_latency=numbers(1e-7, 1e-6),
        efficiency=numbers(0.5, 1.0),
    )


def random_traffic(rng: np.random.Generator, nodes: int, density: float = 0.6) -> np.ndarray:
    """Bytes from node to node, some of them none, also of nodes to themselves."""
    return (rng.uniform(1e4, 1e6, (nodes, nodes)) * (rng.random((nodes, nodes)) < density)).astype(np.float32)
