"""Who sends what to whom, and after which receipts: collectives as lists of sends.

A schedule knows nodes but no links. `add_sends` lays it on the paths of a fabric. Combine is the way described;
dispatch is its mirror, over the same links reversed (hd_moe IV-C1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxmoe.des.fabric import Paths
from jaxmoe.des.tasks import GraphBuilder
from jaxmoe.hardware.mesh import blocks, ring_order


class Send(NamedTuple):
    """One message of `size` bytes; it waits for the sends of its schedule whose indices are in `after`."""

    source: int
    destination: int
    size: float
    after: tuple[int, ...] = ()


def gather_sends(visited: Bool[np.ndarray, "token node"], gather: Int[np.ndarray, " token"], size: float) -> list[Send]:
    """Every visited node sends one message to the token's gather node: token by token, then node by node."""
    token, node = np.nonzero(visited)
    away = node != gather[token]
    pairs = zip(node[away].tolist(), gather[token[away]].tolist(), strict=True)
    return [Send(source, destination, size) for source, destination in pairs]


def scatter_sends(gathered: list[Send]) -> list[Send]:
    """The mirror of gathering: the same messages, in the same order, sent back."""
    return [Send(destination, source, size) for source, destination, size, _ in gathered]


def ring_sends(order: Sequence[int], size: float, first: int = 0) -> list[Send]:
    """Ring reduce-scatter or all-gather: R - 1 steps in which each of the R nodes sends `size` to its successor.

    What a node sends on is what it received in the step before. `first` is the index of the first of these
    sends in the schedule they become part of.
    """
    nodes = len(order)
    sends = []
    for step in range(nodes - 1):
        for place, node in enumerate(order):
            received = first + (step - 1) * nodes + (place - 1) % nodes
            sends.append(Send(node, order[(place + 1) % nodes], size, (received,) if step else ()))
    return sends


def block_rings(shape: tuple[int, int], count: int) -> list[list[int]]:
    """The nodes of `count` equal rectangles of the mesh, each in ring order."""
    block = blocks(shape, count)
    return [ring_order(shape, np.flatnonzero(block == index)).tolist() for index in range(count)]


def all_rings_sends(
    rings: Sequence[Sequence[int]], visited: Bool[np.ndarray, "token node"], message_bytes: float
) -> list[Send]:
    """All rings at once: a ring of R nodes cuts the vectors of the tokens that visit it in R parts (hd_moe Eq. 4)."""
    sends: list[Send] = []
    for ring in rings:
        vectors = int(visited[:, ring].any(axis=1).sum())
        if vectors:
            sends += ring_sends(ring, vectors * message_bytes / len(ring), first=len(sends))
    return sends


def add_sends(
    graph: GraphBuilder, sends: Sequence[Send], paths: Paths, ready: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Add a schedule to `graph`; `ready[node]` are the tasks after which that node may send.

    Returns for every node the tasks that deliver to it.
    """
    tasks: list[int] = []
    received: list[list[int]] = [[] for _ in ready]
    for source, destination, size, after in sends:
        waits = (*ready[source], *(tasks[index] for index in after))
        tasks.append(graph.transfer(paths[source][destination], size, waits))
        received[destination].append(tasks[-1])
    return received
