"""Gradient descent over relaxed placements, transport plans between experts and nodes, in short segments."""

import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxmoe.compiling import LIGHT, compile_ahead
from jaxmoe.engine import AbstractServing, Decisions, Layer
from jaxmoe.relax import SmoothMax, SoftSupport, geometric, sinkhorn
from jaxmoe.traces import Batch, over_batches
from jaxmoe.tune.objective import Objective
from jaxmoe.tune.problem import PlacementProblem

# Relaxed placements: shares as a transport plan between experts and nodes.
#
# Work W[e, n] = Sinkhorn(logits / temperature) has the experts' frequencies as row sums and a learned, nearly even
# budget of the nodes as column sums; share = W / frequency. So work is balanced by construction and descent is left
# with locality. As the temperature falls, W nears a vertex of the transport polytope: few shares are not 0.


class AbstractParameters(eqx.Module):
    """Parameters of one layer that gradient descent changes: arrays, and their conversion to relaxed decisions."""

    @abc.abstractmethod
    def decisions(
        self,
        frequency: Float[Array, " expert"],
        node_part: Float[Array, " node"],
        temperature: Float[Array, ""],
        budget_spread: Float[Array, ""],
    ) -> Decisions:
        """Relaxed decisions at a temperature; `node_part` is each node's part of all work if work were even."""

    def typical_part(self, frequency: Float[Array, " expert"], nodes: int) -> Float[Array, " expert"]:
        """The share of each expert that fills a node."""
        return typical_part(frequency, nodes)


class TransportPlan(AbstractParameters):
    """A relaxed placement: logits of a transport plan between experts and nodes, and budgets of nodes."""

    logits: Float[Array, "*lead expert node"]
    budget: Float[Array, "*lead node"]

    def decisions(self, frequency, node_part, temperature, budget_spread):
        return Decisions(self.share(frequency, node_part, temperature, budget_spread))

    def share(
        self,
        frequency: Float[Array, " expert"],
        node_part: Float[Array, " node"],
        temperature: Float[Array, ""],
        budget_spread: Float[Array, ""],
    ) -> Float[Array, "expert node"]:
        """Shares of every expert; `node_part` is what each node would hold of all work if work were even.

        Nodes' budgets stand to each other within a factor (1 + budget_spread) / (1 - budget_spread) of that.
        """
        budget = node_part * (1 + budget_spread * jnp.tanh(self.budget))
        work = sinkhorn(self.logits / temperature, frequency, budget / budget.sum())
        return work / frequency[:, None]


class GroupedPlan(TransportPlan):
    """A transport plan between experts and equal groups of nodes, which divide by their pace what they hold.

    `group` numbers the group of every node from 0. There are as many columns as nodes; those beyond the groups stay
    empty, so that plans of several cuts descend together.
    """

    group: Int[Array, "*lead node"]

    def share(self, frequency, node_part, temperature, budget_spread):
        member = (self.group == jnp.arange(len(node_part))[:, None]) * node_part  # [column, node]
        part = member.sum(axis=1)
        of_columns = part + EMPTY
        over_groups = super().share(frequency, of_columns / of_columns.sum(), temperature, budget_spread)
        share = over_groups @ (member / jnp.where(part > 0, part, 1)[:, None])
        return share / share.sum(axis=1, keepdims=True)

    def typical_part(self, frequency, nodes):
        groups = self.group.max() + 1
        return typical_part(frequency, groups) * groups / nodes


def random_plans(seed: int, layers: int, restarts: int, experts: int, nodes: int) -> TransportPlan:
    """Random starts: plans of noise without any preference; leaves are [layer, restart, ...]."""
    noise = np.random.default_rng([seed, 0]).normal(scale=0.5, size=(layers, restarts, experts, nodes))
    return TransportPlan(jnp.asarray(noise, jnp.float32), jnp.zeros((layers, restarts, nodes), jnp.float32))


def typical_part(frequency: Any, nodes: Any) -> Any:
    """The share of an expert that fills a node: 1 for a cold expert, less for one that needs several nodes.

    `frequency` is a JAX or NumPy array [..., expert], and so is the result.
    """
    return 1 / (1 + (frequency * nodes - 1) * (frequency * nodes > 1))


def soft_hosts(typical: Float[Array, " expert"], width: Float[Array, ""]) -> SoftSupport:
    """Soft support whose width is relative to the typical part of each expert.

    A width relative to the share alone would hardly see the hosts of hot experts, one relative to the work
    alone would hardly see those of cold ones.
    """
    return SoftSupport(width * typical[:, None])


# Gradient descent over relaxed decisions: all layers and restarts in one vmapped run, in short segments.
#
# The tuner descends over placements, `TransportPlan`; any other parameters that become decisions descend alike.

