"""Balancers: which experts have copies where, decided anew from iteration to iteration, and when weights move.

A template for all (moentwine V-B, Eq. 2): device loads are forecast from history; when the imbalance of all layers
together exceeds alpha, and the last migration is more than beta iterations ago, new slots are chosen. An invasive
balancer interrupts inference until the weights are there. A non-invasive one lets them travel on idle links; until all
have arrived the copies before go on serving, so a node has memory for what it gets beside what it has.
"""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.errors import InputError
from jaxmoe.hardware import Machine
from jaxmoe.engine import LayerModel, LayerTime
from jaxmoe.engine.counts import CountModel
from jaxmoe.placement.slot_loads import excess_over_mean, node_loads
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.slots import EMPTY
from jaxmoe.policies.forecast import AbstractForecast, State
from jaxmoe.policies.migration import (
    Moves,
    Slots,
    Windows,
    iterations_needed,
    link_seconds,
    moves_between,
)
from jaxmoe.policies.shadow_slots import Choice, fill_shadow_slots
from jaxmoe.relax import largest
from jaxmoe.units import GIGA

# Rules that choose slots.


class AbstractRule(eqx.Module):
    """Chooses slots for expected loads."""

    @abc.abstractmethod
    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        """The slots of all layers; `resident` is what they hold now, in use or not."""


class KeepSlots(AbstractRule):
    """No balancing."""

    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        return resident


class Eplb(AbstractRule):
    """EPLB, for all slots anew, native ones too.

    It numbers its packs of experts regardless of where experts are. `renamed`, each device in turn takes the pack of
    which it holds most; the balance is the same, and less moves.
    """

    groups: int = eqx.field(static=True, default=1)
    nodes: int = eqx.field(static=True, default=1)
    renamed: bool = eqx.field(static=True, default=False)

    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        layers, devices, count = resident.shape
        chosen = eplb(expected, devices * count, devices, self.groups, self.nodes)
        packs = chosen.reshape(layers, devices, count).astype(resident.dtype)
        return jax.vmap(_renamed)(packs, resident) if self.renamed else packs


def _renamed(packs: Int[Array, "node slot"], resident: Int[Array, "node slot"]) -> Int[Array, "node slot"]:
    """Packs dealt to the nodes that hold most of them, node by node."""

    def take(free: Bool[Array, " pack"], held: Int[Array, " slot"]) -> tuple[Bool[Array, " pack"], Int[Array, ""]]:
        alike = (packs[:, :, None] == held).any(axis=2).sum(axis=1)
        pack = jnp.argmax(jnp.where(free, alike, -1))
        return free.at[pack].set(False), pack

    return packs[jax.lax.scan(take, jnp.ones(len(packs), bool), resident)[1]]


class ShadowSlots(AbstractRule):
    """Algorithm 1 of moentwine (`nearest`), or copies of the hottest on the coldest (`coldest`).

    The first `native` slots of every node keep what they hold.
    """

    distance: Float[Array, "node node2"]  # hops
    native: int = eqx.field(static=True)
    choice: Choice = eqx.field(static=True, default="nearest")

    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        def layer(loads: Float[Array, " expert"], resident: Int[Array, "node slot"]) -> Int[Array, "node slot"]:
            fixed, shadow = resident[:, : self.native], resident[:, self.native :]
            filled = fill_shadow_slots(loads, fixed, shadow, self.distance, self.choice)
            return jnp.concatenate([fixed, filled], axis=1)

        return jax.vmap(layer)(expected, resident)


# A balancer over iterations.


class BalancerState(NamedTuple):
    """What is remembered from iteration to iteration."""

    forecast: State
    slots: Slots  # that serve
    resident: Slots  # what slots hold: a copy that no longer serves stays until another takes its slot
    target: Slots  # on their way
    left: Float[Array, ""]  # part of the weights still to travel
    needed: Float[Array, " link"]  # seconds of links for all that travels
    since: Float[Array, ""]  # iterations since the last migration began


