"""What a stage of communication sends, and how long the parts of the network take over it."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.relax import AbstractReduction


class Flows(eqx.Module):
    """Traffic as a sum of flows: flow f sends source[f, n] * destination[f, m] messages from n to m.

    A message is of `vectors` hidden vectors, one number or one for each flow. Rows of `destination` sum to 1.
    What a node sends itself is free. A stage runs its flows `rounds` times, one after the other.
    """

    source: Float[Array, "flow node"]
    destination: Float[Array, "flow node"]
    vectors: Float[Array, ""] | Float[Array, " flow"]
    rounds: int = eqx.field(static=True, default=1)

    def traffic(self, vector_bytes: Float[Array, ""]) -> Float[Array, "node node2"]:
        """Bytes of one round, [source, destination]."""
        return (self.source * self.vectors[..., None] * vector_bytes).T @ self.destination


class StageTime(eqx.Module):
    """How long one stage keeps each resource, s. A time model fills in what it knows of, and leaves the rest empty."""

    link_time: Float[Array, " link"]  # load over bandwidth
    port_time: Float[Array, " port"]  # ports that send, then ports that receive; empty without port limits
    pair_time: Float[Array, " pair"]  # messages of a pair of nodes as if they were alone
    path_delay: Float[Array, ""]  # delay of the longest path used, on top of all of these

    def total(self, reduction: AbstractReduction) -> Float[Array, ""]:
        """Time of the stage, s."""
        return reduction(jnp.concatenate([self.link_time, self.port_time, self.pair_time])) + self.path_delay
