"""A gate that is biased: what it chooses from the logits of a router, and what of the gate's mass it keeps."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.relax import soft_top_k, straight_through
from jaxmoe.traces.batches import Batch

FULL = 1e4  # logits that an expert without room is put back by


def top_experts(
    logits: Float[Array, "token expert"], top_k: int, capacity: int | None = None
) -> Int[Array, "token top_k"]:
    """The K experts that every token chooses, the strongest first; of equal ones that of the lower number.

    With a `capacity` an expert takes so many tokens at most. Tokens choose one after the other, each among experts that
    have room, so none is dropped; where fewer than K have room, it takes full ones as well.
    """
    if capacity is None:
        return jax.lax.top_k(logits, top_k)[1].astype(jnp.int32)

    def choose(load: Int[Array, " expert"], given: Float[Array, " expert"]) -> tuple[Array, Array]:
        experts = jax.lax.top_k(jnp.where(load < capacity, given, given - FULL), top_k)[1].astype(jnp.int32)
        return load.at[experts].add(1), experts

    return jax.lax.scan(choose, jnp.zeros(logits.shape[1], jnp.int32), logits)[1]


def chosen_experts(
    logits: Float[Array, "token expert"], top_k: int, capacity: int | None = None
) -> Float[Array, "token expert"]:
    """1 for the K experts that every token chooses, 0 for all others."""
    rows, experts = jnp.arange(len(logits))[:, None], top_experts(logits, top_k, capacity)
    return jnp.zeros_like(logits).at[rows, experts].set(1)


def biased(
    logits: Float[Array, "*lead token expert"],
    bias: Float[Array, "*lead node expert"],
    source: Int[Array, " token"],
) -> Float[Array, "*lead token expert"]:
    """Logits with the bias of every token's source (camoe Eq. 13, S G as a gather)."""
    return logits + jnp.take(bias, source, axis=-2)


def biased_choices(
    given: Float[Array, "token expert"],
    top_k: int,
    temperature: Float[Array, ""] | None,
    capacity: int | None = None,
) -> Float[Array, "token expert"]:
    """1 for the K largest of these logits, of experts with room; at a temperature with the derivative of soft choices.

    How full experts are has no derivative.
    """
    chosen = chosen_experts(jax.lax.stop_gradient(given), top_k, capacity)
    return chosen if temperature is None else straight_through(chosen, soft_top_k(given, top_k, temperature))


def retained_mass(
    logits: Float[Array, "token expert"], chosen: Float[Array, "token expert"], before: Float[Array, "token expert"]
) -> Float[Array, ""]:
    """Gate mass of the chosen experts over that of the choices before, summed over tokens; both are 1 where chosen."""
    mass = jax.nn.softmax(logits, axis=-1)
    return (mass * chosen).sum() / (mass * before).sum()


def changed_part(chosen: Float[Array, "token expert"], before: Float[Array, "token expert"]) -> Float[Array, ""]:
    """The part of the choices before that are no longer made; both are 1 where chosen."""
    return 1 - (chosen * before).sum() / before.sum()


class GateBias(eqx.Module):
    """A bias on the logits of every expert, by the node where a token lives.

    Choices are exact; with a `temperature`, in logits, they have the derivative of soft ones.
    """

    table: Float[Array, "*lead node expert"]
    temperature: Float[Array, ""] | None = None

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the choices of the biased gate, the strongest first. It needs logits."""
        given = self._biased(_logits(batch), batch)
        _, experts = jax.lax.top_k(given, batch.experts.shape[-1])
        soft = self.temperature is not None
        chosen = biased_choices(given, experts.shape[-1], self.temperature) if soft else None
        return replace(batch, experts=experts.astype(jnp.int32), chosen=chosen)

    def lost(self, batch: Batch) -> Float[Array, ""]:
        """The part of the unbiased choices' gate mass that is lost."""
        logits, top_k = _logits(batch), batch.experts.shape[-1]
        chosen = biased_choices(self._biased(logits, batch), top_k, self.temperature)
        return 1 - retained_mass(logits, chosen, chosen_experts(logits, top_k))

    def _biased(self, logits: Float[Array, "token expert"], batch: Batch) -> Float[Array, "token expert"]:
        return biased(logits, self.table, batch.sources(self.table.shape[-2]))


def _logits(batch: Batch) -> Float[Array, "token expert"]:
    if batch.logits is None:
        raise ValueError("a gate chooses from the logits of a batch, and this one has none; draw it with logits")
    return batch.logits
