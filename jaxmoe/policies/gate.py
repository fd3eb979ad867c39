"""A gate that knows what its choices cost: a bias on the router's logits, made of the time of every path (camoe).

Logits are [token, expert]; leading axes, such as layers, are added by `vmap`. A token's source is the node it lives at.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.network.pairwise import AllToAll
from jaxmoe.network.time_models import AlphaBeta

ALIKE = 1e-6  # of the largest entry: rows that spread less differ by rounding alone, and have no scores
OwnNode = Literal["counted", "left_out", "alone"]


# The gate (Eq. 1 to 6).


def noisy_logits(
    hidden: Float[Array, "token hidden"],
    gate: Float[Array, "hidden expert"],
    noise: Float[Array, "hidden expert"],
    draw: Float[Array, "token expert"],
) -> Float[Array, "token expert"]:
    """Logits with noise of a width of their own (Eq. 1 to 3); `draw` is standard normal, or 0 at inference."""
    return hidden @ gate + jax.nn.softplus(hidden @ noise) * draw


class Choice(NamedTuple):
    """What a gate chose: the strongest expert first, and the weights of Eq. 5, which sum to 1."""

    experts: Int[Array, "*lead token top_k"]
    weights: Float[Array, "*lead token top_k"]


def choose(logits: Float[Array, "*lead token expert"], top_k: int) -> Choice:
    """The largest K logits and their softmax (Eq. 4 and 5); of equal ones the expert of the lower number."""
    largest, experts = jax.lax.top_k(logits, top_k)
    return Choice(experts.astype(jnp.int32), jax.nn.softmax(largest, axis=-1))


def biased(
    logits: Float[Array, "*lead token expert"],
    bias: Float[Array, "*lead node expert"],
    source: Int[Array, " token"],
) -> Float[Array, "*lead token expert"]:
    """Logits with the bias of every token's source: Eq. 13, S G as a gather. Biased logits choose and weight."""
    return logits + jnp.take(bias, source, axis=-2)


# Where a pass sends vectors (Eq. 8 and 10).


def chosen_by_source(
    chosen: Float[Array, "token expert"], source: Int[Array, " token"], nodes: int
) -> Float[Array, "node expert"]:
    """How often tokens of every node chose every expert, S' A of Eq. 10; `chosen` is 1 where they did, or a part."""
    return jax.ops.segment_sum(chosen, source, nodes)


def assignment_copies(
    chosen: Float[Array, "token expert"], source: Int[Array, " token"], share: Float[Array, "expert node"]
) -> Float[Array, "node node2"]:
    """Copies from every source to every node: one for each expert chosen there (Eq. 8 and 10)."""
    return chosen_by_source(chosen, source, share.shape[1]) @ share


def node_copies(
    chosen: Float[Array, "token expert"], source: Int[Array, " token"], share: Float[Array, "expert node"]
) -> Float[Array, "node node2"]:
    """Copies where a node gets a token once, however many of its experts are there. `share` is one-hot."""
    visited = jnp.minimum(chosen @ share, 1)
    return jax.ops.segment_sum(visited, source, share.shape[1])


# The bias (Eq. 11 to 13).


def time_proxy(exchange: AllToAll, copies: Float[Array, "node node2"]) -> Float[Array, "node node2"]:
    """Seconds of the copies of every pair, there and back (Eq. 11); 0 from a node to itself.

    The time models of dispatch and combine are `AlphaBeta`, for the bias needs the time of every pair.
    """
    traffic, there, back = exchange.traffic(copies), exchange.models["dispatch"], exchange.models["combine"]
    if not (isinstance(there, AlphaBeta) and isinstance(back, AlphaBeta)):
        raise TypeError("the bias needs alpha and beta of every pair; give AlphaBeta as models of dispatch and combine")
    seconds = there.alpha + there.beta * traffic["dispatch"] + (back.alpha + back.beta * traffic["combine"]).T
    return seconds * (1 - jnp.eye(len(copies), dtype=copies.dtype))


def standard_scores(cost: Float[Array, "node node2"], own: OwnNode = "counted") -> Float[Array, "node node2"]:
    """Every row less its mean, over its standard deviation (Eq. 12); 0 where all its entries are alike.

    A node's own entry costs 0 and is `counted` in the paper, so the own node is favoured even where all others are
    alike. `left_out`, rows are scored over the other nodes, and the own entry has 0. `alone` is the part that the own
    node has in the scores of `counted`: those of rows in which all other nodes cost their mean.
    """
    nodes = len(cost)
    diagonal = jnp.eye(nodes, dtype=bool)
    others = jnp.where(diagonal, 0, cost).sum(axis=1, keepdims=True) / max(nodes - 1, 1)
    if own == "left_out":
        counted, mean, count = ~diagonal, others, max(nodes - 1, 1)
    else:
        counted, mean, count = jnp.ones_like(diagonal), cost.mean(axis=1, keepdims=True), nodes
    centred = jnp.where(counted, cost - mean, 0)
    variance = (centred**2).sum(axis=1, keepdims=True) / count
    differ = variance > (ALIKE * jnp.abs(cost).max(axis=1, keepdims=True)) ** 2
    spread = jnp.sqrt(jnp.where(differ, variance, 1))  # of 1, so that what is not used has a derivative
    scored = jnp.where(diagonal, cost, others) - mean if own == "alone" else centred
    return jnp.where(differ, scored / spread, 0)


def gate_bias(
    exchange: AllToAll,
    copies: Float[Array, "node node2"],
    share: Float[Array, "expert node"],
    strength: Float[Array, "..."] | float,
    own: OwnNode = "counted",
) -> Float[Array, "node expert"]:
    """The bias of every source and expert: -lambda times the score of the expert's node (Eq. 13).

    `copies` are those of an unbiased pass. `strength` is lambda, one number or one for each source.
    """
    scores = standard_scores(time_proxy(exchange, copies), own)
    strength = jnp.asarray(strength, scores.dtype)
    return -(strength[..., None] if strength.ndim else strength) * (scores @ share.T)
