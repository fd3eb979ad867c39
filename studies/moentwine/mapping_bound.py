"""The least that any mapping of a small mesh can take by Eq. 1: all partitions of its devices into equal groups.

A bound for every ring and every way to fetch: each group has its best ring, and each device fetches from the nearest
member, however much that member has to send. A mapping that reaches the bound is an optimum.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from mapping_problem import MappingProblem

from jaxmoe.errors import InputError
from jaxmoe.hardware.networks import hop_counts

MOST = 5_000_000  # partitions


@dataclass(frozen=True)
class PartitionBound:
    """The least seconds over all partitions, how many there are, and one that has them, [group, member].

    `distinct` counts partitions once that rotations and reflections of the mesh turn into each other.
    """

    seconds: float
    partitions: int
    distinct: int
    ring: Int[np.ndarray, "group member"]


def least_of_all_partitions(problem: MappingProblem) -> PartitionBound:
    """Bound for balanced counts and equal links without congestion. Raises `InputError` for too many or for others."""
    (groups, members), shape = problem.shape, problem.grid
    nodes, count = groups * members, _number_of_partitions(groups, members)
    if problem.congested or count > MOST:
        raise InputError(
            f"a {shape[0]}x{shape[1]} mesh has {count} partitions into groups of {members}; all are tried up to "
            f"{MOST}, without congestion: use a smaller mesh, or congested=False"
        )
    alike = (problem.topology.link_bandwidth, problem.topology.link_latency, problem.counts)
    if any(np.ptp(np.asarray(each)) > 1e-6 * np.abs(np.asarray(each)).max() for each in alike):
        raise InputError("links or counts differ; the bound over all partitions needs equal links and balanced counts")
    hops = hop_counts(shape)
    subsets = np.array(list(itertools.combinations(range(nodes), members)))
    near = hops[subsets].min(axis=1).astype(np.int16)  # [subset, node]
    step, rings = _best_rings(subsets, hops)
    fetched, longest, chosen = _combine(subsets, near, step, nodes)
    link, latency = (
        float(np.asarray(each)[0]) for each in (problem.topology.link_bandwidth, problem.topology.link_latency)
    )
    vector, ways = float(problem.vector_bytes), 2 if members > 2 else 1
    exchange = 2 * fetched * (float(problem.counts[0, 0]) * vector / link + latency)
    part = float(problem.tokens) * vector / members / ways
    seconds = exchange + 2 * (members - 1) * longest * (part / link + latency)
    best = int(np.argmin(seconds))
    return PartitionBound(float(seconds[best]), len(seconds), _distinct(subsets, chosen, shape), rings[chosen[best]])


def _number_of_partitions(groups: int, members: int) -> int:
    count = 1
    for left in range(groups, 0, -1):
        chosen = 1
        for index in range(1, members):
            chosen = chosen * (left * members - index) // index
        count *= chosen
    return count


def _best_rings(subsets: np.ndarray, hops: np.ndarray) -> tuple[Float[np.ndarray, " subset"], np.ndarray]:
    """The least longest step of a ring through every subset, and that ring."""
    members = subsets.shape[1]
    orders = [(0, *order) for order in itertools.permutations(range(1, members)) if order <= order[::-1]]
    rings = np.stack([subsets[:, order] for order in orders])  # [order, subset, place]
    longest = hops[rings, np.roll(rings, -1, axis=2)].max(axis=2) if members > 1 else np.zeros(rings.shape[:2])
    best = longest.argmin(axis=0)
    return longest.min(axis=0).astype(float), rings[best, np.arange(len(subsets))]


def _combine(
    subsets: np.ndarray, near: np.ndarray, step: np.ndarray, nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every partition: most hops to fetch one vector of each group, longest ring step, and its subsets."""
    masks = (1 << subsets).sum(axis=1)
    taken, fetched = np.zeros(1, np.int64), np.zeros((1, nodes), np.int16)
    longest, chosen = np.zeros(1), np.zeros((1, 0), np.int32)
    for _ in range(nodes // subsets.shape[1]):
        # The next group has the first device that is still free: so every partition comes once.
        free = _first_free(taken)
        parts = []
        for first in np.unique(free).tolist():
            mine, having = np.flatnonzero(free == first), np.flatnonzero(subsets[:, 0] == first)
            fits = (taken[mine][:, None] & masks[having]) == 0
            row, column = np.nonzero(fits)
            parts.append(np.stack([mine[row], having[column]]))
        row, column = np.concatenate(parts, axis=1)
        taken, fetched = taken[row] | masks[column], fetched[row] + near[column]
        longest = np.maximum(longest[row], step[column])
        chosen = np.concatenate([chosen[row], column[:, None].astype(np.int32)], axis=1)
    return fetched.max(axis=1), longest, chosen


def _distinct(subsets: np.ndarray, chosen: np.ndarray, shape: tuple[int, int]) -> int:
    """Burnside's lemma: the mean over symmetries of how many partitions each leaves as they are."""
    grid = np.arange(shape[0] * shape[1]).reshape(shape)
    square = (grid, grid.T) if shape[0] == shape[1] else (grid,)
    images = [turned[::along, ::across].ravel() for turned in square for along in (1, -1) for across in (1, -1)]
    masks = (1 << subsets).sum(axis=1)
    order = np.argsort(masks)
    kept, own = 0, np.sort(chosen, axis=1)
    for image in images:
        becomes = order[np.searchsorted(masks, (1 << image[subsets]).sum(axis=1), sorter=order)]
        kept += int((np.sort(becomes[chosen], axis=1) == own).all(axis=1).sum())
    return kept // len(images)


def _first_free(taken: Int[np.ndarray, " part"]) -> Int[np.ndarray, " part"]:
    """The lowest bit that is not set in each mask."""
    return np.frexp((~taken & (taken + 1)).astype(float))[1] - 1