LEANING = 2.0  # of a start towards a given plan, in logits
EMPTY = 1e-9  # part of all work in columns that belong to no group: Sinkhorn needs more than nothing
SEGMENT = 25  # steps of a compiled call; the time limit is checked in between
SHORT = 2**25  # entries [step, layer, restart, batch, token, node]: fewer take less to run than compiling saves
MEMORY_WEIGHT = 10.0  # relative time that a node filled twice over costs


class Annealed(NamedTuple):
    """Temperatures and a width that are annealed: scalars for one step, or arrays [step]."""

    temperature: Float[Array, "..."]  # of the transport plan
    width: Float[Array, "..."]  # of the soft hosts
    max_temperature: Float[Array, "..."]  # of the smooth maximum


class Landscape(NamedTuple):
    """Arguments of the relaxed objective of every layer: model, frequencies, memory and settings of the descent.

    Its leaves are arrays, so that another value compiles nothing anew.
    """

    model: Layer
    frequency: Float[Array, "layer expert"]
    node_part: Float[Array, " node"]
    room: Float[Array, " node"]
    scale: Float[Array, ""]  # s: a layer's compute time if work were even
    budget_spread: Float[Array, ""]
    learning_rate: Float[Array, ""]
    aim: Objective
    serving: AbstractServing | None = None  # of copies, where that is decided at run time


class Descent(NamedTuple):
    """State of the descent; leaves are [layer, restart, ...]."""

    plans: AbstractParameters
    optimiser: optax.OptState  # of the plans' floating-point leaves


def landscape(problem: PlacementProblem, budget_spread: float, learning_rate: float) -> Landscape:
    """The objective of a problem, as arrays."""
    model = problem.model
    work = problem.batch_tokens * problem.trace.top_k * float(model.costs.flops_per_token_expert)
    flops = np.asarray(model.machine.die.flops, float)
    return Landscape(
        model=model,
        frequency=jnp.asarray(problem.frequency, jnp.float32),
        node_part=jnp.asarray(problem.pace, jnp.float32),
        room=jnp.asarray(problem.room, jnp.float32),
        scale=jnp.asarray(work / flops.sum(), jnp.float32),
        budget_spread=jnp.asarray(budget_spread, jnp.float32),
        learning_rate=jnp.asarray(learning_rate, jnp.float32),
        aim=problem.aim,
        serving=problem.serving,
    )


def start(problem: PlacementProblem, restarts: int, seed: int) -> Descent:
    """Random plans for every layer and restart."""
    layers, experts = problem.frequency.shape
    return start_from(random_plans(seed, layers, restarts, experts, problem.num_nodes))


def start_in_groups(
    problem: PlacementProblem,
    group: Int[np.ndarray, "layer restart node"],
    lean: Float[np.ndarray, "layer restart expert node"],
    seed: int,
) -> Descent:
    """Random plans for every layer and restart, each over groups of its own, which lean towards given plans."""
    layers, experts = problem.frequency.shape
    plans = random_plans(seed, layers, group.shape[1], experts, problem.num_nodes)
    member = group[:, :, None] == np.arange(problem.num_nodes)[:, None]  # [layer, restart, group, node]
    logits = plans.logits + LEANING * jnp.asarray(np.einsum("lren,lrgn->lreg", lean, member), jnp.float32)
    return start_from(GroupedPlan(logits, plans.budget, jnp.asarray(group)))


def start_from(parameters: AbstractParameters) -> Descent:
    """Returns a descent at its first step from these parameters, whose leaves are [layer, restart, ...]."""
    return Descent(parameters, _fresh_optimisers(parameters))


@jax.jit
def _fresh_optimisers(plans: AbstractParameters) -> optax.OptState:
    return jax.vmap(jax.vmap(optax.scale_by_adam().init))(eqx.filter(plans, eqx.is_inexact_array))


@eqx.filter_jit
def relaxed_shares(
    land: Landscape, plans: AbstractParameters, temperature: Float[Array, ""]
) -> Float[Array, "layer restart expert node"]:
    """Shares of all plans [layer, restart] at a temperature."""

    def share(plan: AbstractParameters, frequency: Float[Array, " expert"]) -> Float[Array, "expert node"]:
        return plan.decisions(frequency, land.node_part, temperature, land.budget_spread).share

    return jax.vmap(lambda plans, frequency: jax.vmap(lambda plan: share(plan, frequency))(plans))(
        plans, land.frequency
    )


