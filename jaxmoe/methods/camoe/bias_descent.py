"""A gate's bias by gradient descent: latency of the all-to-all against how far routing changes (beyond camoe 3.4).

camoe has one number, lambda, and a rule that makes the bias of it. Here latency plus a penalty on what routing loses is
minimised over lambda, a lambda for each layer or each source, or the bias of every layer, source and node itself; alone
or together with where experts are. Choices are exact on the way forward and relaxed on the way back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from scipy.optimize import linear_sum_assignment

from jaxmoe.methods.camoe.gate import GateOutcome, GateProblem, divergence, evaluate_gate, on_experts, route, unbiased
from jaxmoe.relax import SmoothMax, as_number, sinkhorn

Form = Literal["scalar", "layer", "source", "table"]
FORMS: tuple[Form, ...] = ("scalar", "layer", "source", "table")
LEAST_LOST = 1e-9  # of gate mass: a limit of nothing has no ratio to it
STRETCHES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # of the way from a start to where descent ended, tried on held tokens


# What descends.


class Bias(eqx.Module):
    """A bias on nodes, [layer, source, node]: `scale` times given `scores`, and `table` on top of it.

    `scale` broadcasts against the scores: one number, one for each layer [layer, 1, 1], or source [source, 1].
    """

    scale: Float[Array, "..."]
    table: Float[Array, "layer node node2"] | Float[Array, ""]
    scores: Float[Array, "layer node node2"]

    def nodes(self) -> Float[Array, "layer node node2"]:
        return -self.scale * jax.lax.stop_gradient(self.scores) + self.table


def _on_nodes(bias: Bias | None, problem: GateProblem) -> Float[Array, "layer node node2"]:
    """The bias of every layer, source and node; 0 without one."""
    table = jnp.zeros(()) if bias is None else bias.nodes()
    return jnp.broadcast_to(table, (len(problem.share), problem.num_nodes, problem.num_nodes))


def start(form: Form, scores: Float[Array, "layer node node2"], strength: float) -> Bias:
    """Returns a bias of this form that equals that of lambda = `strength`; `scores` are those of camoe Eq. 12."""
    layers, nodes, _ = scores.shape
    shape = {"scalar": (), "layer": (layers, 1, 1), "source": (nodes, 1), "table": ()}[form]
    table = -strength * scores if form == "table" else jnp.zeros(())
    scale = jnp.zeros(()) if form == "table" else jnp.full(shape, strength)
    return Bias(scale.astype(scores.dtype), table, scores)


class RelaxedPlacement(eqx.Module):
    """A relaxed placement with equally many experts on every node: a Sinkhorn transport plan of learned logits.

    Shares approach 0 or 1 as the temperature falls.
    """

    logits: Float[Array, "layer expert node"]

    def share(self, temperature: Float[Array, ""]) -> Float[Array, "layer expert node"]:
        _, experts, nodes = self.logits.shape
        even = jnp.full(experts, 1.0), jnp.full(nodes, experts / nodes)
        return jax.vmap(lambda logits: sinkhorn(logits / temperature, *even))(self.logits)


def rounded(share: Float[Array, "layer expert node"]) -> Float[np.ndarray, "layer expert node"]:
    """Assigns each expert to one node, equally many to every node, with the largest sum of shares."""
    given = np.asarray(share, float)
    _, experts, nodes = given.shape
    slot = np.arange(experts) * nodes // experts
    found = np.zeros_like(given, np.float32)
    for layer, one in enumerate(given):
        expert, at = linear_sum_assignment(-one[:, slot])
        found[layer, expert, slot[at]] = 1
    return found


@dataclass(frozen=True)
class GateLimits:
    """Limits on changes of routing, as means over layers.

    `lost` bounds 1 - retained gate mass. `avg_layer_kl` bounds the Kullback-Leibler divergence of expert loads, nats.
    """

    lost: float
    avg_layer_kl: float = np.inf


Ends = tuple[Float[Array, ""] | float, Float[Array, ""] | float]
"""First and last value of an annealed number."""


def _as_numbers(ends: Ends) -> Ends:
    return as_number(ends[0]), as_number(ends[1])


class GateSettings(eqx.Module):
    """Settings of the descent. Temperatures are of choices, in logits, of the relative maximum and of the placement."""

    steps: int = eqx.field(static=True, default=120)
    learning_rate: Float[Array, ""] = eqx.field(default=0.03, converter=as_number)
    temperature: Float[Array, ""] = eqx.field(default=0.3, converter=as_number)
    max_temperature: Ends = eqx.field(default=(0.05, 0.005), converter=_as_numbers)
    place_temperature: Ends = eqx.field(default=(0.5, 0.05), converter=_as_numbers)
    price: Float[Array, ""] = eqx.field(default=30.0, converter=as_number)  # of gate mass lost, in latencies, at first
    # How fast prices grow where a limit is broken, and fall where it is kept.
    dual_rate: Float[Array, ""] = eqx.field(default=0.1, converter=as_number)


@dataclass(frozen=True)
class Found:
    """A bias on nodes and a placement; `history` is relative latency, gate mass lost and divergence by step."""

    bias: Float[np.ndarray, "layer node node2"]
    share: Float[np.ndarray, "layer expert node"]
    history: Float[np.ndarray, "step 3"]


class _State(NamedTuple):
    free: tuple[Bias | None, RelaxedPlacement | None]
    moments: optax.OptState
    prices: Float[Array, " limit"]  # of gate mass lost and of divergence


def descend(
    problems: Sequence[GateProblem],
    limits: GateLimits,
    settings: GateSettings,
    bias: Bias | None = None,
    place: RelaxedPlacement | None = None,
) -> Found:
    """Least mean latency over layers within limits, over the bias, the placement, or both at once.

    `problems` are parts of the tokens, taken in turn. Prices of what is lost grow while a limit is broken, so limits
    hold nearly in the end; `within` makes a bias keep them.
    """
    free = (bias, place)
    arrays = eqx.filter(free, eqx.is_inexact_array)
    state = _State(free, optax.scale_by_adam().init(arrays), jnp.asarray([settings.price, 1.0]))
    before = [evaluate_gate(problem, unbiased(problem)) for problem in problems]
    bounds = jnp.asarray([max(limits.lost, LEAST_LOST), min(limits.avg_layer_kl, 1e3)])
    history, numbers = [], replace(settings, steps=1)  # how many steps there are compiles none of them anew
    for step in range(settings.steps):
        turn = step % len(problems)
        progress = jnp.asarray(step / max(settings.steps - 1, 1), jnp.float32)
        state, now = _step(problems[turn], before[turn], bounds, numbers, state, progress)
        history.append(now)
    bias, place = state.free
    share = np.asarray(problems[0].share)
    if place is not None:
        share = rounded(place.share(jnp.asarray(settings.place_temperature[1])))
    return Found(np.asarray(_on_nodes(bias, problems[0])), share, np.asarray(history))


def relaxed_objective(
    free: tuple[Bias | None, RelaxedPlacement | None],
    problem: GateProblem,
    base: GateOutcome,
    settings: GateSettings,
    prices: Float[Array, " limit"],
    progress: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, "3"]]:
    """Relative latency plus the price of what routing loses; and latency, gate mass lost and divergence apart."""

    def annealed(ends: Ends) -> Float[Array, ""]:
        return ends[0] * (ends[1] / ends[0]) ** progress

    bias, place = free
    share = problem.share if place is None else place.share(annealed(settings.place_temperature))
    reduction = SmoothMax(annealed(settings.max_temperature))
    temperature = None if bias is None else jnp.asarray(settings.temperature)

    def layer(given):
        logits, on_nodes, share, loads = given
        routed = route(problem, logits, on_nodes @ share.T, share, temperature, reduction)
        return routed.seconds, 1 - routed.retained, divergence(loads, routed.loads)

    seconds, lost, moved = jax.lax.map(layer, (problem.logits, _on_nodes(bias, problem), share, base.loads))
    figures = jnp.stack([seconds.mean() / base.seconds.mean(), lost.mean(), moved.mean()])
    return figures[0] + (prices * figures[1:]).sum(), figures


@eqx.filter_jit
def _step(
    problem: GateProblem,
    base: GateOutcome,
    bounds: Float[Array, " limit"],
    settings: GateSettings,
    state: _State,
    progress: Float[Array, ""],
) -> tuple[_State, Float[Array, "3"]]:
    """One step of descent, and of ascent of the prices."""
    value = eqx.filter_value_and_grad(relaxed_objective, has_aux=True)
    (_, figures), gradient = value(state.free, problem, base, settings, state.prices, progress)
    changes, moments = optax.scale_by_adam().update(gradient, state.moments)
    free = eqx.apply_updates(state.free, jax.tree.map(lambda change: -settings.learning_rate * change, changes))
    over = jnp.clip(figures[1:] / bounds - 1, -1, 1)
    prices = jnp.clip(state.prices * jnp.exp(settings.dual_rate * over), 1e-2, 1e4)
    return _State(free, moments, prices), figures


def within(
    problems: Sequence[GateProblem],
    limits: GateLimits,
    bias: Float[np.ndarray, "layer node node2"],
    share: Float[np.ndarray, "layer expert node"],
    halvings: int = 8,
) -> Float[np.ndarray, "layer node node2"]:
    """The bias times the largest factor up to 1.5 that keeps the limits on these tokens, by exact choices."""

    before = [evaluate_gate(problem, unbiased(problem)).loads for problem in problems]

    def keeps(factor: float) -> bool:
        table = on_experts(jnp.asarray(factor * bias), jnp.asarray(share))
        after = [evaluate_gate(problem, table, jnp.asarray(share)) for problem in problems]
        lost = np.mean([1 - float(one.retained.mean()) for one in after])
        moved = np.mean([divergence(base, one.loads).mean() for base, one in zip(before, after, strict=True)])
        return bool(lost <= limits.lost and moved <= limits.avg_layer_kl)

    low, high = 0.0, 1.5
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low * bias


# Tokens that no descent has seen: a table with a number for every pair overfits few tokens.


def fastest(held: Sequence[GateProblem], candidates: Sequence[Found]) -> Found:
    """The candidate of least exact mean latency on these tokens; of equal ones the first."""

    def seconds(found: Found) -> float:
        share = jnp.asarray(found.share)
        table = on_experts(jnp.asarray(found.bias), share)
        return float(np.mean([evaluate_gate(problem, table, share).seconds.mean() for problem in held]))

    return min(candidates, key=seconds)


def tuned_bias(
    problems: Sequence[GateProblem],
    held: Sequence[GateProblem],
    limits: GateLimits,
    settings: GateSettings,
    begin: Bias,
) -> Found:
    """A bias by descent from a start, as far from it as pays on `held` tokens, on which it is at least as fast.

    What is compared keeps the limits on `problems`; so the start, too, is scaled until it does.
    """
    found = descend(problems, limits, settings, begin)
    first = np.broadcast_to(np.asarray(begin.nodes()), found.bias.shape)
    tables = [first + part * (found.bias - first) for part in STRETCHES]
    return fastest(held, [replace(found, bias=within(problems, limits, each, found.share)) for each in tables])