class Balanced(NamedTuple):
    """What was decided for an iteration."""

    slots: Slots
    target: Slots  # what slots will be when all weights that travel have arrived
    seconds: Float[Array, ""]  # that inference waits for weights
    experts_moved: Float[Array, " layer"]
    expert_hops: Float[Array, " layer"]
    imbalance: Float[Array, ""]  # expected, Eq. 2: over all layers
    triggered: Bool[Array, ""]
    needed: Float[Array, ""]  # seconds of the busiest link for what was decided to move


class Balancer(eqx.Module):
    """A rule with its trigger, its forecast and its way to move weights.

    `entry` is the node of the edge through which a node reaches disks; without it weights come from the nearest copy.
    `windows` are those of a non-invasive balancer, `None` of an invasive one.
    """

    rule: AbstractRule
    forecast: AbstractForecast
    start: Slots
    distance: Float[Array, "node node2"]  # hops
    alpha: Float[Array, ""]
    beta: Float[Array, ""]
    windows: Windows | None = None
    entry: Int[Array, " node"] | None = None

    def __check_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not isinstance(value, jax.core.Tracer) and not (np.asarray(value) >= 0).all():
                raise BalancerError(f"{name} is {np.asarray(value):g}, expected a number of at least 0")

    def init(self, machine: Machine) -> BalancerState:
        links = jnp.zeros(machine.topology.num_links)
        start, never = self.start, jnp.asarray(jnp.inf, jnp.float32)
        return BalancerState(self.forecast.init(), start, start, start, jnp.zeros(()), links, never)

    def step(
        self,
        model: CountModel | LayerModel,
        state: BalancerState,
        loads: Float[Array, "layer expert"],
        idle: Float[Array, " link"],
    ) -> tuple[BalancerState, Balanced]:
        """The state after an iteration of `loads`, and what was decided just before it.

        `idle` is for how long the iteration before left links idle in the windows. Loads only serve the forecast.
        """
        remembered, expected = self.forecast.step(state.forecast, loads)
        state = _arrived(state._replace(forecast=remembered), idle)
        imbalance = excess_over_mean(jax.vmap(node_loads)(state.slots, expected)).sum()
        ready = (state.left <= 0) & (state.since > self.beta)
        triggered = ready & (imbalance > self.alpha)
        layers, links = loads.shape[0], model.machine.topology.num_links

        def choose() -> tuple[Slots, Moves, Float[Array, " link"]]:
            target = self.rule(expected, state.resident)
            moves = moves_between(state.resident, target, self.distance, self.entry)
            return target, moves, link_seconds(model.machine.topology, moves, model.costs.expert_bytes)

        def keep() -> tuple[Slots, Moves, Float[Array, " link"]]:
            nothing = Moves(jnp.zeros_like(self.distance), jnp.zeros(layers), jnp.zeros(layers))
            return state.slots, nothing, jnp.zeros(links)

        target, moves, needed = jax.lax.cond(triggered, choose, keep)
        moving = moves.per_layer.sum() > 0
        # Slots that need no weights serve at once, and so do all of an invasive balancer.
        at_once = ~moving if self.windows is not None else jnp.asarray(True)
        serve_now = triggered & at_once
        waits = jnp.zeros(()) if self.windows is not None else largest(needed)
        begun = triggered & moving
        after = BalancerState(
            state.forecast,
            jnp.where(serve_now, target, state.slots),
            jnp.where(serve_now, _holding(target, state.resident), state.resident),
            jnp.where(triggered, target, state.target),
            jnp.where(begun & ~at_once, 1.0, state.left),
            jnp.where(begun & ~at_once, needed, state.needed),
            jnp.where(begun, 1.0, state.since + 1),
        )
        moved = (moves.per_layer, moves.hops)
        return after, Balanced(after.slots, after.target, waits, *moved, imbalance, triggered, largest(needed))


