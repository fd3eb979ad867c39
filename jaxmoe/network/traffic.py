"""What a stage of communication sends, and how long the parts of the network take over it."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.relax import AbstractReduction


class Flows(eqx.Module):
    """Traffic as a sum of flows: flow f sends source[f, n] * destination[f, m] messages from n to m.

    A message is of `vectors` hidden vectors, one number or one for each flow. Rows of `destination` sum to 1.
    What a node sends itself is free. The flows run `rounds` times, one after the other.

    A `tree` (or `cross_tree`, along the other order of directions) is the union of the paths of a flow to its one
    destination; routers add up what they pass on, so a link carries one message of each flow. There `source` is 1
    where a message starts, and the flow stands for `weight` such trees. Where a flow has several destinations,
    `messages` says how many run from node to node, and so which paths are used. Flows of one `chain` wait for each
    other round by round, so their delays add up along all of it but the quickest step.
    """

    source: Float[Array, "flow node"]
    destination: Float[Array, "flow node"]
    vectors: Float[Array, ""] | Float[Array, " flow"]
    weight: Float[Array, " flow"] | None = None
    messages: Float[Array, "node node2"] | None = None
    chain: Int[Array, " flow"] | None = None
    rounds: Float[Array, ""] | int = 1
    route: Literal["unicast", "tree", "cross_tree"] = eqx.field(static=True, default="unicast")

    def traffic(self, vector_bytes: Float[Array, ""]) -> Float[Array, "node node2"]:
        """Bytes of one round, [source, destination]; those of a tree as if they were unicasts."""
        sent = self.source if self.weight is None else self.source * self.weight[:, None]
        return (sent * self.vectors[..., None] * vector_bytes).T @ self.destination


Phases = tuple[tuple[Flows, ...], ...]
"""A stage: phases one after the other, each of flows that run at once."""


class StageTime(eqx.Module):
    """How long one stage keeps each resource, s. A time model fills in what it knows of, and leaves the rest empty."""

    link_time: Float[Array, " link"]  # load over bandwidth
    port_time: Float[Array, " port"]  # ports that send, then ports that receive; empty without port limits
    pair_time: Float[Array, " pair"]  # messages of a pair of nodes as if they were alone
    path_delay: Float[Array, ""]  # delay of the longest path used, on top of all of these

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
        )
