"""A cost-aware gate: a bias on the router's logits, made of the communication time of every path (camoe).

Logits are [token, expert]; leading axes, such as layers, are added by `vmap`. A token's source is the node it lives at.
"""

from fractions import Fraction
from functools import partial
from math import ceil
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine.all_to_all import assignment_copies, chosen_by_source
from jaxmoe.engine.gating import biased, biased_choices, changed_part, chosen_experts, retained_mass, top_experts
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.pairwise import AllToAll
from jaxmoe.network.time_models import AlphaBeta
from jaxmoe.relax import AbstractReduction, HardMax

ALIKE = 1e-6  # of the largest entry: rows that spread less differ by rounding alone, and have no scores
OwnNode = Literal["counted", "left_out", "alone"]


# The gate: Eq. 4 to 6. Traces have the logits of Eq. 1 to 3, for they have no hidden states.


class Choice(NamedTuple):
    """Experts that a gate chooses, by falling logits, and their softmax weights (Eq. 5), which sum to 1."""

    experts: Int[Array, "token top_k"]
    weights: Float[Array, "token top_k"]


def choose(logits: Float[Array, "token expert"], top_k: int, capacity: int | None = None) -> Choice:
    """The largest K logits and their softmax (Eq. 4 and 5), of experts that take at most `capacity` tokens each."""
    experts = top_experts(logits, top_k, capacity)
    return Choice(experts, jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1))


# The bias (Eq. 11 to 13).


@eqx.filter_jit
def time_proxy(exchange: AllToAll, copies: Float[Array, "node node2"]) -> Float[Array, "node node2"]:
    """Seconds of the copies of every pair, there and back (Eq. 11); 0 from a node to itself.

    The time models of dispatch and combine are `AlphaBeta`, for the bias needs the time of every pair.
    """
    traffic, there, back = exchange.traffic(copies), exchange.models["dispatch"], exchange.models["combine"]
    if not (isinstance(there, AlphaBeta) and isinstance(back, AlphaBeta)):
        raise TypeError("the bias needs alpha and beta of every pair; give AlphaBeta as models of dispatch and combine")
    seconds = there.alpha + there.beta * traffic["dispatch"] + (back.alpha + back.beta * traffic["combine"]).T
    return seconds * (1 - jnp.eye(len(copies), dtype=copies.dtype))


@partial(jax.jit, static_argnames="own")
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


# Batches of all layers under a bias.


def capacity_of(factor: float | None, tokens: int, top_k: int, experts: int) -> int | None:
    """Tokens that an expert takes at most: a factor times the mean, in whole tokens; without a factor, any number.

    The factor counts as the decimal that it is written as: 1.1 times 10 is 11, where floats have a little more.
    """
    return None if factor is None else ceil(Fraction(str(factor)) * tokens * top_k / experts)


class GateProblem(eqx.Module):
    """Tokens of all layers with their logits, and what their all-to-all costs.

    `logits` are [layer, token, expert]; `source` is the node of every token, alike in all layers. A token stands for
    `weight` tokens, so that a part of a batch may stand for all of it. An expert takes `capacity` of these tokens at
    most.
    """

    exchange: AllToAll
    topology: AbstractTopology
    logits: Float[Array, "layer token expert"]
    source: Int[Array, " token"]
    share: Float[Array, "layer expert node"]
    weight: Float[Array, ""]
    top_k: int = eqx.field(static=True)
    capacity: int | None = eqx.field(static=True, default=None)

    @property
    def num_nodes(self) -> int:
        return self.share.shape[-1]


class GateOutcome(NamedTuple):
    """All-to-all time, s, expert loads in tokens and changes of routing under a bias and a placement."""

    seconds: Float[Array, "*layer"]
    loads: Float[Array, "*layer expert"]
    retained: Float[Array, "*layer"]  # gate mass of the choices over that of the unbiased ones
    changed: Float[Array, "*layer"]  # part of the unbiased choices that are no longer made


def route(
    problem: GateProblem,
    logits: Float[Array, "token expert"],
    bias: Float[Array, "node expert"],
    share: Float[Array, "expert node"],
    temperature: Float[Array, ""] | None,
    reduction: AbstractReduction,
) -> GateOutcome:
    """Route the tokens of one layer by biased logits: exact, or with the derivative of choices at a temperature."""
    chosen = biased_choices(biased(logits, bias, problem.source), problem.top_k, temperature, problem.capacity)
    before = chosen_experts(logits, problem.top_k, problem.capacity)
    by_source = problem.weight * chosen_by_source(chosen, problem.source, problem.num_nodes)
    seconds = problem.exchange.total(problem.topology, by_source @ share, reduction)
    mass = retained_mass(logits, chosen, before)
    return GateOutcome(seconds, by_source.sum(axis=0), mass, changed_part(chosen, before))


@eqx.filter_jit
def evaluate_gate(
    problem: GateProblem,
    bias: Float[Array, "layer node expert"],
    share: Float[Array, "layer expert node"] | None = None,
) -> GateOutcome:
    """Exact times and choices of all layers, one after the other, under the problem's placement or another."""
    shares = problem.share if share is None else share
    exact = partial(route, problem, temperature=None, reduction=HardMax())
    return jax.lax.map(lambda given: exact(*given), (problem.logits, bias, shares))


def on_experts(
    bias: Float[Array, "layer node node2"], share: Float[Array, "layer expert node"]
) -> Float[Array, "layer node expert"]:
    """Turns a bias on nodes into a bias on experts: every expert gets that of its node."""
    return jnp.einsum("lun,len->lue", bias, share)


def divergence(base: Float[Array, "*lead expert"], loads: Float[Array, "*lead expert"]) -> Float[Array, "*lead"]:
    """Kullback-Leibler divergence of loads from those of the base, nats, with 1 added to each (camoe Eq. 19)."""
    smooth = [each + 1 for each in (base, loads)]
    p, q = (each / each.sum(axis=-1, keepdims=True) for each in smooth)
    return (p * jnp.log(p / q)).sum(axis=-1)


def unbiased(problem: GateProblem) -> Float[Array, "layer node expert"]:
    """Returns a bias of 0 for every layer, node and expert."""
    layers, _, experts = problem.logits.shape
    return jnp.zeros((layers, problem.num_nodes, experts))


@eqx.filter_jit
def unbiased_copies(problem: GateProblem) -> Float[Array, "layer node node2"]:
    """Copies of every layer in an unbiased pass (Eq. 10)."""

    def layer(given: tuple[Array, Array]) -> Array:
        logits, share = given
        chosen = chosen_experts(logits, problem.top_k, problem.capacity)
        return problem.weight * assignment_copies(chosen, problem.source, share)

    return jax.lax.map(layer, (problem.logits, problem.share))
