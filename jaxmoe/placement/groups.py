"""Equal groups of the nodes of a machine, and rings through them."""

import numpy as np

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.hardware.cuts import cut_blocks, ring_order
from jaxmoe.placement.exchange import ExchangeError, Rings


def groups_of(rings: Rings, topology: AbstractTopology) -> np.ndarray:
    """Group of every node, int [node]: rectangles of a mesh, or successive nodes of any machine.

    Raises `ExchangeError` where the groups do not divide the machine.
    """
    nodes = topology.num_nodes
    if len(rings.groups) == 2:
        if not isinstance(topology, Mesh):
            raise ExchangeError(
                f"exchange {rings.name} cuts a mesh into rectangles, and the network is a {type(topology).__name__}; "
                f"use rings_{rings.count}"
            )
        try:
            return cut_blocks(topology.shape, (rings.groups[0], rings.groups[1]))
        except ValueError as error:
            raise ExchangeError(f"exchange {rings.name}: {error}") from None
    if nodes % rings.count:
        legal = ", ".join(str(count) for count in range(1, nodes + 1) if nodes % count == 0)
        raise ExchangeError(f"exchange {rings.name} needs equal groups of {nodes} nodes; use one of {legal}")
    return np.arange(nodes) // (nodes // rings.count)


def ring_orders(rings: Rings, topology: AbstractTopology) -> np.ndarray:
    """The nodes of every group in ring order, int [group, place on the ring].

    In a rectangle of a mesh neighbours on the ring are neighbours in the mesh, where such a cycle exists; in other
    groups nodes come in the order of their numbers.
    """
    group = groups_of(rings, topology)
    members = [np.flatnonzero(group == index) for index in range(rings.count)]
    if isinstance(topology, Mesh) and (len(rings.groups) == 2 or rings.count == 1):
        return np.stack([ring_order(topology.shape, nodes) for nodes in members])
    return np.stack(members)
