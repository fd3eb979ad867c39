"""How much a network can move between its halves."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxmoe.hardware.topology import AbstractTopology


def bisection_bandwidth(topology: AbstractTopology) -> float:
    """The least bandwidth from one half of the nodes to the other, in B/s, one direction; 0 for a lone node.

    Links count in full; ports and efficiency do not. Halves of an odd number of nodes differ by one node, and
    switches stand on whichever side makes the cut least. To find the least of all halvings is NP-hard. Tried are
    those of nodes in the order of their numbers, of where they are drawn, and of hops from the remotest node.
    That is exact for the networks of `jaxmoe.hardware` whose links are alike (of clusters: on each level), and
    for a grid of wafers with slower borders and two even sides. Elsewhere it is an upper bound.
    """
    if topology.num_nodes == 1:
        return 0.0
    ends, bandwidth = topology.link_ends, np.asarray(topology.link_bandwidth, float)
    vertices = len(topology.positions())
    return min(_least_cut(_joined(half, vertices)[ends], bandwidth) for half in _halves(topology))


def _halves(topology: AbstractTopology) -> Iterator[Bool[np.ndarray, " node"]]:
    """Natural halves of the nodes, and what they leave."""
    nodes = topology.num_nodes
    right, down = topology.positions()[:nodes].T
    hops = np.asarray(topology.hop_counts())
    remotest = hops.sum(axis=1).argmax()
    for key in (np.arange(nodes), right, down, hops[remotest]):
        half = np.zeros(nodes, bool)
        half[np.argsort(key, kind="stable")[: nodes // 2]] = True
        yield half
        yield ~half


def _joined(half: Bool[np.ndarray, " node"], vertices: int) -> np.ndarray:
    """New number of every vertex when all of the half become vertex 0 and all other nodes 1, int [vertex]."""
    switches = vertices - len(half)
    return np.concatenate([np.where(half, 0, 1), 2 + np.arange(switches)])


def _least_cut(ends: np.ndarray, bandwidth: Float[np.ndarray, " link"]) -> float:
    """Bandwidth over the least cut from vertex 0 to vertex 1."""
    size = int(ends.max()) + 1
    capacity = np.zeros((size, size))
    np.add.at(capacity, (ends[:, 0], ends[:, 1]), bandwidth)
    np.fill_diagonal(capacity, 0)
    # Flows are of 32-bit integers. The least cut is no more than what leaves vertex 0, so neither need a capacity
    # be; a quarter of the range for it leaves room for what flows back. The flow only says which links to cut.
    enough = capacity[0].sum()
    units = csr_array((np.minimum(capacity / enough, 1) * 2**29).astype(np.int32))
    left = units - maximum_flow(units, 0, 1).flow
    near = np.zeros(size, bool)
    near[breadth_first_order(left > 0, 0, return_predecessors=False)] = True
    return float(capacity[near][:, ~near].sum())
