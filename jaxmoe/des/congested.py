"""Least congested exchanges in the simulator: token by token, over the unions of paths themselves.

An independent witness of `jaxmoe.network.congested`: it shares the rule with it, and no formula. Links of a tree are
listed one by one, and prices are whole numbers of any size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.fabric import Fabric, FabricPaths
from jaxmoe.des.tasks import Transfers, messages
from jaxmoe.des.trees import TokenTrees, tree_transfers
from jaxmoe.placement.exchange import LEVELS, ROUNDING, LeastCongested

Visited = Bool[np.ndarray, "token node"]


class Chosen(NamedTuple):
    """Where every part of a token's vector meets, and the number of the route that leads there."""

    home: Int[np.ndarray, "part token"]
    route: Int[np.ndarray, "part token"]


def least_congested(
    exchange: LeastCongested,
    fabric: Fabric,
    visited: Visited,
    home: Int[np.ndarray, " token"],
    size: float,
    mirrored: bool,
) -> list[Transfers]:
    """The transfers of combine or, `mirrored`, of dispatch; `home` is where tokens live."""
    chosen = chosen_ways(exchange, fabric, visited, home)
    if exchange.route == "unicast":
        (meeting,) = chosen.home
        token, node = np.nonzero(visited & (meeting[:, None] != np.arange(fabric.num_nodes)))
        ends, sizes = (node, meeting[token]), np.full(len(token), float(size))
        return [messages(fabric.mirrored, *ends[::-1], sizes) if mirrored else messages(fabric.paths, *ends, sizes)]
    parts = [
        TokenTrees(paths, visited & (route == number)[:, None], meeting)
        for meeting, route in zip(*chosen, strict=True)
        for number, paths in enumerate(_routes(exchange, fabric))
    ]
    return [tree_transfers(fabric, parts, size / len(chosen.home), mirrored)]


def chosen_ways(exchange: LeastCongested, fabric: Fabric, visited: Visited, home: Int[np.ndarray, " token"]) -> Chosen:
    """Choices of tokens one after the other, so many at once."""
    tokens, nodes = visited.shape
    parts = 1 if exchange.route == "unicast" else 2
    rate = fabric.rate[: fabric.num_links]
    load, slowness = np.zeros(fabric.num_links, np.int64), rate.max() / rate
    chosen = Chosen(*(np.zeros((parts, tokens), np.int64) for _ in range(2)))
    used = [list(_links_used(paths, visited, fabric.num_links, exchange.route)) for paths in _routes(exchange, fabric)]
    for first in range(0, tokens, exchange.at_once):
        together = range(first, min(first + exchange.at_once, tokens))
        for part in range(parts):
            price, added = _prices(load, slowness), np.zeros_like(load)
            for token in together:
                able = _able(exchange, visited[token], int(home[token]))
                costs = np.stack([np.where(able, links[token] @ price, np.inf) for links in used])
                route, node = np.divmod(costs.argmin(), nodes)
                chosen.home[part, token], chosen.route[part, token] = node, route
                added += used[route][token][node]
            load += added
    return chosen


def _able(exchange: LeastCongested, visited: Bool[np.ndarray, " node"], home: int) -> Bool[np.ndarray, " node"]:
    """Nodes at which the results of a token may meet."""
    if exchange.meeting == "token_home":
        return np.arange(len(visited)) == home
    return visited if exchange.meeting == "visited" and visited.any() else np.ones_like(visited)


def _prices(load: Int[np.ndarray, " link"], slowness: Float[np.ndarray, " link"]) -> Int[np.ndarray, " link"]:
    busy = (load + 0.5) * slowness
    return 2 ** np.floor(LEVELS * busy / busy.max() + ROUNDING).astype(np.int64)


def _routes(exchange: LeastCongested, fabric: Fabric) -> Sequence[FabricPaths]:
    crossed = [] if fabric.crossed is None or exchange.route == "unicast" else [fabric.crossed]
    return [fabric.routes, *crossed]


def _links_used(
    paths: FabricPaths, visited: Visited, num_links: int, route: str
) -> Iterator[Int[np.ndarray, "node link"]]:
    """How many messages each link gets, token by token, if its results meet at each node: of a tree one at most."""
    nodes = paths.num_nodes
    flat = np.zeros((nodes**2, num_links), np.uint8)
    flat[paths.rows.owner, paths.rows.items] = 1
    on_path = flat.reshape(nodes, nodes, num_links)  # [source, destination, link]
    for there in visited:
        merge = np.maximum.reduce if route == "tree" else np.add.reduce
        yield merge(on_path[there], axis=0, initial=0, dtype=np.uint8 if route == "tree" else np.int64)
