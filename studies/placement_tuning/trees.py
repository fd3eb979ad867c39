"""Minimum trees that bring one vector from every visited node to a home that is free, and bounds on their length.

A tree is of directed links that have lengths. `ascend` bounds what any tree takes, by the dual ascent of R. T. Wong
("A dual ascent approach for Steiner tree problems on a directed graph", 1984): sets of nodes that every tree must
leave are packed into the lengths. `grow` makes a tree along links that the packing has used up. On meshes the two
differ by a percent or so.
"""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Int
from numba import njit

USED_UP = 1e-12  # what is left of a length of 1 / links or so
PREFER_SHORT = 1e-3  # among links that are used up
STEEP = 20.0  # a link loaded as the most loaded one is exp(20) times as long as an idle one
IDLE = 1e-6


class Links(NamedTuple):
    """Directed links in the order of where they begin, and an index of them in the order of where they end."""

    tail: Int[np.ndarray, " link"]
    head: Int[np.ndarray, " link"]
    leaving: Int[np.ndarray, " vertex+1"]  # of vertex v those from leaving[v] on
    entering: Int[np.ndarray, " vertex+1"]  # of vertex v into[entering[v]] and on
    into: Int[np.ndarray, " link"]


def links_of(ends: Int[np.ndarray, "link 2"]) -> tuple[Links, Int[np.ndarray, " link"]]:
    """The links of a network with these ends, and which of the given ones each is."""
    order = np.argsort(ends[:, 0], kind="stable")
    tail, head = np.ascontiguousarray(ends[order].T.astype(np.int64))
    into, vertices = np.argsort(head, kind="stable"), np.arange(ends.max() + 2)
    return Links(tail, head, np.searchsorted(tail, vertices), np.searchsorted(head[into], vertices), into), order


# `no_type_check` keeps run-time type checkers from wrapping what numba compiles. In all of it `visited` is [vertex],
# `length` [link].


@njit(cache=True)
@no_type_check
def ascend(links, visited, length, left, cover):
    """No tree is shorter than this, wherever its home is.

    A set of vertices with a visited one and without the home must be left by a link of the tree. So weights of sets
    such that no link leaves more weight than its length add up to a bound, but for the sets with the home in them, at
    most the weight of those with any one vertex. `left` is what is left of the lengths, `cover` that weight by vertex.
    """
    left[:] = length
    cover[:] = 0.0
    begin = np.nonzero(visited)[0]
    size = np.ones(len(begin), np.int64)  # of the set around each visited vertex, when last looked at; 0 is done
    mark, inside, out = np.zeros(len(cover), np.int64), np.empty(len(cover), np.int64), np.empty(len(length), np.int64)
    total, stamp = 0.0, 0
    while len(begin) > 1:
        smallest = -1
        for i in range(len(begin)):
            if size[i] > 0 and (smallest < 0 or size[i] < size[smallest]):
                smallest = i
        if smallest < 0:
            break
        stamp += 1
        count, met = _reach(links, visited, left, begin[smallest], mark, stamp, inside)
        if met == len(begin):
            size[smallest] = 0
            continue
        if count > size[smallest]:  # has grown by other sets: another may be smaller now
            size[smallest] = count
            continue
        leaving, least = 0, np.inf
        for i in range(count):
            for link in range(links.leaving[inside[i]], links.leaving[inside[i] + 1]):
                if mark[links.head[link]] != stamp:
                    out[leaving] = link
                    leaving += 1
                    least = min(least, left[link])
        if leaving == 0:  # no way out: no tree at all, and nothing to bound
            size[smallest] = 0
            continue
        total += least
        for i in range(count):
            cover[inside[i]] += least
        for i in range(leaving):
            left[out[i]] -= least
    return total - cover.max()


@njit(cache=True)
@no_type_check
def _reach(links, visited, left, start, mark, stamp, inside):
    """Mark what is reached over links that are used up: how many vertices, and how many visited ones."""
    mark[start], inside[0] = stamp, start
    count, met, at = 1, 0, 0
    while at < count:
        vertex = inside[at]
        at += 1
        met += visited[vertex]
        for link in range(links.leaving[vertex], links.leaving[vertex + 1]):
            if left[link] <= USED_UP and mark[links.head[link]] != stamp:
                mark[links.head[link]] = stamp
                inside[count] = links.head[link]
                count += 1
    return count, met