def relaxed_objective(
    plan: AbstractParameters, land: Landscape, frequency: Float[Array, " expert"], batches: Batch, now: Annealed
) -> Float[Array, ""]:
    """Relaxed objective of one layer over batches, relative to its compute time with even work.

    Memory beyond a node's room adds a penalty.
    """
    decisions = plan.decisions(frequency, land.node_part, now.temperature, land.budget_spread)
    decisions = replace(decisions, serving=land.serving)
    stored = decisions.stored
    support = soft_hosts(plan.typical_part(frequency, stored.shape[1]), now.width)
    reduction = SmoothMax(now.max_temperature)
    seconds = over_batches(
        lambda batch: land.model.time(decisions, batch, reduction, support).total, batches, stored.shape[1]
    )
    time = land.aim(seconds, reduction)
    held = stored if land.model.mode == "sharded" else support.presence(support.amount(stored))
    overfull = jnp.maximum(held.sum(axis=0) / land.room - 1, 0)
    return time / land.scale + MEMORY_WEIGHT * jnp.sum(overfull**2)


@eqx.filter_jit
def descend(
    land: Landscape, state: Descent, batches: Batch, schedule: Annealed
) -> tuple[Descent, Float[Array, "step layer restart"]]:
    """One segment of descent on `batches` as `segment_batches` has them. Returns the objective, s."""

    def update(plan, optimiser, frequency, batches, now):
        value, gradient = eqx.filter_value_and_grad(relaxed_objective)(plan, land, frequency, batches, now)
        direction, optimiser = optax.scale_by_adam().update(gradient, optimiser)
        # The plan depends on logits / temperature: steps that shrink with the temperature stay as long for it.
        rate = land.learning_rate * now.temperature
        plan = eqx.apply_updates(plan, jax.tree.map(lambda change: -rate * change, direction))
        return plan, optimiser, value * land.scale

    def step(state: Descent, given):
        batches, now = given
        over_restarts = jax.vmap(update, in_axes=(0, 0, None, None, None))
        over_layers = jax.vmap(over_restarts, in_axes=(0, 0, 0, 0, None))
        plans, optimiser, seconds = over_layers(*state, land.frequency, batches, now)
        return Descent(plans, optimiser), seconds

    return jax.lax.scan(step, state, (batches, schedule))


@eqx.filter_jit(compiler_options=LIGHT)  # type: ignore[call-overload]  # an option of JAX
def descend_soon(
    land: Landscape, state: Descent, batches: Batch, schedule: Annealed
) -> tuple[Descent, Float[Array, "step layer restart"]]:
    """`descend`, compiled in half of the time, and a quarter slower to run: for short descents."""
    return descend(land, state, batches, schedule)


def compiled(
    segments: int, land: Landscape, state: Descent, batches: Batch, schedule: Annealed
) -> Callable[[Landscape, Descent, Batch, Annealed], tuple[Descent, Float[Array, "step layer restart"]]]:
    """`descend`, or where so many segments are short `descend_soon`, compiled for these arguments."""
    restarts = jax.tree.leaves(state)[0].shape[1]
    short = batches.weight.size * segments * restarts * land.node_part.size <= SHORT
    segment = descend_soon if short else descend
    compile_ahead(segment, land, state, batches, schedule)
    return segment


def schedule(first: int, steps: int, ends: dict[str, tuple[float, float]]) -> Annealed:
    """Annealed values of the segment that begins at step `first` of `steps`."""
    progress = np.minimum((first + np.arange(SEGMENT)) / max(steps - 1, 1), 1)
    return Annealed(**{name: jnp.asarray(geometric(*ends[name], progress), jnp.float32) for name in Annealed._fields})


def segment_batches(problem: PlacementProblem, batches_per_step: int, seed: int, tokens: int | None = None) -> Batch:
    """Fresh batches for one segment, leaves [step, layer, batch, ...]; merged ones share rows [step, layer, row, ...].

    With `tokens`, large batches keep only their first so many tokens, with weights scaled up in proportion.
    """
    drawn = problem.draw(SEGMENT * batches_per_step, seed)
    if tokens is not None and tokens < drawn.weight.shape[-1] and drawn.experts.ndim > drawn.weight.ndim:
        scale = drawn.weight.shape[-1] / tokens
        drawn = jax.tree.map(lambda leaf: leaf[:, :, :tokens], drawn)
        drawn = replace(drawn, weight=drawn.weight * scale)
    return _by_step(problem.merged(drawn))


@jax.jit
def _by_step(drawn: Batch) -> Batch:
    """Batches [layer, all steps' batches, ...] as [step, layer, batch, ...]; rows that all share come with each."""
    merged = drawn.experts.ndim == drawn.weight.ndim

    def split(leaf: Array) -> Array:
        if merged:
            return jnp.broadcast_to(leaf, (SEGMENT, *leaf.shape))
        return jnp.moveaxis(leaf.reshape(leaf.shape[0], SEGMENT, -1, *leaf.shape[2:]), 1, 0)

    weight = drawn.weight.reshape(drawn.weight.shape[0], SEGMENT, -1, drawn.weight.shape[-1])
    return replace(jax.tree.map(split, drawn), weight=jnp.moveaxis(weight, 1, 0))
