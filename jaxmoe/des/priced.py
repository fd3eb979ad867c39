"""Priced exchanges in the simulator: token by token, each way by the sum of the prices of its links.

An independent witness of `jaxmoe.network.priced`: it shares the rule and the table with it, and no formula. Links of a
tree are listed one by one.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.fabric import Fabric, FabricPaths
from jaxmoe.des.tasks import Transfers
from jaxmoe.des.trees import TokenTrees, tree_transfers
from jaxmoe.placement.exchange import HALVES, ExchangeError, PricedLinks

Visited = Bool[np.ndarray, "token node"]
Halves = Int[np.ndarray, "half token"]


def priced(
    exchange: PricedLinks,
    fabric: Fabric,
    visited: Visited,
    home: Int[np.ndarray, " token"],
    size: float,
    mirrored: bool,
    draw: Float[np.ndarray, " token"],
) -> list[Transfers]:
    """The transfers of combine or, `mirrored`, of dispatch; `home` is where tokens live, `draw` is in [0, 1)."""
    meeting, route = drawn_ways(exchange, fabric, visited, home, draw)
    trees = [
        TokenTrees(paths, visited & (route[half] == number)[:, None], meeting[half])
        for half in range(HALVES)
        for number, paths in enumerate(_routes(fabric))
    ]
    return [tree_transfers(fabric, trees, size / HALVES, mirrored)]


priced.draws = True  # type: ignore[attr-defined]  # asks for the draws of tokens


def drawn_ways(
    exchange: PricedLinks,
    fabric: Fabric,
    visited: Visited,
    home: Int[np.ndarray, " token"],
    draw: Float[np.ndarray, " token"],
) -> tuple[Halves, Halves]:
    """Where each half of a token's vector meets, and the number of the route that leads there."""
    price = np.array(exchange.price or [1.0] * fabric.num_links)
    if len(price) != fabric.num_links:
        raise ExchangeError(
            f"exchange {exchange.name} has prices of {len(price)} links, but the machine has {fabric.num_links}; "
            "use a table that was fitted for this machine"
        )
    meeting, route = (np.zeros((HALVES, len(visited)), np.int64) for _ in range(2))
    paths = [_links(each) for each in _routes(fabric)]
    for token in np.flatnonzero(visited.any(axis=1)):
        sources = np.flatnonzero(visited[token])
        able = {"any": range(fabric.num_nodes), "visited": sources, "token_home": home[[token]]}[exchange.meeting]
        ways = [(number, int(node)) for number in range(len(paths)) for node in able]
        costs = []
        for number, node in ways:
            links = [paths[number][source][node] for source in sources]
            costs.append(price[np.unique(np.concatenate(links))].sum())
        chance = np.exp((min(costs) - np.array(costs)) / exchange.softness)
        reached = np.cumsum(chance) / chance.sum()
        for half in range(HALVES):
            number = (draw[token] + half / HALVES) % 1
            route[half, token], meeting[half, token] = ways[np.searchsorted(reached[:-1], number, side="right")]
    return meeting, route


def _routes(fabric: Fabric) -> list[FabricPaths]:
    return [fabric.routes] if fabric.crossed is None else [fabric.routes, fabric.crossed]


def _links(paths: FabricPaths) -> list[list[Int[np.ndarray, " hop"]]]:
    """The links of the path from every node to every node."""
    nodes, start = paths.num_nodes, paths.rows.start
    rows = [paths.rows.items[start[pair] : start[pair + 1]] for pair in range(nodes**2)]
    return [rows[source * nodes : (source + 1) * nodes] for source in range(nodes)]
