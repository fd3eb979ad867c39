"""Exchanges as the simulator carries them out, with equal groups of nodes and the rings inside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.fabric import Fabric, FabricPaths, rows_by
from jaxmoe.des.tasks import Transfers, messages, ring_steps
from jaxmoe.des.trees import TokenTrees, tree_transfers
from jaxmoe.hardware.cuts import ring_order
from jaxmoe.placement.exchange import (
    GATHERS,
    LEAST_CONGESTED,
    PRICED,
    RINGS,
    RINGS_IN_GROUPS,
    TWO_LEVELS,
    Exchange,
    ExchangeError,
    Gather,
    LeastCongested,
    ReduceScatter,
    Rings,
    Route,
    exchange_of,
)
from jaxmoe.registry import Registry


@dataclass(frozen=True)
class RingGroups:
    """The nodes of every group, by place and in the order of its ring."""

    members: Int[np.ndarray, "group place"]
    rings: Int[np.ndarray, "group place"]


def ring_groups(exchange: Rings, fabric: Fabric) -> RingGroups:
    """Rectangles of a mesh, or else groups of successive nodes. Rings are of neighbours where rectangles have such.

    Raises `ExchangeError` for groups that the network cannot be cut into, naming those that it can.
    """
    shape = fabric.mesh_shape
    if exchange.count > 1 and len(exchange.groups) == 1:
        members = _successive(exchange, fabric.num_nodes)
        return RingGroups(members, members)
    if shape is None:
        if exchange.count > 1:
            raise ExchangeError(
                f"exchange {exchange.name} cuts a mesh into rectangles, and this machine is no mesh; use "
                f"{Rings((exchange.count,), exchange.both_ways, exchange.between).name} for groups of successive nodes"
            )
        members = np.arange(fabric.num_nodes)[None]
        return RingGroups(members, members)
    members = _rectangles(exchange, shape)
    return RingGroups(members, np.stack([ring_order(shape, nodes) for nodes in members]))


def _successive(exchange: Rings, nodes: int) -> Int[np.ndarray, "group place"]:
    if nodes % exchange.count:
        raise ExchangeError(
            f"exchange {exchange.name} makes {exchange.count} equal groups of {nodes} nodes, which cannot be; "
            f"use {_divisors(nodes)} groups"
        )
    return np.arange(nodes).reshape(exchange.count, -1)


def _rectangles(exchange: Rings, shape: tuple[int, int]) -> Int[np.ndarray, "group place"]:
    along_x, along_y = exchange.groups if len(exchange.groups) == 2 else (1, 1)
    x, y = shape
    if x % along_x or y % along_y:
        raise ExchangeError(
            f"exchange {exchange.name} cuts a {x}x{y} mesh into {along_x}x{along_y} equal rectangles, which cannot be; "
            f"use {_divisors(x)} along x and {_divisors(y)} along y"
        )
    nodes = np.arange(x * y).reshape(along_x, x // along_x, along_y, y // along_y)
    return nodes.swapaxes(1, 2).reshape(along_x * along_y, -1)


def _divisors(number: int) -> str:
    *most, last = [str(size) for size in range(1, number + 1) if number % size == 0]
    return f"{', '.join(most)} or {last}" if most else last


# The exchanges carried out: which transfers dispatch and combine of a batch consist of. A user's own is a function of
# the same arguments and result as `stage_transfers`; `phases` lays out its messages.
#
# Combine is the way described; dispatch is its mirror: the same messages sent back over the same links reversed
# (hd_moe IV-C1). A stage is a list of transfers one after the other, with a barrier over all nodes between them.

Visited = Bool[np.ndarray, "token node"]
Messages = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Source, destination and size of messages, in the order in which they are sent."""


SIMULATED: Registry[Callable[..., list[Transfers]]] = Registry(
    "simulated exchange",
    "jaxmoe.simulated_exchanges",
    dict.fromkeys(GATHERS, "jaxmoe.des.exchanges:gather")
    | dict.fromkeys(LEAST_CONGESTED, "jaxmoe.des.congested:least_congested")
    | dict.fromkeys(PRICED, "jaxmoe.des.priced:priced")
    | {"reduce_scatter": "jaxmoe.des.exchanges:reduce_scatter"}
    | dict.fromkeys((*RINGS, *RINGS_IN_GROUPS), "jaxmoe.des.exchanges:rings")
    | {TWO_LEVELS: "jaxmoe.des.exchanges:two_level"},
)


