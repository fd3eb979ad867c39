"""Messages of a stage of communication as flows or rounds, and how long they keep the parts of a network busy."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.relax import AbstractReduction, OneOf, as_weights


class Flows(eqx.Module):
    """Traffic as a sum of flows: flow f sends source[f, n] messages from n to its destination.

    That is one node, or all of them in parts that sum to 1: source[f, n] * destination[f, m] messages from n to m. A
    message is of `vectors` hidden vectors, one number or one for each flow. What a node sends itself is free. The
    flows run `rounds` times, one after the other.

    A `tree` (or `cross_tree`, along the other order of directions) is the union of the paths of a flow to its one
    destination; routers add up what they pass on, so a link carries one message of each flow. There `source` is 1
    where a message starts. A flow with a `weight` stands for so many alike. Where a flow has several destinations,
    `messages` says how many run from node to node, and so which paths are used. With a `chain` flow f, from one node,
    passes on in one round what flow chain[f] brought in the round before, and waits for no other; of such rounds there
    are fewer than nodes. Who has followed trees already may give what links carry as `carried`, in vectors times
    `vectors`, with its derivative; see `known_loads`. `loads` are there once a time model has worked them out.
    """

    source: Float[Array, "flow node"]
    destination: OneOf
    vectors: Float[Array, ""] | Float[Array, " flow"]
    weight: Float[Array, " flow"] | None = None
    messages: Float[Array, "node node2"] | None = None
    chain: Int[Array, " flow"] | None = None
    carried: Float[Array, " link"] | None = None
    loads: "FlowLoads | None" = None
    rounds: Float[Array, ""] | int = 1
    route: Literal["unicast", "tree", "cross_tree"] = eqx.field(static=True, default="unicast")

    def traffic(self, vector_bytes: Float[Array, ""]) -> Float[Array, "node node2"]:
        """Bytes of one round, [source, destination]; those of a tree as if they were unicasts."""
        sent = self.source if self.weight is None else self.source * self.weight[:, None]
        return (sent * self.vectors[..., None] * vector_bytes).T @ self.parts()

    def parts(self) -> Float[Array, "flow node"]:
        """The part of what a flow sends that goes to every node."""
        return as_weights(self.destination, self.source.shape[1], self.source.dtype)


class FlowLoads(eqx.Module):
    """Hidden vectors that flows bring to every link, and port where ports limit: the same whichever way they run."""

    link: Float[Array, " link"]
    sent: Float[Array, " node"] | None = None
    received: Float[Array, " node"] | None = None


Phases = tuple[tuple[Flows, ...], ...]
"""A stage: phases one after the other, each of flows that run at once."""


class Rounds(eqx.Module):
    """Traffic of every round in B, [round, source, destination].

    Rounds that are equal may be given once, with their number in `repeats`, whatever comes between them.
    """

    traffic: Float[Array, "round node node2"]
    repeats: Float[Array, " round"]

    def then(self, other: "Rounds") -> "Rounds":
        """These rounds, and the others after them."""
        return jax.tree.map(lambda *both: jnp.concatenate(both), self, other)


class StageTime(eqx.Module):
    """How long one stage keeps each resource, s. A time model fills in what it knows of, and leaves the rest empty.

    Bytes of links are there whatever the time model.
    """

    link_time: Float[Array, " link"]  # load over bandwidth
    port_time: Float[Array, " port"]  # ports that send, then ports that receive; empty without port limits
    pair_time: Float[Array, " pair"]  # messages of a pair of nodes as if they were alone
    path_delay: Float[Array, ""]  # delay of the longest path used, on top of all of these
    link_bytes: Float[Array, " link"]  # B that every link carries; no time

    def total(self, reduction: AbstractReduction) -> Float[Array, ""]:
        """Time of the stage, s."""
        return reduction(jnp.concatenate([self.link_time, self.port_time, self.pair_time])) + self.path_delay

    def beside(self, other: "StageTime") -> "StageTime":
        """Both at once: resources are busy for the sum, and the longest path is that of either."""
        return StageTime(
            self.link_time + other.link_time,
            self.port_time + other.port_time,
            self.pair_time + other.pair_time,
            jnp.maximum(self.path_delay, other.path_delay),
            self.link_bytes + other.link_bytes,
        )