@njit(cache=True)
@no_type_check
def grow(links, visited, length, left, cover, delay, tree):
    """A tree after `ascend`: puts its links into `tree`; their number, and the largest sum of `delay` along a path."""
    vertices = len(visited)
    home = _any_largest(cover)
    joined, wait = np.zeros(vertices, np.bool_), np.zeros(vertices)
    joined[home] = True
    missing = visited.sum() - visited[home]
    far, via, done = np.empty(vertices), np.empty(vertices, np.int64), np.empty(vertices, np.bool_)
    count = 0
    while missing > 0:
        for vertex in range(vertices):
            far[vertex] = 0.0 if joined[vertex] else np.inf
            done[vertex] = False
        while True:  # the nearest vertex that is missing
            near = -1
            for vertex in range(vertices):
                if not done[vertex] and far[vertex] < np.inf and (near < 0 or far[vertex] < far[near]):
                    near = vertex
            if near < 0:
                return -1, np.inf
            if visited[near] and not joined[near]:
                break
            done[near] = True
            for i in range(links.entering[near], links.entering[near + 1]):
                link = links.into[i]
                away = far[near] + left[link] + PREFER_SHORT * length[link] + USED_UP
                if away < far[links.tail[link]]:
                    far[links.tail[link]], via[links.tail[link]] = away, link
        first = count
        while not joined[near]:
            tree[count] = via[near]
            joined[near] = True
            missing -= visited[near]
            near = links.head[via[near]]
            count += 1
        for i in range(count - 1, first - 1, -1):
            wait[links.tail[tree[i]]] = wait[links.head[tree[i]]] + delay[tree[i]]
    return count, wait.max()


@njit(cache=True)
@no_type_check
def _any_largest(values):
    """One of the largest entries, by chance."""
    largest, seen, chosen = values.max(), 0, 0
    for i in range(len(values)):
        if values[i] >= largest * (1 - 1e-9):
            seen += 1
            if np.random.randint(seen) == 0:
                chosen = i
    return chosen


@njit(cache=True)
@no_type_check
def lengths_of(links, sets, length):
    """The bound of `ascend` for every set of visited vertices, [set]."""
    left, cover, bounds = np.empty(len(length)), np.empty(sets.shape[1]), np.empty(len(sets))
    for s in range(len(sets)):
        bounds[s] = ascend(links, sets[s], length, left, cover)
    return bounds


@njit(cache=True)
@no_type_check
def shortest(links, sets, weight, length, seed):
    """How often short trees of all sets use every link, [link]."""
    np.random.seed(seed)
    left, cover, none = np.empty(len(length)), np.empty(sets.shape[1]), np.zeros(len(length))
    tree, load = np.empty(sets.shape[1], np.int64), np.zeros(len(length))
    for s in range(len(sets)):
        ascend(links, sets[s], length, left, cover)
        count, _ = grow(links, sets[s], length, left, cover, none, tree)
        for i in range(count):
            load[tree[i]] += weight[s]
    return load


@njit(cache=True)
@no_type_check
def spread(links, sets, weight, rate, delay, passes, seed):
    """One tree for every set, each in turn along the links least loaded so far, over again in every further pass.

    Returns the loads over rates of the most loaded link, and the largest sum of `delay` along a path of any tree.
    """
    np.random.seed(seed)
    left, cover = np.empty(len(rate)), np.empty(sets.shape[1])
    trees, count = np.empty((len(sets), sets.shape[1]), np.int64), np.zeros(len(sets), np.int64)
    wait, load, length = np.zeros(len(sets)), np.zeros(len(rate)), np.empty(len(rate))
    for _ in range(passes):
        for s in range(len(sets)):
            for i in range(count[s]):
                load[trees[s, i]] -= weight[s]
            most = max((load / rate).max(), 1e-300)
            for link in range(len(rate)):
                length[link] = (np.exp(STEEP * (load[link] / rate[link] / most - 1)) + IDLE) / rate[link]
            ascend(links, sets[s], length, left, cover)
            count[s], wait[s] = grow(links, sets[s], length, left, cover, delay, trees[s])
            for i in range(count[s]):
                load[trees[s, i]] += weight[s]
    return (load / rate).max(), wait.max()