def check_exchange(exchange: Exchange, fabric: Fabric) -> None:
    """Raise `ExchangeError` for one that the simulator cannot carry out on the network, with the remedy."""
    _carrier(exchange)
    if isinstance(exchange, Rings):
        ring_groups(exchange, fabric)
    if isinstance(exchange, Gather) and exchange.route != "unicast":
        _trees(exchange, fabric)


def stage_transfers(
    exchange: Exchange,
    fabric: Fabric,
    visited: Visited,
    home: Int[np.ndarray, " token"],
    size: float,
    mirrored: bool,
    draw: Float[np.ndarray, " token"] | None = None,
) -> list[Transfers]:
    """The transfers of combine or, `mirrored`, of dispatch, for vectors of `size` B.

    `home` is where a gather brings a token's results together, and where the token lives under other exchanges. `draw`
    are the draws of tokens; a function that carries out an exchange gets them too if it has the attribute `draws`.
    """
    carrier = _carrier(exchange)
    drawn = (draw,) if getattr(carrier, "draws", False) else ()
    parts = carrier(exchange, fabric, visited, home, size, mirrored, *drawn)
    return [part for part in parts if len(part)]


def deciding_transfers(
    exchange: Exchange, fabric: Fabric, visited: Visited, home: Int[np.ndarray, " token"]
) -> list[Transfers]:
    """The transfers before dispatch by which nodes decide: those of the attribute `deciding` of who carries it out."""
    asked = getattr(_carrier(exchange), "deciding", None)
    return [] if asked is None else [part for part in asked(exchange, fabric, visited, home) if len(part)]


def choices_in_turn(exchange: Exchange, tokens: int) -> int | None:
    """How many choices so many tokens take one after another; `None` where none has to know of others.

    Of a user's own exchange it is the attribute `choices_in_turn`, if any, of who carries it out.
    """
    match exchange:
        case Gather(home="least_loaded"):
            return tokens
        case LeastCongested(at_once=together):
            return len(range(0, tokens, together))
    own = getattr(_carrier(exchange), "choices_in_turn", None)
    return None if own is None else own(exchange, tokens)


def told_transfers(fabric: Fabric, lives: Int[np.ndarray, " token"], size: float) -> Transfers:
    """From where each token lives a multicast of `size` B to all other nodes, along the tree of paths."""
    everywhere = np.ones((len(lives), fabric.num_nodes), bool)
    return tree_transfers(fabric, [TokenTrees(fabric.routes, everywhere, lives)], size, mirrored=True)


def _carrier(exchange: Exchange) -> Callable[..., list[Transfers]]:
    exchange_of(exchange.name)  # raises where there is none
    if exchange.name not in SIMULATED:
        raise ExchangeError(
            f"exchange {exchange.name} cannot be replayed, since nothing says how the simulator carries it out; "
            f"register a function in jaxmoe.des.exchanges.SIMULATED, or by an entry point {SIMULATED.group!r}"
        )
    return SIMULATED[exchange.name]


def phases(fabric: Fabric, sent: Sequence[Messages], mirrored: bool) -> list[Transfers]:
    """Messages of combine, phase by phase with barriers between, as transfers; `mirrored`, the last one comes first."""
    parts = [_laid(fabric, messages, mirrored) for messages in sent]
    return parts[::-1] if mirrored else parts


def gather(exchange: Gather, fabric: Fabric, visited: Visited, home: np.ndarray, size: float, mirrored: bool):
    """Every visited node sends one message to the home, or adds to its tree."""
    if exchange.route == "unicast":
        return phases(fabric, [_gather(visited, home, size)], mirrored)
    trees = [TokenTrees(paths, visited, home) for paths in _trees(exchange, fabric)]
    return [tree_transfers(fabric, trees, size / len(trees), mirrored)]


def reduce_scatter(
    exchange: ReduceScatter, fabric: Fabric, visited: Visited, home: np.ndarray, size: float, mirrored: bool
):
    """Every visited node sends each other one its part."""
    return phases(fabric, [_reduce_scatter(visited, size)], mirrored)


def _laid(fabric: Fabric, sent: Messages, mirrored: bool) -> Transfers:
    source, destination, size = sent
    if mirrored:
        return messages(fabric.mirrored, destination, source, size)
    return messages(fabric.paths, source, destination, size)


def _gather(visited: Visited, home: Int[np.ndarray, " token"], size: float) -> Messages:
    """Every visited node sends one message to the token's home: token by token, then node by node."""
    token, node = np.nonzero(visited)
    away = node != home[token]
    return node[away], home[token[away]], np.full(away.sum(), float(size))


