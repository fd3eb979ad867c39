"""A collective as rounds of traffic, and how long it takes: a round begins when the one before it has ended."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.time_models import AbstractTimeModel
from jaxmoe.relax import AbstractReduction


class Rounds(eqx.Module):
    """Traffic of every round in B, [round, source, destination].

    Rounds that are equal may be given once, with their number in `repeats`, whatever comes between them.
    """

    traffic: Float[Array, "round node node2"]
    repeats: Float[Array, " round"]

    def then(self, other: "Rounds") -> "Rounds":
        """These rounds, and the others after them."""
        return jax.tree.map(lambda *both: jnp.concatenate(both), self, other)

    def total_traffic(self) -> Float[Array, "node node2"]:
        """Bytes of all rounds together."""
        return jnp.einsum("r,rsd->sd", self.repeats, self.traffic)


def all_to_all(traffic: Float[Array, "node node2"]) -> Rounds:
    """Everyone sends to everyone at once, traffic[s, d] bytes from s to d; the diagonal is free."""
    return Rounds(traffic[None], jnp.ones(1, traffic.dtype))


def collective_time(
    time_model: AbstractTimeModel, topology: AbstractTopology, rounds: Rounds, reduction: AbstractReduction
) -> Float[Array, ""]:
    """Seconds of all rounds, one after the other, each as the time model has it."""
    seconds = jax.vmap(lambda traffic: time_model(topology, traffic).total(reduction))(rounds.traffic)
    return jnp.sum(rounds.repeats * seconds)
