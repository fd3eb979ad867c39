"""How likely recorded choices are under preferences, which is what fitting maximises."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.traces.synthesis.process import Preferences

FAR = 1e9  # below every log-weight: an expert that is out of the race


class Choices(eqx.Module):
    """Recorded tokens with what they depend on. A missing choice is -1 and counts nowhere."""

    experts: Int[Array, "token layer top_k"]
    before: Int[Array, "token layer top_k"]  # of the token before; anything at position 0
    position: Int[Array, " token"]  # in its request
    topic: Int[Array, " token"]
    phase: Int[Array, " token"]


def log_likelihood(preferences: Preferences, choices: Choices) -> Float[Array, ""]:
    """Mean over tokens of the logarithm of the probability of all their choices, in their order, in nats.

    Group limits are left out: which groups lost is not recorded.
    """
    picks = jax.nn.one_hot(choices.experts, preferences.popularity.shape[1])
    chosen = picks.sum(axis=2)
    below = jnp.pad(chosen[:, :-1], ((0, 0), (1, 0), (0, 0)))
    before = jax.nn.one_hot(choices.before, chosen.shape[2]).sum(axis=2)
    before = jnp.where((choices.position == 0)[:, None, None], preferences.usual, before)
    log_weights = jnp.swapaxes(preferences.background(choices.topic, choices.phase, choices.position), 0, 1)
    log_weights += jnp.einsum("tle,lef->tlf", below, preferences.from_layer)
    log_weights += jnp.einsum("tle,lef->tlf", before, preferences.from_token)
    total, taken = jnp.zeros(()), jnp.zeros_like(chosen)
    for k in range(picks.shape[2]):
        pick = picks[:, :, k]
        normaliser = jax.nn.logsumexp(log_weights - FAR * taken, axis=-1)
        total += (pick * (log_weights - normaliser[..., None])).sum()
        taken += pick
        log_weights += jnp.einsum("tle,lef->tlf", pick, preferences.together)
    return total / len(picks)
