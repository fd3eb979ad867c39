"""Balancers: which experts have copies where, decided anew from iteration to iteration, and when weights move.

A template for all (moentwine V-B, Eq. 2): device loads are forecast from history; when the imbalance of all layers
together exceeds alpha, and the last migration is more than beta iterations ago, new slots are chosen. An invasive
balancer interrupts inference until the weights are there. A non-invasive one lets them travel on idle links; until all
have arrived the copies before go on serving, so a node has memory for what it gets beside what it has.
"""

import abc
from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine import AbstractMethod, LayerTime, Migration, SlotDecisions
from jaxmoe.errors import InputError
from jaxmoe.hardware import Machine
from jaxmoe.methods.forecast import AbstractForecast, Loads, State
from jaxmoe.methods.moentwine.migration import ExpertTransfers, Slots, Windows, iterations_needed, moves_between
from jaxmoe.methods.moentwine.shadow_slots import Choice, fill_shadow_slots
from jaxmoe.network import link_loads
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.slots import EMPTY, excess_over_mean, node_loads, slots_of_share
from jaxmoe.relax import largest
from jaxmoe.traces import Batch
from jaxmoe.units import GIGA

# Rules that choose slots.


class AbstractRule(eqx.Module):
    """Chooses slots for expected loads."""

    @abc.abstractmethod
    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        """The slots of all layers; `resident` is what they hold now, in use or not."""


class KeepSlots(AbstractRule):
    """Keeps all slots as they are: no balancing."""

    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        return resident


