"""Equal groups of nodes, and the rings inside them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxmoe.des.fabric import Fabric
from jaxmoe.hardware.cuts import ring_order
from jaxmoe.placement.exchange import ExchangeError, Rings


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
