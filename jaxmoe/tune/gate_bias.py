"""A gate's bias by gradient descent: latency of the all-to-all against how far routing changes (beyond camoe 3.4).

camoe has one number, lambda, and a rule that makes the bias of it. Here latency plus a penalty on what routing loses is
minimised over lambda, a lambda for each layer or each source, or the bias of every layer, source and node itself; alone
or together with where experts are. Choices are exact on the way forward and relaxed on the way back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from scipy.optimize import linear_sum_assignment

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.pairwise import AllToAll
from jaxmoe.relax import HardMax, SmoothMax, sinkhorn, soft_top_k, straight_through

Form = Literal["scalar", "layer", "source", "table"]
FORMS: tuple[Form, ...] = ("scalar", "layer", "source", "table")


class Routed(NamedTuple):
    """What a biased gate does with a batch of one layer."""

    copies: Float[Array, "node node2"]  # [source, node of the expert]
    loads: Float[Array, " expert"]
    retained: Float[Array, ""]  # gate mass of the choices over that of the unbiased ones
    changed: Float[Array, ""]  # part of the unbiased choices that are no longer made


class GateProblem(eqx.Module):
    """Tokens of all layers with their logits, and what their all-to-all costs.

    `logits` are [layer, token, expert]; `source` is the node of every token, alike in all layers. A token stands for
    `weight` tokens, so that a part of a batch may stand for all of it.
    """

    exchange: AllToAll
    topology: AbstractTopology
    logits: Float[Array, "layer token expert"]
    source: Int[Array, " token"]
    share: Float[Array, "layer expert node"]
    weight: Float[Array, ""]
    top_k: int = eqx.field(static=True)

    @property
    def num_nodes(self) -> int:
        return self.share.shape[-1]


def route(
    problem: GateProblem,
    logits: Float[Array, "token expert"],
    bias: Float[Array, "node expert"],
    share: Float[Array, "expert node"],
    temperature: Float[Array, ""] | None,
) -> Routed:
    """Route the tokens of one layer by biased logits: exact, or with the derivative of choices at a temperature."""
    given = logits + bias[problem.source]
    exact = _chosen(jax.lax.stop_gradient(given), problem.top_k)
    chosen = exact
    if temperature is not None:
        chosen = straight_through(exact, soft_top_k(given, problem.top_k, temperature))
    before, mass = _chosen(logits, problem.top_k), jax.nn.softmax(logits, axis=-1)
    by_source = problem.weight * jax.ops.segment_sum(chosen, problem.source, problem.num_nodes)
    return Routed(
        copies=by_source @ share,
        loads=by_source.sum(axis=0),
        retained=(mass * chosen).sum() / (mass * before).sum(),
        changed=1 - (chosen * before).sum() / before.sum(),
    )


def _chosen(logits: Float[Array, "token expert"], top_k: int) -> Float[Array, "token expert"]:
    """1 for the largest K of every token."""
    least = jax.lax.top_k(logits, top_k)[0][:, -1:]
    return (logits >= least).astype(logits.dtype)


class Judged(NamedTuple):
    """What bias and placement do on the tokens of a problem; leaves are [layer]."""

    seconds: Float[Array, " layer"]
    loads: Float[Array, "layer expert"]
    retained: Float[Array, " layer"]
    changed: Float[Array, " layer"]


@eqx.filter_jit
def judge(
    problem: GateProblem,
    bias: Float[Array, "layer node expert"],
    share: Float[Array, "layer expert node"] | None = None,
) -> Judged:
    """Exact times and choices, layer by layer, under the problem's placement or another."""
    shares = problem.share if share is None else share

    def layer(given) -> Judged:
        logits, bias, share = given
        routed = route(problem, logits, bias, share, None)
        seconds = problem.exchange.total(problem.topology, routed.copies, HardMax())
        return Judged(seconds, routed.loads, routed.retained, routed.changed)

    return jax.lax.map(layer, (problem.logits, bias, shares))


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


