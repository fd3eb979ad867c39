"""How likely recorded choices are under preferences, which is what fitting maximises."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.traces.synthesis.process import Preferences
from jaxmoe.traces.trace import MISSING

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
    below = jnp.pad(choices.experts[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=MISSING)
    opens = (choices.position == 0)[:, None, None]
    log_weights = jnp.swapaxes(preferences.background(choices.topic, choices.phase, choices.position), 0, 1)
    log_weights += _added(preferences.from_layer, below)
    log_weights += jnp.where(opens, preferences.opening, _added(preferences.from_token, choices.before))
    total, taken = jnp.zeros(()), jnp.zeros(log_weights.shape, bool)
    for chosen in jnp.moveaxis(choices.experts, 2, 0)[..., None]:
        normaliser = jax.nn.logsumexp(jnp.where(taken, -FAR, log_weights), axis=-1, keepdims=True)
        log_weight = jnp.take_along_axis(log_weights, jnp.maximum(chosen, 0), axis=-1)
        total += jnp.where(chosen != MISSING, log_weight - normaliser, 0.0).sum()
        taken |= chosen == jnp.arange(log_weights.shape[2])
        log_weights += _added(preferences.together, chosen)
    return total / len(choices.topic)


def _added(
    table: Float[Array, "layer expert expert"], chosen: Int[Array, "token layer choice"]
) -> Float[Array, "token layer expert"]:
    """What choices add to the log-weights of their layer. Taking rows is several times as fast as a product."""
    layer = jnp.arange(len(table))[:, None]
    rows = table[layer, jnp.maximum(chosen, 0)]
    return jnp.where((chosen != MISSING)[..., None], rows, 0.0).sum(axis=2)
