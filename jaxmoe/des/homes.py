"""Where the results of a token meet: its home, worked out token by token."""

import numpy as np
from jaxtyping import Bool, Int

from jaxmoe.placement.exchange import LOAD_WEIGHT, Home
from jaxmoe.traces import Batch


def homes_of(
    home: Home,
    batch: Batch,
    hosts: Bool[np.ndarray, "token top_k node"],
    hops: Int[np.ndarray, "node node2"],
    mesh_shape: tuple[int, int] | None = None,
) -> Int[np.ndarray, " token"]:
    """The home of every token; of one that visits no node it is of no meaning. `hosts` are those of its choices."""
    visited = np.asarray(hosts.any(axis=1))
    tokens, nodes = visited.shape
    if home == "lowest_host":
        return hosts[np.arange(tokens), np.asarray(batch.gather_slot)].argmax(axis=1)
    if home == "random_host":
        draw, count = np.asarray(batch.token_draw), visited.sum(axis=1)
        index = np.minimum((draw * count.astype(draw.dtype)).astype(int), count - 1)
        return (np.cumsum(visited, axis=1) > index[:, None]).argmax(axis=1)
    if home == "fewest_hops":
        return np.where(visited, visited @ hops, np.inf).argmin(axis=1)
    if home == "least_loaded":
        return _least_loaded(visited, visited @ hops)
    if home == "corner_host":
        corners = _corners(mesh_shape, nodes)
        near = hops[[corners[token % len(corners)] for token in range(tokens)]]
        return np.where(visited, near, np.inf).argmin(axis=1)
    return token_sources(batch, nodes)


def _corners(mesh_shape: tuple[int, int] | None, nodes: int) -> list[int]:
    """The corners of a mesh in the order of their numbers; all nodes of another network."""
    if mesh_shape is None:
        return list(range(nodes))
    x, y = mesh_shape
    return sorted({row * y + column for row in (0, x - 1) for column in (0, y - 1)})


def token_sources(batch: Batch, nodes: int) -> Int[np.ndarray, " token"]:
    """The node where every token lives: as the batch says, or by their order in equal runs."""
    if batch.source is not None:
        return np.asarray(batch.source)
    tokens = len(batch.experts)
    return np.arange(tokens) * nodes // tokens


def _least_loaded(
    visited: Bool[np.ndarray, "token node"], hops_in_all: Int[np.ndarray, "token node"]
) -> Int[np.ndarray, " token"]:
    """Hops in all, and so many more for every token that a node is already home to; tokens in their order."""
    tokens, nodes = visited.shape
    home, count = np.zeros(tokens, np.int64), np.zeros(nodes, np.int64)
    for token in np.flatnonzero(visited.any(axis=1)):
        cost = hops_in_all[token] * tokens + LOAD_WEIGHT * nodes * count
        home[token] = np.where(visited[token], cost, np.iinfo(np.int64).max).argmin()
        count[home[token]] += 1
    return home
