"""Collectives as lists of sends that only tests simulate: all-to-all, rings, entwined rings and multicast trees."""

from collections.abc import Iterator, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxmoe.des.tasks import Send, _ring_steps, chunk_sizes, ring_all_reduce_sends
from jaxmoe.hardware.cuts import blocks, ring_order
from jaxmoe.hardware.networks import link_ends
from oracles.paths import xy_path, yx_path

Routing = Literal["xy", "yx"]


def total_traffic(rounds):
    """Bytes of all rounds together, [source, destination]."""
    return jnp.einsum("r,rsd->sd", rounds.repeats, rounds.traffic)


def all_to_all_sends(traffic: np.ndarray) -> list[Send]:
    """A message of traffic[s, d] B from every node s to every other d: first to s + 1, then to s + 2, and so on."""
    nodes = len(traffic)
    pairs = [(node, (node + step) % nodes) for node in range(nodes) for step in range(1, nodes)]
    return [Send(source, destination, float(traffic[source, destination])) for source, destination in pairs]


def ring_sends(order: Sequence[int], size: float, first: int = 0) -> list[Send]:
    """Ring reduce-scatter or all-gather: R - 1 steps in which each of the R nodes sends `size` to its successor.

    What a node sends on is what it received in the step before.
    """
    return _ring_steps(order, size, len(order) - 1, first)


def block_rings(shape: tuple[int, int], count: int) -> list[list[int]]:
    """The nodes of `count` equal rectangles of the mesh, each in ring order."""
    block = blocks(shape, count)
    return [ring_order(shape, np.flatnonzero(block == index)).tolist() for index in range(count)]


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
    """Split every message into one send for each link of its XY path on a mesh of `shape`.

    A node on the path receives the message whole before it sends it on. Messages from a node to itself have no send.
    """
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
    for chunk, amount in enumerate(chunk_sizes(size, chunk_bytes)):
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