def _arrived(state: BalancerState, idle: Float[Array, " link"]) -> BalancerState:
    """After an iteration that left links `idle`: weights have come further, or are there and serve."""
    moving = state.left > 0
    left = jnp.where(moving, state.left - 1 / iterations_needed(state.needed, idle), 0)
    landed = moving & (left <= 1e-6)
    return state._replace(
        slots=jnp.where(landed, state.target, state.slots),
        resident=jnp.where(landed, _holding(state.target, state.resident), state.resident),
        left=jnp.where(landed, 0, jnp.maximum(left, 0)),
    )


def _holding(target: Slots, resident: Slots) -> Slots:
    return jnp.where(target == EMPTY, resident, target)


class BalancerError(InputError):
    """A balancer that cannot be, with the reason and the remedy."""


def first_slots(layers: int, experts: int, nodes: int, shadow: int) -> Int[np.ndarray, "layer node slot"]:
    """Native slots with experts in order, as evenly as they go, and `shadow` empty slots on every node.

    Fewer experts than nodes are spread over them; what is left of native slots stays empty.
    """
    native = -(-experts // nodes)
    slots = np.full((layers, nodes, native + shadow), EMPTY, np.int32)
    node = np.arange(experts) * nodes // experts
    place = np.arange(experts) - np.searchsorted(node, node)
    slots[:, node, place] = np.arange(experts)
    return slots


def check_slots_fit(
    slots: Int[np.ndarray, "layer node slot"], expert_bytes: float, machine: Machine, arriving: int = 0
) -> None:
    """Raise `BalancerError` where the slots of all layers need more memory than a node has for weights.

    `arriving` are slots whose next expert comes while the one before still serves, as without interruption.
    """
    if machine.capacity is None:
        return
    layers, nodes, count = slots.shape
    needed, least = layers * (count + arriving) * expert_bytes, float(np.min(machine.capacity))
    if needed > least:
        beside = f", and room for {arriving} more that arrive meanwhile," if arriving else ""
        most = max(int(least // (layers * expert_bytes)) - arriving, 0)
        raise BalancerError(
            f"{count} slots{beside} on each of {nodes} nodes in {layers} layers need {needed / GIGA:.4g} GB a node, "
            f"but a node has {least / GIGA:.4g} GB; have at most {most} slots"
        )


# A balancer run over iterations.


class Iterations(NamedTuple):
    """Times [step, layer], without what keeps resources busy, and what was decided, [step, ...], without slots."""

    time: LayerTime
    decided: Balanced
    excess: Float[Array, "step layer"]  # of device loads over their mean, as they came


@eqx.filter_jit
def balanced_rollout(
    balancer: Balancer, model: CountModel, loads: Float[Array, "step layer *group expert"]
) -> Iterations:
    """Run a balancer over the loads of iterations, in choices of each expert, of all groups or group by group.

    Every iteration has a stage `migration`: what inference waits for weights, divided among layers as experts moved.
    """

    def step(carry, given: Float[Array, "layer *group expert"]):
        state, idle = carry
        layers, experts = given.shape[0], given.shape[-1]
        summed = given.reshape(layers, -1, experts).sum(axis=1)
        state, decided = balancer.step(model, state, summed, idle)
        times = jax.vmap(model)(decided.slots, given)
        if balancer.windows is not None:
            idle = balancer.windows.idle(times)
        moved = decided.experts_moved
        migration = decided.seconds * moved / jnp.maximum(moved.sum(), 1)
        charged = LayerTime(times.stages | {"migration": migration}, {}, times.total + migration)
        excess = excess_over_mean(jax.vmap(node_loads)(decided.slots, summed))
        nothing = jnp.zeros(())
        return (state, idle), Iterations(charged, decided._replace(slots=nothing, target=nothing), excess)

    idle = jnp.zeros(model.machine.topology.num_links)
    return jax.lax.scan(step, (balancer.init(model.machine), idle), loads)[1]
