"""Vectors added up on their way to a home, or copied on their way from it, by the routers of a tree of links.

The tree of a token is the union of the paths from the nodes that it visits to its home. A vector passes it chunk by
chunk: a router sends a chunk over a link when it has that chunk from all links by which paths come to this one, and
from its own node if that is visited. So every link carries every chunk once.

Besides links, a tree has an entry at every visited node but the home, its injection port, and an exit at the home, its
ejection port. Dispatch is the mirror, a multicast: it comes in through the injection port of the exit, and leaves
through the ejection ports of the entries. Where a machine has no such ports, entries and exits take no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.fabric import Fabric, FabricPaths, rows_by
from jaxmoe.des.tasks import Transfers, chunk_sizes
from jaxmoe.placement.exchange import ExchangeError

LINK, ENTRY, EXIT = range(3)


@dataclass(frozen=True)
class TreeSteps:
    """Steps of a chunk through the trees of all tokens, each a link, an entry or an exit, and the order among them.

    Step `then[i]` comes right after step `before[i]`.
    """

    token: Int[np.ndarray, " step"]
    kind: Int[np.ndarray, " step"]
    at: Int[np.ndarray, " step"]  # link, or node of an entry or exit
    before: Int[np.ndarray, " pair"]
    then: Int[np.ndarray, " pair"]


class TokenTrees(NamedTuple):
    """Trees of tokens along the paths from the nodes that they visit to their homes."""

    paths: FabricPaths
    visited: Bool[np.ndarray, "token node"]
    home: Int[np.ndarray, " token"]


def tree_transfers(fabric: Fabric, trees: Sequence[TokenTrees], size: float, mirrored: bool) -> Transfers:
    """Parts of vectors, `size` B along each of the `trees`, one token after the other and chunk by chunk.

    Raises `ExchangeError` where paths to a node lead in a circle.
    """
    steps = _side_by_side([_tree_steps(each, fabric.num_links) for each in trees])
    steps = _sorted_steps(steps, mirrored, longest=fabric.num_links + 2)
    return _chunk_by_chunk(fabric, steps, np.array(chunk_sizes(size, fabric.chunk_bytes)), mirrored)


def _tree_steps(trees: TokenTrees, num_links: int) -> TreeSteps:
    """The steps of vectors on their way to the homes of their tokens: first entries, then exits, then links."""
    home = trees.home
    token, node = np.nonzero(trees.visited & (home[:, None] != np.arange(trees.visited.shape[1])))
    rows, sent = trees.paths.between(node, home[token]), np.unique(token)
    vectors, first_link = len(token), len(token) + len(sent)
    # A link is one step of a token's tree, however many of its paths lead over it.
    links, link_of = np.unique(token[rows.owner] * num_links + rows.items, return_inverse=True)
    hop = first_link + link_of
    first, last = rows.start[:-1], rows.start[1:] - 1
    onward = np.setdiff1d(np.arange(len(hop)), last)
    before = np.concatenate([np.arange(vectors), hop[onward], hop[last]])
    then = np.concatenate([hop[first], hop[onward + 1], vectors + np.searchsorted(sent, token)])
    before, then = np.unique(np.stack([before, then]), axis=1)
    return TreeSteps(
        token=np.concatenate([token, sent, links // num_links]),
        kind=np.repeat([ENTRY, EXIT, LINK], [vectors, len(sent), len(links)]),
        at=np.concatenate([node, home[sent], links % num_links]),
        before=before,
        then=then,
    )


def _side_by_side(parts: Sequence[TreeSteps]) -> TreeSteps:
    """Join the steps of several trees of every token in one set of steps."""
    first = np.cumsum([0, *(len(part.token) for part in parts[:-1])])
    return TreeSteps(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("token", "kind", "at")),
        *(
            np.concatenate([start + getattr(part, name) for start, part in zip(first, parts, strict=True)])
            for name in ("before", "then")
        ),
    )


def _sorted_steps(steps: TreeSteps, mirrored: bool, longest: int) -> TreeSteps:
    """Sort steps by token, and those of a token so that every step comes after those it waits for.

    `longest` is the most steps that a path can have. Raises `ExchangeError` where paths lead in a circle.
    """
    before, then = (steps.then, steps.before) if mirrored else (steps.before, steps.then)
    depth, settled = np.zeros(len(steps.token), np.int64), False
    while not settled:
        known = depth.copy()
        np.maximum.at(depth, then, known[before] + 1)
        settled = bool((depth == known).all())
        if depth.max(initial=0) > longest:
            raise ExchangeError("paths to one node lead in a circle, which no tree does; use the unicast of this home")
    order = np.lexsort((depth, steps.token))
    place = np.argsort(order)
    return TreeSteps(steps.token[order], steps.kind[order], steps.at[order], place[before], place[then])


def _chunk_by_chunk(fabric: Fabric, steps: TreeSteps, sizes: Float[np.ndarray, " chunk"], mirrored: bool) -> Transfers:
    """A transfer for every chunk and step, of one token before the next."""
    count = np.bincount(steps.token)[steps.token]
    first = np.searchsorted(steps.token, steps.token)
    step, chunk = np.indices((len(steps.token), len(sizes)))
    number = first * (len(sizes) - 1) + np.arange(len(steps.token))  # of a step's first chunk
    task = number[step] + chunk * count[step]  # [step, chunk]
    step_of, chunk_of = (np.empty(task.size, np.int64) for _ in range(2))
    step_of[task.ravel()], chunk_of[task.ravel()] = step.ravel(), chunk.ravel()
    begins, ends = (EXIT, ENTRY) if mirrored else (ENTRY, EXIT)
    link = fabric.opposite[steps.at % fabric.num_links] if mirrored else steps.at
    server = np.where(steps.kind == LINK, link, -1)
    for kind, port in ((begins, fabric.injection), (ends, fabric.ejection)):
        if port is not None:
            server = np.where(steps.kind == kind, port + steps.at, server)
    server = server[step_of]
    return Transfers(
        paths=rows_by(np.flatnonzero(server >= 0), server[server >= 0], len(server)),
        size=sizes[chunk_of],
        sender=np.where(steps.kind == begins, steps.at, -1)[step_of],
        receiver=np.where(steps.kind == ends, steps.at, -1)[step_of],
        after=rows_by(task[steps.then].ravel(), task[steps.before].ravel(), task.size),
    )