def _trees(exchange: Gather, fabric: Fabric) -> list[FabricPaths]:
    """The paths of which trees are the unions; each tree has an equal part of every vector."""
    if exchange.route != "tree" and fabric.crossed is None:
        raise ExchangeError(
            f"exchange {exchange.name} needs a mesh, whose paths may go along x or y first; "
            f"use {Gather(exchange.home, 'tree').name} on this machine"
        )
    crossed = [] if fabric.crossed is None else [fabric.crossed]
    trees: dict[Route, list[FabricPaths]] = {
        "tree": [fabric.routes],
        "cross_tree": crossed,
        "split_tree": [fabric.routes, *crossed],
    }
    return trees[exchange.route]


def _reduce_scatter(visited: Visited, size: float) -> Messages:
    """Every visited node sends each other one its part: token by token, first to the next one in number."""
    token, node = np.nonzero(visited)
    count = visited.sum(axis=1)[token]  # nodes that the token of a visit visits
    first = np.searchsorted(token, token)
    sender = np.repeat(np.arange(len(token)), count - 1)
    turn = np.concatenate([np.arange(1, others) for others in count.tolist()] or [np.zeros(0, np.int64)])
    receiver = first[sender] + (sender - first[sender] + turn) % count[sender]
    return node[sender], node[receiver], size / count[sender]


def rings(exchange: Rings, fabric: Fabric, visited: Visited, home: np.ndarray, size: float, mirrored: bool):
    """Rings inside groups, then messages between groups; the mirror begins with the latter."""
    groups = ring_groups(exchange, fabric)
    visiting = np.asarray(visited[:, groups.members].any(axis=2))  # [token, group]
    sends = [(np.zeros(0), *ring_steps((), 0))]  # size, source, destination, awaited
    first = 0
    for ring, vectors in zip(groups.rings.tolist(), visiting.sum(axis=0).tolist(), strict=True):
        # The mirror of a reduce-scatter is an all-gather that goes round the other way.
        order = ring[::-1] if mirrored else ring
        ways = [order, order[::-1]] if exchange.both_ways and len(ring) > 2 else [order]
        for way in ways if vectors else []:
            steps = ring_steps(way, len(way) - 1, first)
            sends.append((np.full(len(steps[0]), vectors * size / len(ring) / len(ways)), *steps))
            first += len(steps[0])
    amount, source, destination, awaited = (np.concatenate(column) for column in zip(*sends, strict=True))
    laid = messages(fabric.mirrored if mirrored else fabric.paths, source, destination, amount)
    waits = np.flatnonzero(awaited >= 0)
    parts = [replace(laid, after=rows_by(waits, awaited[waits], len(laid)))]
    if exchange.between:
        parts.append(_laid(fabric, _between(groups.members, visiting, size), mirrored))
    return parts[::-1] if mirrored else parts


def _between(
    members: Int[np.ndarray, "group place"], visiting: Bool[np.ndarray, "token group"], size: float
) -> Messages:
    """Every node sends to those of its place in other groups, first in the next group, parts of common tokens."""
    groups, places = members.shape
    common = np.zeros((groups, groups))
    for seen in visiting[visiting.any(axis=1)]:
        common += np.outer(seen, seen) / seen.sum()
    group, place, turn = (index.ravel() for index in np.indices((groups, places, groups - 1)))
    other = (group + turn + 1) % groups
    amount = common[group, other] * size / places
    sent = amount > 0
    return members[group, place][sent], members[other, place][sent], amount[sent]


def two_level(
    exchange: Exchange,
    fabric: Fabric,
    visited: Bool[np.ndarray, "token node"],
    home: Int[np.ndarray, " token"],
    size: float,
    mirrored: bool,
) -> list[Transfers]:
    """Visited nodes send to the node of the home's place in their group, and these send one message to the home."""
    nodes = fabric.num_nodes // int(exchange.name.rsplit("_", 1)[1])  # of a group
    token, node = np.nonzero(visited)
    meeting = node - node % nodes + home[token] % nodes
    inside = node != meeting
    # Of each token and group one message, if its home is in another group.
    met = np.unique(np.stack([token, meeting], axis=1), axis=0)
    met = met[met[:, 1] != home[met[:, 0]]]
    sent = [
        (node[inside], meeting[inside], np.full(int(inside.sum()), float(size))),
        (met[:, 1], home[met[:, 0]], np.full(len(met), float(size))),
    ]
    return phases(fabric, sent, mirrored)
