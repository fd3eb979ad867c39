"""Collectives as rounds of traffic and as time: all-to-all, rings, chunked broadcast."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.flows import Rounds
from jaxmoe.network.time_models import AbstractTimeModel
from jaxmoe.relax import AbstractReduction

# A collective as rounds of traffic, and how long it takes: a round begins when the one before it has ended.


def all_to_all(traffic: Float[Array, "node node2"]) -> Rounds:
    """Everyone sends to everyone at once, traffic[s, d] bytes from s to d; the diagonal is free."""
    return Rounds(traffic[None], jnp.ones(1, traffic.dtype))


class CollectiveTime(eqx.Module):
    """Seconds of a collective, s and B of its resources in all rounds together."""

    seconds: Float[Array, ""]
    link_time: Float[Array, " link"]
    port_time: Float[Array, " port"]
    link_bytes: Float[Array, " link"]
    pair_time: Float[Array, " pair"]
    path_delay: Float[Array, ""]


def price_rounds(
    time_model: AbstractTimeModel,
    topology: AbstractTopology,
    rounds: Rounds,
    reduction: AbstractReduction,
    mirrored: bool = False,
) -> CollectiveTime:
    """All rounds, one after the other, each as the time model has it.

    Mirrored, the rounds come in the opposite order and every message goes back over the same links reversed.
    """
    one_round = time_model.mirrored if mirrored else time_model
    stages = jax.vmap(lambda traffic: one_round(topology, traffic))(rounds.traffic)
    seconds = jax.vmap(lambda stage: stage.total(reduction))(stages)
    parts = (seconds, stages.link_time, stages.port_time, stages.link_bytes, stages.pair_time, stages.path_delay)
    return CollectiveTime(*(jnp.tensordot(rounds.repeats, part, 1) for part in parts))


# Reduce-scatter, all-gather and all-reduce round rings, one ring or several equal ones at once.
#
# Each of the R members of a ring has a buffer of `size` bytes, cut in R parts. In every one of R - 1 rounds all
# members send one part to the next. That is the textbook time, (R - 1) (size / R / bandwidth + latency), and hd_moe
# Eq. 4 is its limit of many nodes without latency. With `bidirectional` half of every part goes round the other way at
# the same time; a ring of two has but one way.

Order = Int[np.ndarray | Array, "*rings place"]  # nodes in the order of their ring, [place] or [ring, place]
Size = Float[Array, "*#rings"] | float  # B; one number, or one for each ring


@partial(jax.jit, static_argnames=("num_nodes", "bidirectional"))
def ring_reduce_scatter(orders: Order, size: Size, num_nodes: int, bidirectional: bool = False) -> Rounds:
    """Every member ends with the sum of one part of all buffers of its ring."""
    members, ways = orders.shape[-1], ring_ways(orders, bidirectional)
    part = jnp.asarray(size, float)[..., None] / (members * len(ways))
    traffic = jnp.zeros((1, num_nodes, num_nodes), part.dtype)
    for sender, receiver in ways:
        traffic = traffic.at[0, sender, receiver].add(part)
    return Rounds(traffic, jnp.full(1, members - 1, part.dtype))


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


# The pre-broadcast of an expert in chunks, as hd_moe IV-D2 has it: Eq. 14 to 18.


def _number(value: Float[Array, ""] | float) -> Float[Array, ""]:
    return jnp.asarray(value, float)


class ChunkedBroadcast(eqx.Module):
    """An expert of hidden x intermediate elements, sent to all of D nodes in chunks of c elements.

    `alpha` is the latency of a chunk and hop, s; `beta` is s per element; a chunk takes alpha + beta c for a hop.
    Chunks follow each other over 2 sqrt(D) hops, the way across a square mesh: all in all 2 sqrt(D) +
    hidden intermediate / c such times. A pipeline over that many hops takes one less, and the mesh is but
    2 (sqrt(D) - 1) hops wide, so Eq. 16 is three times of a chunk above the exact one.

    `iterations` is k, how many experts are broadcast within the runtime window. It stands in Eq. 17 and 18 but not
    in Eq. 14 and 15. Both are the least value of Eq. 16 and its place if beta k stands for beta in Eq. 15, as if k
    broadcasts shared every link while their latencies overlapped; so it is taken here. (Experts in one stream, with
    k hidden intermediate in both equations, have the time of Eq. 17 too, but their best chunk is k times that of
    Eq. 18.) With k = 1 all agree as printed. The paper counts hidden x intermediate elements of an expert, where a
    gated one has three times as many.
    """

    alpha: Float[Array, ""] = eqx.field(converter=_number)
    beta: Float[Array, ""] = eqx.field(converter=_number)
    nodes: Float[Array, ""] = eqx.field(converter=_number)
    hidden: Float[Array, ""] = eqx.field(converter=_number)
    intermediate: Float[Array, ""] = eqx.field(converter=_number)
    iterations: Float[Array, ""] = eqx.field(default=1.0, converter=_number)

    def latency(self, chunk: Float[Array, "*chunks"]) -> Float[Array, "*chunks"]:
        """Eq. 14, s, of chunks of so many elements."""
        return self.alpha * (2 * jnp.sqrt(self.nodes) + self._elements() / chunk)

    def bandwidth(self, chunk: Float[Array, "*chunks"]) -> Float[Array, "*chunks"]:
        """Eq. 15 with k, s."""
        return self.beta * self.iterations * (self._elements() + 2 * chunk * jnp.sqrt(self.nodes))

    def time(self, chunk: Float[Array, "*chunks"]) -> Float[Array, "*chunks"]:
        """Eq. 16, s."""
        return self.latency(chunk) + self.bandwidth(chunk)

    def least_time(self) -> Float[Array, ""]:
        """Eq. 17, s."""
        root, slow = jnp.sqrt(self.nodes), self.beta * self.iterations
        shared = jnp.sqrt(2 * root * slow * self.alpha * self._elements())
        return self._elements() * slow + 2 * self.alpha * root + 2 * shared

    def best_chunk(self) -> Float[Array, ""]:
        """Eq. 18, elements."""
        return jnp.sqrt(self.alpha * self._elements() / (2 * self.beta * self.iterations * jnp.sqrt(self.nodes)))

    def _elements(self) -> Float[Array, ""]:
        return self.hidden * self.intermediate
