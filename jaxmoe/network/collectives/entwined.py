"""Entwined rings: tensor-parallel groups woven into each other on a mesh (moentwine IV-B).

The mesh is tiled by full token domains, rectangles with one node of every group. A group is what has the same
place in all domains, so its ring steps from domain to domain: two hops at a time where domains are 2x2 (Fig. 8d).
All groups do so at once, and their paths overlap.

The paper says that transfers are "time-staggered, so there is no link conflict", that "two-hop doubles the
all-reduce latency", and that links between domains are always busy while the others "work for one cycle and then
remain idle for the next" (IV-B2, V-A). It does not say how. Taken here: all messages move one hop a round, a step
has as many rounds as its longest path has hops, and nodes in between pass on what they received in the round
before. Then no directed link ever has two messages: those that move the same way along a line started at different
nodes and keep their distance, and a node starts at most one each way. Messages that have arrived wait for the end
of the step. That matters only for domains that are not square: the event simulator, which has no rounds, takes less
there. Also taken: halves of every part go round both ways ("packages are sent bi-directionally"), and rings run
round the grid of domains as `hardware.cuts.ring_order` does, where the paper shows only a grid of 2x2.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware.cuts import ring_order
from jaxmoe.network.collectives.rings import ring_ways, twice
from jaxmoe.network.collectives.rounds import Rounds

Shape = tuple[int, int]
Bytes = Float[Array, ""] | float


def entwined_rings(shape: Shape, domain: Shape, wafer: Shape | None = None) -> Int[np.ndarray, "ring place"]:
    """The groups of a mesh with domains of shape `domain`, in ring order; of each wafer for itself if given.

    Raises `ValueError` unless domains tile a wafer and wafers the mesh, and unless the grid of domains has a ring
    of neighbours: a single domain, two of them, or two sides longer than one of which one is even.
    """
    wafer = wafer or shape
    if any(mesh % side or side % step for mesh, side, step in zip(shape, wafer, domain, strict=True)):
        raise ValueError(f"domains of {domain} must tile wafers of {wafer}, and these the mesh of {shape}")
    grid = wafer[0] // domain[0], wafer[1] // domain[1]
    members = grid[0] * grid[1]
    if members > 2 and (min(grid) == 1 or members % 2):
        raise ValueError(
            f"a grid of {grid[0]}x{grid[1]} domains has no ring of neighbours; "
            "choose domains of which an even number fits along one side, and more than one along the other"
        )
    x, y = np.unravel_index(np.arange(shape[0] * shape[1]), shape)
    place = (x // wafer[0], y // wafer[1], x % domain[0], y % domain[1])
    group = np.ravel_multi_index(place, (shape[0] // wafer[0], shape[1] // wafer[1], *domain))
    return np.stack([ring_order(shape, np.flatnonzero(group == index)) for index in range(group.max() + 1)])


def entwined_ring_reduce_scatter(
    shape: Shape, domain: Shape, size: Bytes, bidirectional: bool = True, wafer: Shape | None = None
) -> Rounds:
    """Reduce-scatter of every group at once; each of its R nodes has a buffer of `size` bytes and keeps 1/R."""
    rings = entwined_rings(shape, domain, wafer)
    return _pass(shape, rings, size / rings.shape[1], bidirectional)


def entwined_ring_all_gather(
    shape: Shape, domain: Shape, size: Bytes, bidirectional: bool = True, wafer: Shape | None = None
) -> Rounds:
    """All-gather of every group at once, each of its R nodes with 1/R of `size` bytes: the same messages."""
    return entwined_ring_reduce_scatter(shape, domain, size, bidirectional, wafer)


def entwined_ring_all_reduce(
    shape: Shape, domain: Shape, size: Bytes, bidirectional: bool = True, wafer: Shape | None = None
) -> Rounds:
    """All-reduce of every group at once, over buffers of `size` bytes: reduce-scatter, then all-gather."""
    return twice(entwined_ring_reduce_scatter(shape, domain, size, bidirectional, wafer))


def hierarchical_entwined_rings(
    shape: Shape, wafer: Shape, domain: Shape, size: Bytes, bidirectional: bool = True
) -> Rounds:
    """Reduce-scatter inside every wafer, then all-gather between wafers (moentwine IV-B4, HER-Mapping).

    Groups stay inside a wafer. After the reduce-scatter each node has 1/R of the `size` bytes of its group, and
    the wafer as a whole is one domain. So the nodes of equal place on all wafers gather their parts in entwined
    rings whose domains are the wafers, with steps of a wafer's side.
    """
    scattered = entwined_rings(shape, domain, wafer)
    part = size / scattered.shape[1]
    gathered = entwined_rings(shape, wafer)
    return _pass(shape, scattered, part, bidirectional).then(_pass(shape, gathered, part, bidirectional))


def _pass(shape: Shape, rings: Int[np.ndarray, "ring place"], part: Bytes, bidirectional: bool) -> Rounds:
    """Once round all rings, every node sending `part` bytes a step, hop by hop."""
    ways = ring_ways(rings, bidirectional)
    amount = jnp.asarray(part, float) / len(ways)
    moves = [nodes_passed(shape, np.asarray(sender), np.asarray(receiver)) for sender, receiver in ways]
    hops, nodes = len(moves[0]) - 1, shape[0] * shape[1]
    traffic = jnp.zeros((hops, nodes, nodes), amount.dtype)
    for at in moves:
        underway = at[:-1] != at[1:]
        traffic = traffic.at[np.nonzero(underway)[0], at[:-1][underway], at[1:][underway]].add(amount)
    return Rounds(traffic, jnp.full(hops, rings.shape[1] - 1, amount.dtype))


def nodes_passed(
    shape: Shape, source: Int[np.ndarray, "*message"], destination: Int[np.ndarray, "*message"]
) -> Int[np.ndarray, "moment *message"]:
    """Where messages on XY paths are at first and after every hop; those that have arrived stay there."""
    start, stop = (np.stack(np.unravel_index(nodes, shape)) for nodes in (source, destination))
    way = stop - start  # along x, along y
    length = np.abs(way)
    hop = np.arange(length.sum(axis=0).max() + 1).reshape(-1, *[1] * source.ndim)
    x = start[0] + np.sign(way[0]) * np.minimum(hop, length[0])
    y = start[1] + np.sign(way[1]) * np.clip(hop - length[0], 0, length[1])
    return np.ravel_multi_index((x, y), shape)