class Eplb(AbstractRule):
    """Chooses all slots by EPLB, native ones too.

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
    """State of a balancer between iterations: its forecast, all slots, and the migration that is under way."""

    forecast: State
    slots: Slots  # that serve
    resident: Slots  # what slots hold: a copy that no longer serves stays until another takes its slot
    target: Slots  # on their way
    left: Float[Array, ""]  # part of the weights still to travel
    needed: Float[Array, " link"]  # seconds of links for all that travels
    since: Float[Array, ""]  # iterations since the last migration began


class Balancer(AbstractMethod):
    """A rule with its trigger, its forecast and its way to move weights.

    `entry` is the node of the edge through which a node reaches disks; without it weights come from the nearest copy.
    `windows` are those of a non-invasive balancer, `None` of an invasive one. `homes` are those of tokens, where a
    layout has them.
    """

    rule: AbstractRule
    forecast: AbstractForecast
    start: Slots
    distance: Float[Array, "node node2"]  # hops
    alpha: Float[Array, ""]
    beta: Float[Array, ""]
    windows: Windows | None = None
    entry: Int[Array, " node"] | None = None
    homes: Int[Array, " token"] | None = None
    expert_bytes: Float[Array, ""] = eqx.field(kw_only=True)  # B of weights
    experts: int = eqx.field(static=True, kw_only=True)  # of a layer

    def __check_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not isinstance(value, jax.core.Tracer) and not (np.asarray(value) >= 0).all():
                raise BalancerError(f"{name} is {np.asarray(value):g}, expected a number of at least 0")

    def init(self, machine: Machine) -> BalancerState:
        links = jnp.zeros(machine.topology.num_links)
        start, never = self.start, jnp.asarray(jnp.inf, jnp.float32)
        return BalancerState(self.forecast.init(), start, start, start, jnp.zeros(()), links, never)

    def step(
        self, machine: Machine, state: BalancerState, tokens: Batch | Loads, last: LayerTime
    ) -> tuple[BalancerState, SlotDecisions]:
        """The state after an iteration, and slots decided just before it; loads of its tokens only serve the forecast.

        Weights that travel have come further by what the iteration before left idle. The facts of the decisions are
        `target`, what slots will be when all weights that travel have arrived; `experts_moved` and `expert_hops`
        [layer]; `imbalance`, expected, of Eq. 2 over all layers; `triggered`; `needed`, seconds of the busiest link for
        what was decided to move; and `excess`, of device loads over their mean, as they came [layer].
        """
        loads = loads_of(tokens, self.experts)
        remembered, expected = self.forecast.step(state.forecast, loads)
        state = state._replace(forecast=remembered)
        if self.windows is not None:
            state = _arrived(state, self.windows.idle(last))
        imbalance = excess_over_mean(jax.vmap(node_loads)(state.slots, expected)).sum()
        ready = (state.left <= 0) & (state.since > self.beta)
        triggered = ready & (imbalance > self.alpha)
        layers, topology = loads.shape[0], machine.topology

        def choose() -> tuple[Slots, ExpertTransfers, Float[Array, " link"]]:
            target = self.rule(expected, state.resident)
            moves = moves_between(state.resident, target, self.distance, self.entry)
            return target, moves, link_loads(topology, moves.traffic)

        def keep() -> tuple[Slots, ExpertTransfers, Float[Array, " link"]]:
            nothing = ExpertTransfers(jnp.zeros_like(self.distance), jnp.zeros(layers), jnp.zeros(layers))
            return state.slots, nothing, jnp.zeros(topology.num_links)

        target, moves, carried = jax.lax.cond(triggered, choose, keep)
        needed = carried * self.expert_bytes / topology.link_rate
        moving = moves.per_layer.sum() > 0
        # Slots that need no weights serve at once, and so do all of an invasive balancer.
        at_once = ~moving if self.windows is not None else jnp.asarray(True)
        serve_now = triggered & at_once
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
        facts = {
            "target": after.target,
            "experts_moved": moves.per_layer,
            "expert_hops": moves.hops,
            "imbalance": jnp.broadcast_to(imbalance, layers),
            "triggered": jnp.broadcast_to(triggered, layers),
            "needed": jnp.broadcast_to(largest(needed), layers),
            "excess": excess_over_mean(jax.vmap(node_loads)(after.slots, loads)),
        }
        return after, SlotDecisions(
            after.slots, self.experts, self._homes(layers), self._waiting(moves, carried), facts
        )

    def _waiting(self, moves: ExpertTransfers, carried: Float[Array, " link"]) -> Migration:
        """Returns the migration that inference waits for, divided among layers by how many experts each moves.

        All parts are 0 for a non-invasive balancer, whose weights use idle links.
        """
        layers = len(moves.per_layer)
        part = moves.per_layer / jnp.maximum(moves.per_layer.sum(), 1)
        part = part if self.windows is None else jnp.zeros_like(part)
        return Migration(jnp.broadcast_to(carried, (layers, *carried.shape)), part)

    def _homes(self, layers: int) -> Int[Array, "layer token"] | None:
        return None if self.homes is None else jnp.broadcast_to(self.homes, (layers, *self.homes.shape))


def loads_of(tokens: Batch | Loads, experts: int) -> Float[Array, "layer expert"]:
    """Choices of every expert in all layers, of tokens or of counts [layer, *group, expert]."""
    if not isinstance(tokens, Batch):
        return tokens.reshape(len(tokens), -1, experts).sum(axis=1)

    def counted(batch: Batch) -> Float[Array, " expert"]:
        chosen = jnp.where(batch.experts < 0, experts, batch.experts)
        return jnp.zeros(experts + 1).at[chosen].add(batch.weight[:, None])[:experts]

    return jax.vmap(counted)(tokens)


def _arrived(state: BalancerState, idle: Float[Array, " link"]) -> BalancerState:
    """Returns the state after weights travelled for the links' `idle` seconds; slots serve once all have arrived."""
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


def facts_alone(decisions: SlotDecisions, time: LayerTime) -> tuple[LayerTime, Mapping[str, Array]]:
    """Keeps facts and times of an iteration for `rollout`, but no slots and no busy seconds of resources."""
    return time.without_busy(), {name: fact for name, fact in decisions.facts.items() if name != "target"}


class BalancerError(InputError):
    """Settings that no balancer can have. The message has the reason and the remedy."""


def first_slots(share: Float[np.ndarray, "layer expert node"], shadow: int) -> Int[np.ndarray, "layer node slot"]:
    """Slots that hold the experts of a plan of whole ones, in order, and `shadow` empty ones on every node.

    Every node has as many native slots as the one with most experts.
    """
    hosted = (share > 0.5).astype(np.float32)
    native = int(hosted.sum(axis=1).max())
    slots = slots_of_share(hosted, native).reshape(len(share), share.shape[2], native)
    return np.pad(slots, ((0, 0), (0, 0), (0, shadow)), constant_values=EMPTY).astype(np.int32)


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
