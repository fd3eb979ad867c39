"""Who sends what to whom, and after which receipts: collectives as lists of sends.

A schedule knows nodes but no links. `add_sends` lays it on the paths of a fabric. Combine is the way described;
dispatch is its mirror, over the same links reversed (hd_moe IV-C1).

A send waits for what it passes on, and not for rounds. `first` is everywhere the index of the first of the sends
in the schedule they become part of.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.fabric import Paths
from jaxmoe.des.tasks import GraphBuilder
from jaxmoe.hardware.mesh import blocks, link_ends, ring_order, xy_path, yx_path

Routing = Literal["xy", "yx"]


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


def all_to_all_sends(traffic: Float[np.ndarray, "node node2"]) -> list[Send]:
    """A message of traffic[s, d] B from every node s to every other d: first to s + 1, then to s + 2, and so on."""
    nodes = len(traffic)
    pairs = [(node, (node + step) % nodes) for node in range(nodes) for step in range(1, nodes)]
    return [Send(source, destination, float(traffic[source, destination])) for source, destination in pairs]


def ring_sends(order: Sequence[int], size: float, first: int = 0) -> list[Send]:
    """Ring reduce-scatter or all-gather: R - 1 steps in which each of the R nodes sends `size` to its successor.

    What a node sends on is what it received in the step before.
    """
    return _ring_steps(order, size, len(order) - 1, first)


def ring_all_reduce_sends(order: Sequence[int], size: float, bidirectional: bool = False, first: int = 0) -> list[Send]:
    """Reduce-scatter, then all-gather, of buffers of `size` B cut in R parts: 2 (R - 1) steps of a ring.

    The first part to be gathered is the one that was reduced last, so the steps go on without a break. With
    `bidirectional` half of every part goes the other way round; a ring of two has but one way.
    """
    nodes = len(order)
    ways = [order, order[::-1]] if bidirectional and nodes > 2 else [order]
    sends: list[Send] = []
    for way in ways:
        sends += _ring_steps(way, size / nodes / len(ways), 2 * (nodes - 1), first + len(sends))
    return sends


def _ring_steps(order: Sequence[int], size: float, steps: int, first: int) -> list[Send]:
    nodes = len(order)
    sends = []
    for step in range(steps):
        for place, node in enumerate(order):
            received = first + (step - 1) * nodes + (place - 1) % nodes
            sends.append(Send(node, order[(place + 1) % nodes], size, (received,) if step else ()))
    return sends


def block_rings(shape: tuple[int, int], count: int) -> list[list[int]]:
    """The nodes of `count` equal rectangles of the mesh, each in ring order."""
    block = blocks(shape, count)
    return [ring_order(shape, np.flatnonzero(block == index)).tolist() for index in range(count)]


def all_rings_sends(
    rings: Sequence[Sequence[int]],
    visited: Bool[np.ndarray, "token node"],
    message_bytes: float,
    both_ways: bool = False,
) -> list[Send]:
    """All rings at once: a ring of R nodes cuts the vectors of the tokens that visit it in R parts (hd_moe Eq. 4).

    With `both_ways` half of every part goes the other way round; a ring of two has but one way.
    """
    sends: list[Send] = []
    for ring in rings:
        vectors = int(visited[:, ring].any(axis=1).sum())
        ways = [ring, ring[::-1]] if both_ways and len(ring) > 2 else [ring]
        for way in ways if vectors else []:
            sends += ring_sends(way, vectors * message_bytes / len(ring) / len(ways), first=len(sends))
    return sends


def entwined_rings(shape: tuple[int, int], domain: tuple[int, int]) -> list[list[int]]:
    """The tensor-parallel groups of a mesh tiled by full token domains, in ring order (moentwine IV-B).

    A group has the node of equal place in every domain; domains have to tile the mesh.
    """
    nodes = np.arange(shape[0] * shape[1]).reshape(shape)
    groups = [nodes[x :: domain[0], y :: domain[1]] for x, y in np.ndindex(domain)]
    return [ring_order(shape, group.ravel()).tolist() for group in groups]


def entwined_ring_sends(
    shape: tuple[int, int], domain: tuple[int, int], size: float, bidirectional: bool = True
) -> list[Send]:
    """All-reduce of all groups at once, of buffers of `size` B; nodes between two of a group forward its messages."""
    sends: list[Send] = []
    for ring in entwined_rings(shape, domain):
        sends += ring_all_reduce_sends(ring, size, bidirectional, first=len(sends))
    return forwarded_sends(shape, sends)


def forwarded_sends(shape: tuple[int, int], sends: Sequence[Send]) -> list[Send]:
    """The same messages between different nodes, received whole and sent on by every node on their XY paths."""
    hops: list[Send] = []
    arrival: list[int] = []  # for every message, the index of its last hop
    for source, destination, size, after in sends:
        waits = tuple(arrival[index] for index in after)
        for start, end in _hops(shape, source, destination):
            hops.append(Send(start, end, size, waits))
            waits = (len(hops) - 1,)
        arrival.append(len(hops) - 1)
    return hops


def multicast_tree(
    shape: tuple[int, int], source: int, destinations: Sequence[int], routing: Routing = "xy"
) -> list[tuple[int, int]]:
    """The union of a mesh's paths to all destinations, as (parent, child); a parent is always a child before."""
    hops = (hop for destination in destinations for hop in _hops(shape, source, destination, routing))
    return list(dict.fromkeys(hops))


def tree_sends(
    tree: Sequence[tuple[int, int]],
    size: float,
    chunk_bytes: float | None = None,
    stop_and_wait: bool = False,
    first: int = 0,
) -> list[Send]:
    """Multicast of `size` B along (parent, child) edges: a node sends every chunk on to its children when it has it.

    With `stop_and_wait` a node sends a child nothing before it has the chunk before. Then a latency keeps the
    sender busy, as in the alpha-beta model of the chunked broadcast in hd_moe IV-D2.
    """
    sends: list[Send] = []
    brought: dict[tuple[int, int], int] = {}  # send that brought a chunk to a node
    for chunk, amount in enumerate(_chunk_sizes(size, chunk_bytes)):
        for parent, child in tree:
            awaited = [(chunk, parent), (chunk - 1, child)] if stop_and_wait else [(chunk, parent)]
            brought[chunk, child] = first + len(sends)
            sends.append(Send(parent, child, amount, tuple(brought[key] for key in awaited if key in brought)))
    return sends


def _hops(shape: tuple[int, int], source: int, destination: int, routing: Routing = "xy") -> Iterator[tuple[int, int]]:
    """The nodes at both ends of every link of a path."""
    path = xy_path if routing == "xy" else yx_path
    for link in path(shape, source, destination):
        start, end = link_ends(shape)[link]
        yield int(start), int(end)


def _chunk_sizes(size: float, chunk_bytes: float | None) -> list[float]:
    """Chunks of a message, the last one the rest."""
    if chunk_bytes is None:
        return [size]
    count = max(math.ceil(size / chunk_bytes), 1)
    return [chunk_bytes] * (count - 1) + [size - (count - 1) * chunk_bytes]


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