def start(form: Form, scores: Float[Array, "layer node node2"], strength: float) -> Bias:
    """A bias of this form that does what lambda = `strength` does; `scores` are those of camoe Eq. 12."""
    layers, nodes, _ = scores.shape
    shape = {"scalar": (), "layer": (layers, 1, 1), "source": (nodes, 1), "table": ()}[form]
    table = -strength * scores if form == "table" else jnp.zeros(())
    scale = jnp.zeros(()) if form == "table" else jnp.full(shape, strength)
    return Bias(scale.astype(scores.dtype), table, scores)


class Placed(eqx.Module):
    """Experts on nodes, as many on each: a transport plan that sharpens as its temperature falls."""

    logits: Float[Array, "layer expert node"]

    def share(self, temperature: Float[Array, ""]) -> Float[Array, "layer expert node"]:
        _, experts, nodes = self.logits.shape
        even = jnp.full(experts, 1.0), jnp.full(nodes, experts / nodes)
        return jax.vmap(lambda logits: sinkhorn(logits / temperature, *even))(self.logits)


def placed_like(share: Float[Array, "layer expert node"], strength: float = 1.0) -> Placed:
    """A start near a placement."""
    return Placed(strength * jnp.asarray(share, jnp.float32))


def rounded(share: Float[Array, "layer expert node"]) -> Float[np.ndarray, "layer expert node"]:
    """Whole experts, as many on every node: the assignment of the largest sum of shares."""
    given = np.asarray(share, float)
    _, experts, nodes = given.shape
    slot = np.arange(experts) * nodes // experts
    found = np.zeros_like(given, np.float32)
    for layer, one in enumerate(given):
        expert, at = linear_sum_assignment(-one[:, slot])
        found[layer, expert, slot[at]] = 1
    return found


@dataclass(frozen=True)
class Limits:
    """What routing may lose: 1 less retained gate mass, and divergence of loads by layer (avg_layer_kl, nats)."""

    lost: float
    avg_layer_kl: float = np.inf


@dataclass(frozen=True)
class GateSettings:
    """How to descend. Temperatures: of choices, in logits; of the maximum, relative; of the placement."""

    steps: int = 120
    learning_rate: float = 0.03
    temperature: float = 0.3
    max_temperature: tuple[float, float] = (0.05, 0.005)
    place_temperature: tuple[float, float] = (0.5, 0.05)
    price: float = 30.0  # of the gate mass lost, in latencies, at first
    dual_rate: float = 0.1  # by which prices grow where a limit is broken, and fall where it is kept


@dataclass(frozen=True)
class Found:
    """A bias on nodes and a placement; `history` is relative latency, gate mass lost and divergence by step."""

    bias: Float[np.ndarray, "layer node node2"]
    share: Float[np.ndarray, "layer expert node"]
    history: Float[np.ndarray, "step 3"]


class _State(NamedTuple):
    free: tuple[Bias | None, Placed | None]
    moments: optax.OptState
    prices: Float[Array, " limit"]  # of gate mass lost and of divergence


def on_experts(
    bias: Float[Array, "layer node node2"], share: Float[Array, "layer expert node"]
) -> Float[Array, "layer node expert"]:
    """The bias of every expert: that of its node."""
    return jnp.einsum("lun,len->lue", bias, share)


def divergence(base: Float[Array, "*lead expert"], loads: Float[Array, "*lead expert"]) -> Float[Array, "*lead"]:
    """Kullback-Leibler divergence of loads from those of the base, nats, with 1 added to each (camoe Eq. 19)."""
    smooth = [each + 1 for each in (base, loads)]
    p, q = (each / each.sum(axis=-1, keepdims=True) for each in smooth)
    return (p * jnp.log(p / q)).sum(axis=-1)


