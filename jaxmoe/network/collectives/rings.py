"""Reduce-scatter, all-gather and all-reduce round rings, one ring or several equal ones at once.

Each of the R members of a ring has a buffer of `size` bytes, cut in R parts. In every one of R - 1 rounds all
members send one part to the next. That is the textbook time, (R - 1) (size / R / bandwidth + latency), and
hd_moe Eq. 4 is its limit of many nodes without latency. With `bidirectional` half of every part goes round the
other way at the same time; a ring of two has but one way.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.network.collectives.rounds import Rounds

Order = Int[np.ndarray | Array, "*rings place"]  # nodes in the order of their ring, [place] or [ring, place]
Size = Float[Array, "*#rings"] | float  # B; one number, or one for each ring


def ring_reduce_scatter(orders: Order, size: Size, num_nodes: int, bidirectional: bool = False) -> Rounds:
    """Every member ends with the sum of one part of all buffers of its ring."""
    members, ways = orders.shape[-1], ring_ways(orders, bidirectional)
    part = jnp.asarray(size, float)[..., None] / (members * len(ways))
    traffic = jnp.zeros((1, num_nodes, num_nodes), part.dtype)
    for sender, receiver in ways:
        traffic = traffic.at[0, sender, receiver].add(part)
    return Rounds(traffic, jnp.full(1, members - 1, part.dtype))


def ring_all_gather(orders: Order, size: Size, num_nodes: int, bidirectional: bool = False) -> Rounds:
    """Every member starts with one part of the buffer, and ends with all: the same messages as reduce-scatter."""
    return ring_reduce_scatter(orders, size, num_nodes, bidirectional)


def ring_all_reduce(orders: Order, size: Size, num_nodes: int, bidirectional: bool = False) -> Rounds:
    """Reduce-scatter, then all-gather: every member ends with the sum of all buffers of its ring."""
    return twice(ring_reduce_scatter(orders, size, num_nodes, bidirectional))


def twice(rounds: Rounds) -> Rounds:
    """All rounds once more: an all-gather sends what a reduce-scatter sends."""
    return Rounds(rounds.traffic, 2 * rounds.repeats)


def ring_ways(orders: Order, bidirectional: bool) -> list[tuple[Order, Order]]:
    """Senders and receivers of a step, upwards and, if it is another way, downwards."""
    members = orders.shape[-1]
    onwards = (orders, orders[..., np.arange(1, members + 1) % members])
    return [onwards, onwards[::-1]] if bidirectional and members > 2 else [onwards]