def descend(
    problems: Sequence[GateProblem],
    limits: Limits,
    settings: GateSettings,
    bias: Bias | None = None,
    place: Placed | None = None,
) -> Found:
    """Least mean latency over layers within limits, over the bias, the placement, or both at once.

    `problems` are parts of the tokens, taken in turn. Prices of what is lost grow while a limit is broken, so limits
    hold nearly in the end; `within` makes a bias keep them.
    """
    free = (bias, place)
    arrays = eqx.filter(free, eqx.is_inexact_array)
    state = _State(free, optax.scale_by_adam().init(arrays), jnp.asarray([settings.price, 1.0]))
    unbiased = [judge(problem, _no_bias(problem)) for problem in problems]
    bounds = jnp.asarray([limits.lost, min(limits.avg_layer_kl, 1e3)])
    history = []
    for step in range(settings.steps):
        turn = step % len(problems)
        progress = jnp.asarray(step / max(settings.steps - 1, 1), jnp.float32)
        state, now = _step(problems[turn], unbiased[turn], bounds, settings, state, progress)
        history.append(now)
    bias, place = state.free
    layers, nodes = len(problems[0].share), problems[0].num_nodes
    share, table = np.asarray(problems[0].share), jnp.zeros((layers, nodes, nodes))
    if place is not None:
        share = rounded(place.share(jnp.asarray(settings.place_temperature[1])))
    if bias is not None:
        table = jnp.broadcast_to(bias.nodes(), table.shape)
    return Found(np.asarray(table), share, np.asarray(history))


def _no_bias(problem: GateProblem) -> Float[Array, "layer node expert"]:
    layers, _, experts = problem.logits.shape
    return jnp.zeros((layers, problem.num_nodes, experts))


def relaxed_objective(
    free: tuple[Bias | None, Placed | None],
    problem: GateProblem,
    base: Judged,
    settings: GateSettings,
    prices: Float[Array, " limit"],
    progress: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, "3"]]:
    """Relative latency plus the price of what routing loses; and latency, gate mass lost and divergence apart."""

    def annealed(ends: tuple[float, float]) -> Float[Array, ""]:
        return ends[0] * (ends[1] / ends[0]) ** progress

    bias, place = free
    layers, nodes = len(problem.logits), problem.num_nodes
    share = problem.share if place is None else place.share(annealed(settings.place_temperature))
    on_nodes = (
        jnp.zeros((layers, nodes, nodes)) if bias is None else jnp.broadcast_to(bias.nodes(), (layers, nodes, nodes))
    )
    reduction = SmoothMax(annealed(settings.max_temperature))
    temperature = None if bias is None else jnp.asarray(settings.temperature)

    def layer(given):
        logits, on_nodes, share, loads = given
        routed = route(problem, logits, on_nodes @ share.T, share, temperature)
        seconds = problem.exchange.total(problem.topology, routed.copies, reduction)
        return seconds, 1 - routed.retained, divergence(loads, routed.loads)

    seconds, lost, moved = jax.lax.map(layer, (problem.logits, on_nodes, share, base.loads))
    figures = jnp.stack([seconds.mean() / base.seconds.mean(), lost.mean(), moved.mean()])
    return figures[0] + (prices * figures[1:]).sum(), figures


@eqx.filter_jit
def _step(
    problem: GateProblem,
    base: Judged,
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
    limits: Limits,
    bias: Float[np.ndarray, "layer node node2"],
    share: Float[np.ndarray, "layer expert node"],
    halvings: int = 8,
) -> Float[np.ndarray, "layer node node2"]:
    """The bias times the largest factor up to 1.5 that keeps the limits on these tokens, by exact choices."""

    def keeps(factor: float) -> bool:
        table = on_experts(jnp.asarray(factor * bias), jnp.asarray(share))
        lost, moved = [], []
        for problem in problems:
            judged = judge(problem, table, jnp.asarray(share))
            lost.append(1 - float(judged.retained.mean()))
            moved.append(divergence(judge(problem, _no_bias(problem)).loads, judged.loads).mean())
        return bool(np.mean(lost) <= limits.lost and np.mean(moved) <= limits.avg_layer_kl)

    low, high = 0.0, 1.5
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low * bias
